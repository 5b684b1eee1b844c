"""Memory for workspaces: from the caching allocator on a GPU, kept by each thread on a CPU."""

from __future__ import annotations

import threading

import torch

__all__ = ["GRAIN", "Workspaces", "aligned"]

GRAIN = 256
"""Bytes: every piece carved from a workspace starts at a multiple of this."""


class Workspaces(threading.local):
    """The workspace of each thread on a CPU, grown to the largest size asked for and kept.

    Fresh pages would fault at every call. On a GPU torch's caching allocator keeps memory by stream already, also while
    a graph is captured, and lends it to other layers in between. So there a workspace is taken from it for each call.
    """

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        """Free the buffer of this thread."""
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._resident = 0

    def touch(self, size: int) -> None:
        """Write the first ``size`` bytes of the CPU's buffer, once, so that their pages are resident."""
        buffer = self.take(size, self.buffer.device)
        if size > self._resident:
            buffer[self._resident : size].fill_(0xFF)
            self._resident = size

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """A uint8 tensor of at least ``size`` bytes, for the current thread and stream."""
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self.buffer.numel() < size:
            self.release()  # first: never both at once
            self.buffer = aligned(size, device)
        return self.buffer


def aligned(size: int, device: torch.device) -> torch.Tensor:
    """A new uint8 tensor of ``size`` bytes whose address is a multiple of ``GRAIN``."""
    with torch.inference_mode(False):  # else no later call outside that mode could write them
        pages = torch.empty(size + GRAIN, dtype=torch.uint8, device=device)  # torch aligns a CPU's to 64 bytes only
        return pages.narrow(0, -pages.data_ptr() % GRAIN, size)
