"""The buffers with which ranks sum few numbers through each other's memory.

The sums themselves are part of the kernel that needs them (:mod:`tilewise.kernels.triton.norm_sums`).
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
    """The buffers of all ranks, as seen by rank ``index``. They are zero at first, and all ranks use them in one order.

    ``channels`` is the most numbers in a row, a multiple of ``BLOCK``. After ``timeout`` seconds a kernel gives up, and
    :meth:`late` tells for which rank it waited. ``kept`` is an object that keeps the buffers alive.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], index: int, channels: int, timeout: float, kept: object = None
    ) -> None:
        if channels <= 0 or channels % BLOCK:
            raise ValueError(f"channels={channels}: a multiple of {BLOCK} above 0 would do")
        self.index, self.ranks, self.channels = index, len(buffers), channels
        self._buffers, self._kept = list(buffers), kept
        buffer = buffers[index]
        super().__init__(buffer.device, timeout)
        self.table = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device="cpu").to(buffer.device)
        """Addresses of the buffers."""
        self.counts = torch.zeros(channels // BLOCK, dtype=torch.int32, device=buffer.device)
        """How many sums each block has seen."""

    @staticmethod
    def nbytes(ranks: int, channels: int) -> int:
        """The bytes of every rank's buffer."""
        return ranks * TURNS * (8 * TERMS * channels + 4 * (channels // BLOCK))
