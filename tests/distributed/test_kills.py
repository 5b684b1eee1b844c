"""Ranks that are killed, at any moment: every survivor names that rank, and no other."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from tests.sampling import EVERY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.comm.link import Link, PeerError
from tilewise.comm.meeting import Meeting
from tilewise.comm.presence import here
from tilewise.comm.process_groups import ProcessGroups
from tilewise.comm.verdict import judge
from tilewise.distributed import SpatialParallel

TIMEOUT = 15.0
MOMENTS = ("exchange", "time", "between", "construction")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(moment: str, draw: random.Random) -> None:
    """Have this process killed."""
    if moment == "time":
        threading.Timer(draw.uniform(0.0, 0.6), die).start()
    elif moment == "exchange":
        begin, left = Link.begin, [draw.randint(0, 40)]

        def counted(self: Link, what: str) -> None:
            begin(self, what)
            left[0] -= 1
            if left[0] < 0:
                die()

        Link.begin = counted  # type: ignore[method-assign]
    elif moment == "construction":
        # While connections are made, or while weights are compared.
        moments = [(ProcessGroups, "_new_group", 0), (ProcessGroups, "_new_group", 1), (Meeting, "tell", 0)]
        owner, name, after = draw.choice(moments)
        make, more = getattr(owner, name), [after]

        def made(*given: Any) -> Any:
            more[0] -= 1
            if more[0] < 0:
                die()
            return make(*given)

        setattr(owner, name, made)


def survive(victim: int, moment: str, seed: int) -> tuple[tuple[int, ...], str, float]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 5, padding=2),
        nn.ConvTranspose2d(3, 2, 2, stride=2), nn.GroupNorm(1, 2), nn.Conv2d(2, 2, 3, padding=1),
    )  # fmt: skip
    timeout = 3.0 if moment == "construction" else TIMEOUT
    last = draw.randint(0, 3)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("h",))
    if draw.random() < 0.5 and rank == (victim + 1) % ranks:
        model[2].register_forward_hook(lambda *_: time.sleep(0.5))  # one that hears of a death late
    if rank == victim and moment == "construction":
        doomed(moment, draw)
    began = time.monotonic()
    try:
        p = SpatialParallel(model, mesh, timeout=timeout)
        if rank == victim:
            doomed(moment, draw)
        x = torch.ones(2, 2, 8 * ranks, 6)
        for number in range(400):
            began = time.monotonic()
            p(p.scatter(x)).square().mean().backward()
            if moment == "between" and number == last and rank == victim:
                die()
    except PeerError as error:
        return error.ranks, str(error), time.monotonic() - began
    return (), "nothing happened", 0.0


def check(ranks: int, victim: int, moment: str, seed: int) -> None:
    found = run(ranks, survive, victim, moment, seed, timeout=60, may_die=True)
    assert found[victim] is None
    for rank, one in enumerate(found):
        if rank != victim:
            assert one is not None, f"rank {rank} died too"
            causes, text, seconds = one
            assert causes == (victim,), (rank, text)
            assert set(re.findall(r"rank (\d+)", text)) == {str(victim)}, text
            assert seconds < TIMEOUT, "a death is noticed, not waited for"


def replicas() -> tuple[tuple[int, ...], str, float]:
    """Rank 3 dies while weights are compared; ranks 0 and 1 share no image with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "h"))
    torch.manual_seed(0)
    if dist.get_rank() == 3:
        Meeting.tell = lambda *_: die()  # type: ignore[assignment,method-assign]
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        SpatialParallel(nn.Conv2d(1, 1, 3), mesh, timeout=20, replicas=("data",))
    return caught.value.ranks, str(caught.value), time.monotonic() - began


def test_ranks_of_other_images_hear_of_a_death_while_weights_are_compared() -> None:
    for causes, text, seconds in run(4, replicas, may_die=True)[:3]:
        assert causes == (3,), text
        assert set(re.findall(r"rank (\d+)", text)) == {"3"}
        assert seconds < 10, "of 20"


