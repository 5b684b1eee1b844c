"""Models on images that are too large for one device: each rank holds a stripe or block of every activation."""

from tilewise.comm.agreement import RankMismatch
from tilewise.comm.link import PeerError
from tilewise.distributed.layout import Grid, Layout
from tilewise.distributed.parallel import SpatialParallel
from tilewise.distributed.shard import Shard, UnknownLayer, handles

__all__ = ["Grid", "Layout", "PeerError", "RankMismatch", "Shard", "SpatialParallel", "UnknownLayer", "handles"]
