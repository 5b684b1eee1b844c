"""Ranks that differ, raise, die or hang: an error on every other within the time given, and nobody waits for ever."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.comm.link import Link, PeerError
from tilewise.comm.watchdog import Watchdog
from tilewise.distributed import SpatialParallel


class Faulty(nn.Module):
    """Raises, ends or sleeps on one rank, forwards or backwards."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() != self.rank:
            return x
        if self.kind == "backward":
            x.register_hook(self._fail)
        elif self.kind == "raises":
            raise OSError("the disk is full")
        elif self.kind == "dies":
            os._exit(1)
        elif self.kind == "hangs":
            time.sleep(60)
        return x

    def _fail(self, gradient: torch.Tensor) -> None:
        os._exit(1)


def step(kind: str, timeout: float, connect: Callable[[Link], object] | None = None) -> tuple[float, str]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Faulty(kind, 1), nn.Conv2d(2, 2, 3, padding=1))
    if kind == "model" and dist.get_rank() == ranks - 1:
        model[2] = nn.Conv2d(2, 2, 5, padding=1)
    mesh = init_device_mesh(torch.get_default_device().type, (ranks,), mesh_dim_names=("h",))
    began = time.monotonic()
    try:
        parallel = SpatialParallel(model, mesh, timeout=timeout)
        if connect is not None:
            connect(parallel.space.link)
        x = torch.ones(1, 2, 12, 6, requires_grad=True)
        for number in range(3):
            began = time.monotonic()
            size = 11 if kind == "size" and number == 1 and dist.get_rank() == 1 else 12
            parallel(parallel.scatter(x[:, :, :size])).gather().sum().backward()
            assert x.grad is not None
            x.grad.sum().item()  # a GPU is waited for here
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, "nothing happened"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "limit"),
    [
        ("model", ["RankMismatch", "2.weight (2, 2, 3, 3)", "rank 2 has 'parameter 2.weight (2, 2, 5, 5)"], 3),
        ("size", ["rank 1", "(1, 2, 12, 6)", "(1, 2, 11, 6)"], 5),
        ("raises", ["rank 1 failed in '1' (Faulty)", "OSError: the disk is full"], 3),
        ("dies", ["rank 1 ended without a word", "'2' (Conv2d)"], 3),
        ("backward", ["rank 1 ended without a word", "the backward of"], 3),
        ("hangs", ["rank 1 gave no answer for 2 s", "'2' (Conv2d)"], 5),
    ],
)
def test_every_other_rank_hears_of_it(kind: str, words: list[str], limit: float) -> None:
    found: list[Any] = run(3, step, kind, 2.0, timeout=20, may_die=True, without=1 if kind == "hangs" else None)
    heard = [pair for pair in found if pair is not None]
    assert len(heard) >= 2
    for seconds, text in heard:
        if text.startswith("OSError"):
            continue
        assert all(word in text for word in words), text
        assert seconds < limit, text


def detected(kind: str) -> tuple[str, float]:
    """What the watchdog, which links on GPUs have, makes of a rank that goes while nobody exchanges anything."""
    link = Link([0, 1], 0.5)
    Watchdog(link).start()
    time.sleep(0.3)
    if dist.get_rank() == 1:
        if kind == "ends":
            atexit._run_exitfuncs()
        os._exit(0)
    began = time.monotonic()
    try:
        while time.monotonic() - began < (10 if kind == "dies" else 1.5):  # on a busy machine
            time.sleep(0.01)
    except PeerError as error:
        return str(error), time.monotonic() - began
    return "nothing", 0


@pytest.mark.parametrize(("kind", "words"), [("dies", "rank 1 ended without a word"), ("ends", "nothing")])
def test_a_rank_that_falls_silent_is_noticed_without_an_exchange(kind: str, words: str) -> None:
    (text, seconds), _ = run(2, detected, kind, timeout=20, may_die=True)
    assert text.startswith(words)
    assert seconds < 10


ENDING = """
import sys, time, torch.distributed as dist
from tilewise.comm.link import Link
from tilewise.comm.watchdog import Watchdog
port = int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
for watchdog in [Watchdog(Link([0, 1], 20.0)) for _ in range(6)]:
    watchdog._interval = 0.0
    watchdog.start()
time.sleep(0.3)
dist.barrier()
if sys.argv[1] == "0":  # it keeps the store
    time.sleep(1)
"""


def test_a_program_ends_in_order_while_its_threads_watch() -> None:
    """What comes back from the store into a Python that has ended would abort the process."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", ENDING]
    with subprocess.Popen([*command, "0", "0"], env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        second = subprocess.run([*command, "1", port], env=environment, timeout=60, check=False)
        assert (first.wait(timeout=60), second.returncode) == (0, 0)
