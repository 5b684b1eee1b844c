"""Models on images that are too large for one device: each rank holds a stripe or block of every activation.

>>> from tilewise.distributed import Grid, Layout
>>> layout = Layout(Grid(dims=(-2,), shape=(2,), coords=(0,)), cuts=((0, 112, 224),))
>>> layout.part((1, 3, 224, 224))  # what the first of two ranks holds
(1, 3, 112, 224)
"""

from tilewise.comm.agreement import RankMismatch
from tilewise.comm.failure_detector import PeerError
from tilewise.distributed.optimize import optimize
from tilewise.distributed.parallel import SpatialParallel
from tilewise.distributed.parts.layout import Grid, Layout
from tilewise.distributed.shards.channels import sum_gradient_over, sum_over
from tilewise.distributed.shards.shard import Shard, UnknownLayer, handles
from tilewise.distributed.uneven import UnevenMean, uneven_mean

__all__ = [
    "Grid",
    "Layout",
    "PeerError",
    "RankMismatch",
    "Shard",
    "SpatialParallel",
    "UnevenMean",
    "UnknownLayer",
    "handles",
    "optimize",
    "sum_gradient_over",
    "sum_over",
    "uneven_mean",
]
