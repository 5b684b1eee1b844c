"""What the thread that plans needs once: modules of solvers, and libraries' handles, which belong to a thread."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterable

import torch

from tilewise import solvers
from tilewise.machine.device import torch_device
from tilewise.machine.turns import beside, in_turns, pause, wait_apart
from tilewise.problems.base import Problem

__all__ = ["ignore_captures", "prepare", "warm_up"]

THREAD_LOCAL = 1
"""CUDA's ``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


def prepare(problems: Iterable[Problem], most_s: float = math.inf) -> None:
    """Import what planning ``problems`` takes, for about ``most_s`` seconds at the most.

    On the thread that plans that is done beside the program, and the thread's handles are made.
    """
    until = time.perf_counter() + most_s
    listed = {problem.device: problem for problem in problems}
    with beside():
        for problem in listed.values():
            for solver in solvers.solving(problem):
                pause()
                if time.perf_counter() > until:
                    return
                with contextlib.suppress(Exception):  # said where a search asks
                    solver.why_not(problem)
            if problem.device_type == "cuda" and in_turns():
                _make_handles(torch_device(problem.device))


def warm_up(problem: Problem) -> None:
    """Have libraries compile and load kernels for ``problem`` on a thread of its own, while the program goes on."""
    warm = None
    with contextlib.suppress(Exception):  # it fails again where it is measured
        warm = solvers.baseline(problem).warm_up(problem)
    if warm is None:
        return

    device = torch_device(problem.device)  # of several alike this thread's own

    def run() -> None:
        """Do it, whatever comes of it."""
        if ignore_captures():
            with contextlib.suppress(Exception), torch.cuda.device(device):
                warm()

    thread = threading.Thread(target=run, name="tilewise warming up", daemon=True)
    thread.start()
    wait_apart(lambda: not thread.is_alive())


def _make_handles(device: torch.device) -> None:
    """Make this thread's handles of cuDNN and cuBLAS, by tiny products."""
    with torch.no_grad(), torch.cuda.device(device):
        images = torch.zeros((1, 8, 8, 8), dtype=torch.float32, device=device)
        torch.nn.functional.conv2d(images, images[:, :, :1, :1].contiguous())
        pause()
        rows = torch.zeros((8, 8), dtype=torch.float32, device=device)
        torch.mm(rows, rows)


def ignore_captures() -> bool:
    """Let this thread load kernels and allocate while another records a CUDA graph, as that takes no note of it.

    By default such calls of any thread would make the recording fail. Returns whether that is settled.
    """
    try:
        mode = ctypes.c_int(THREAD_LOCAL)
        return int(ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))) == 0
    except (OSError, AttributeError):
        return False
