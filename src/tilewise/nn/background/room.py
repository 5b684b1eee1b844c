"""Whether operands for measuring fit into memory that training leaves free."""

from __future__ import annotations

import torch

from tilewise.machine.device import torch_device, total_memory
from tilewise.plan import format_bytes
from tilewise.problems.base import Problem

__all__ = ["Room"]

COPIES = 2
"""Operands and results are there twice while a plan is checked."""
SHARE = 0.5
"""The share of free memory that may be taken: blocks are larger than what is in them, and steps differ."""


class Room:
    """Watches how much memory training needs at its peak, on each GPU.

    What measuring holds between two steps is taken from the rest, so that training never runs out by it.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}

    def look(self, device: torch.device) -> None:
        """Before a turn: take note of the peak since the last :meth:`begin`. Nothing on a CPU."""
        if device.type == "cuda":
            index = _index(device)
            # Not by max_memory_allocated: it makes a flat table of all numbers first, which takes longer than a kernel.
            peak = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]["peak"]
            self._peaks[index] = max(self._peaks.get(index, 0), peak)

    def begin(self, device: torch.device) -> None:
        """After a turn: what was measured in it is no part of training's peak."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(_index(device))

    def why_not(self, problem: Problem) -> str:
        """Why there is no room now to measure ``problem``; empty where there is."""
        needed = COPIES * sum(problem.nbytes(role) for role in problem.roles)
        free = self.free(torch_device(problem.device))
        if needed <= SHARE * free:
            return ""
        return (
            f"measuring needs {format_bytes(needed)}, and training leaves {format_bytes(max(free, 0))} free, of which "
            f"{SHARE:.0%} may be taken: plan before training, by optimize(..., wait=True)"
        )

    def free(self, device: torch.device) -> int:
        """Bytes that training leaves free on ``device``, at its peak so far."""
        if device.type != "cuda":
            return _available()
        index = _index(device)
        outside, _ = torch.cuda.mem_get_info(index)
        reserved = torch.cuda.memory_reserved(index)
        peak = max(self._peaks.get(index, 0), torch.cuda.memory_allocated(index))
        return outside + reserved - peak


def _index(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def _available() -> int:
    """Bytes that Linux can hand out without swapping; on another system all that the machine has."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return total_memory(torch.device("cpu"))
