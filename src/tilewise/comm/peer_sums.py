"""Sums of few numbers over ranks through each other's memory: where they lie, and what kernels are told of it.

The sums themselves are in the kernel that needs them (:mod:`tilewise.kernels.triton.norm_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.comm.waiting import Waiting

__all__ = ["PeerSums"]

TERMS, TURNS = 3, 2
"""Rows of a sum at most, and for how many sums in a row a buffer has places."""
BLOCK = 32
"""Channels of one block of a kernel."""


class PeerSums(Waiting):
    """The buffers of all ranks, as rank ``index`` sees them, all zero at first; used in one order by all ranks.

    ``channels`` is how many numbers a row has at most, a multiple of ``BLOCK``. ``timeout`` is in seconds, after which
    a kernel gives up and :meth:`late` tells for whom it waited. ``kept`` is what the buffers need to stay there.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], index: int, channels: int, timeout: float, kept: object = None
    ) -> None:
        if channels <= 0 or channels % BLOCK:
            raise ValueError(f"channels={channels}: a multiple of {BLOCK} above 0 would do")
        self.index, self.ranks, self.channels = index, len(buffers), channels
        self._buffers, self._kept = list(buffers), kept
        own = buffers[index]
        super().__init__(own.device, timeout)
        self.table = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device="cpu").to(own.device)
        """Addresses of the buffers."""
        self.counts = torch.zeros(channels // BLOCK, dtype=torch.int32, device=own.device)
        """How many sums each block has seen."""

    @staticmethod
    def nbytes(ranks: int, channels: int) -> int:
        """Size of every rank's buffer."""
        return ranks * TURNS * (8 * TERMS * channels + 4 * (channels // BLOCK))
