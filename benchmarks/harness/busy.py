"""A GPU of which some multiprocessors are kept busy, as by a program of somebody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

ELEMENTS, WARPS, TURNS, QUEUED = 32768, 32, 50_000, 4


@triton.jit
def _occupy(out, turns, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply and add in registers: ``WARPS`` warps that hold most registers of a multiprocessor."""
    places = tl.arange(0, ELEMENTS)
    values = places.to(tl.float32)
    for _ in range(turns):
        values = values * 0.999 + 1.0
    tl.store(out + places, values, mask=values < 0)  # never, but the compiler does not know


@contextmanager
def kept_busy(device: torch.device, multiprocessors: int) -> Iterator[None]:
    """Meanwhile so many multiprocessors of ``device`` run a kernel of another stream; short ones, one after another."""
    out = torch.empty(ELEMENTS, dtype=torch.float32, device=device)
    stream, stop = torch.cuda.Stream(device), threading.Event()

    def launch() -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            _occupy[(multiprocessors,)](out, TURNS, ELEMENTS, num_warps=WARPS)
            done.record(stream)
        return done

    def work() -> None:
        queued = [launch() for _ in range(QUEUED)]
        while not stop.is_set():
            while not queued[0].query() and not stop.is_set():
                stop.wait(0.001)
            queued = [*queued[1:], launch()]

    launch().synchronize()  # compiled before others are timed
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        stream.synchronize()