def follows() -> tuple[tuple[int, ...], str]:
    """Rank 1 dies while weights are compared. Rank 2, still making connections, fails for that, and ends as well."""
    rank = dist.get_rank()
    if rank == 1:
        Meeting.tell = lambda *_: die()  # type: ignore[assignment,method-assign]
    if rank == 2:
        make, left = ProcessGroups._new_group, [1]

        def broken(self: ProcessGroups, backend: str | None) -> dist.ProcessGroup:
            group = make(self, backend)
            left[0] -= 1
            while left[0] < 0 and 1 not in here().news([1])[1]:
                time.sleep(0.01)
            if left[0] < 0:
                raise RuntimeError("Connection closed by peer")
            return group

        ProcessGroups._new_group = broken  # type: ignore[method-assign]
    torch.manual_seed(0)
    with pytest.raises(PeerError) as caught:
        SpatialParallel(nn.Conv2d(1, 1, 3), init_device_mesh("cpu", (3,), mesh_dim_names=("h",)), timeout=20)
    return caught.value.ranks, str(caught.value)


def test_a_rank_that_ends_because_of_another_is_not_named_while_weights_are_compared() -> None:
    for causes, text in run(3, follows, may_die=True)[::2]:
        assert causes == (1,), text
        assert set(re.findall(r"rank (\d+)", text)) == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_survivors_name_the_rank_that_was_killed(moment: str) -> None:
    draw = random.Random(moment)
    for _ in range(25 if EVERY else 2):
        ranks = draw.randint(2, 4)
        check(ranks, draw.randrange(ranks), moment, draw.randrange(2**30))


def entry(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, **more}


def waited(*ranks: int) -> list[dict[str, Any]]:
    return [entry("waited", **{"for": list(ranks), "text": "a layer"})]


FULL = "rank 2 failed in a layer: OSError: the disk is full"


@pytest.mark.parametrize(
    ("said", "gone", "awaited", "causes", "sure"),
    [
        # One that is gone without a word, others that wait or compute.
        ({1: [], 2: waited(1), 3: []}, {1}, [2], [1], True),
        # Survivors have ended as well, in order or with what they heard.
        ({1: [], 2: [*waited(1), entry("ended")], 3: [*waited(2)]}, {1, 2, 3}, [3], [1], True),
        ({1: [], 2: [entry("heard", causes=[[1, "rank 1 was lost"]])], 3: []}, {2}, [2], [1], True),
        # A connection of its own told rank 2 that rank 1 was gone.
        ({1: [], 2: [entry("failed", text="rank 2 failed: RuntimeError", lost=[1])]}, {2}, [2], [1], True),
        # An error comes before the ends that it brings about.
        ({1: [], 2: [entry("failed", text=FULL, lost=[])], 3: waited(2)}, {1, 2}, [1], [2], True),
        # A program that is over is no failure of its own where another died.
        ({1: [entry("ended")], 2: [], 3: waited(2)}, {1, 2}, [3], [2], True),
        ({1: [entry("ended")], 2: [], 3: []}, {1}, [1], [1], False),
        # Nobody is gone: who is waited for and says nothing, by those who wait for fewest.
        ({1: waited(2), 2: waited(3), 3: [], 4: []}, set(), [1, 2, 3, 4], [3], False),
        ({1: waited(0), 2: waited(1)}, set(), [2], [], False),
        # Two are dead: those that are waited for, directly or not.
        ({1: waited(2), 2: [], 3: []}, {2, 3}, [1], [2], True),
        ({1: [], 2: []}, {1, 2}, [1, 2], [1, 2], True),
    ],
)
def test_a_verdict_names_causes_alone(said: Any, gone: Any, awaited: Any, causes: list[int], sure: bool) -> None:
    found = judge(said, gone, awaited, 2.0)
    assert [rank for rank, _ in found.causes] == causes
    assert found.sure == sure
