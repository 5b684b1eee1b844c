"""Kernels that wait for what other ranks write: how long, how they are stopped, and for which rank they waited."""

from __future__ import annotations

import math

import torch

from tilewise.comm.streams import InOrder

__all__ = ["LOOK", "Waiting"]

LOOK = 1 << 13
"""Looks at a flag between two at the page, which lies in the host's memory."""
LOOK_S = 0.25e-6
"""Least time of a look, which goes to L2 and back."""


class Waiting:
    """The common part of objects whose kernels wait on ``device``. Kernels give up after about ``timeout`` seconds."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.look = LOOK
        self.rounds = min(max(1, math.ceil(timeout / (LOOK * LOOK_S))), 2**31 - 1)
        """How often ``look`` looks are made."""
        self.page = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        """By which kernels are stopped, and on which they tell for whom they waited in vain."""
        self._seen = self.page.numpy()
        self.in_order = InOrder(device)

    def late(self) -> int | None:
        """The rank for which a kernel waited in vain, ``None`` without one. Only the host is asked."""
        rank = int(self._seen[1])
        return rank - 1 if rank else None

    def stop(self) -> None:
        """Let waiting kernels give up. It may be called from any thread, and while the GPU captures a graph."""
        self._seen[0] = 1
