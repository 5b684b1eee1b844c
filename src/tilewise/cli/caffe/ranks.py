"""Processes that train on several GPUs, one on each; Ctrl-C and hang-ups reach the first of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tilewise.frontends.caffe.training.ranks import Ranks

__all__ = ["Job", "run_ranks"]


@dataclass(frozen=True)
class Job:
    """What ``caffe train`` was asked for; plain values, since they go to other processes."""

    solver: str
    snapshot: str
    weights: tuple[str, ...]
    level: int
    stages: tuple[str, ...]
    sigint_effect: str
    sighup_effect: str


Work = Callable[[Job, "torch.device", "Ranks"], None]
"""What each rank does; a function of a module, so that other processes find it."""


def run_ranks(work: Work, job: Job, devices: list[torch.device]) -> None:
    """Run ``work`` in a process for each device and wait for all. Raises what one of them raised."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="tilewise-ranks-") as folder:
        context = spawn(rank_of, (work, job, devices, os.path.join(folder, "meeting")), nprocs=len(devices), join=False)
        assert context is not None  # as nothing was joined

        def pass_on(number: int, frame: FrameType | None) -> None:
            os.kill(context.pids()[0], number)

        before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGHUP)}
        try:
            while not context.join():
                pass
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def rank_of(rank: int, work: Work, job: Job, devices: list[torch.device], meeting: str) -> None:
    """One rank: join the others and do the work."""
    import torch

    from tilewise.frontends.caffe.training.log import show_log
    from tilewise.frontends.caffe.training.ranks import joined

    # A terminal sends its signals to all processes of a session, but the first rank alone answers them, and once.
    os.setsid()
    if rank == 0:
        show_log()
    device = devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = joined(rank, len(devices), meeting, "nccl" if device.type == "cuda" else "gloo")
    try:
        work(job, device, ranks)
    finally:
        torch.distributed.destroy_process_group()
