"""Messages through other ranks' memory, in Triton's interpreter and on one GPU: what arrives, and what does not."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import test_convolution
from tests.distributed.memory import mapped
from tests.distributed.ranks import parallel, run
from tests.interpreter import interpreted

from tilewise.comm import waiting
from tilewise.comm.link import Link, Noted, PeerError
from tilewise.comm.peer_choice import PeerChoice, _Trial, choose_peers
from tilewise.comm.peers import CHANNELS, CHUNK, Messages, Peers, Places, merged

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.device(request.param):
        yield request.param


def alone(places: Places, timeout: float = 60.0) -> list[Peers]:
    """All ranks in this process."""
    buffers = [torch.zeros(places.nbytes, dtype=torch.uint8) for _ in places.neighbours]
    return [Peers(places, buffers, index, timeout) for index in range(len(places.neighbours))]


def late(peers: Peers) -> int | None:
    """What kernels tell once they have ended."""
    if peers.page.is_pinned():
        torch.cuda.synchronize()
    return peers.late()


def strided(draw: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """A view of random memory, of one to five dimensions."""
    dims = draw.randint(1, 5)
    shape = [draw.randint(1, 700 if dims == 1 else 9) for _ in range(dims)]
    more = [draw.choice((0, 0, 1, 3)) for _ in shape]
    whole = torch.randint(-100, 100, [s + m for s, m in zip(shape, more, strict=True)]).to(dtype)
    if dims > 2 and draw.random() < 0.4:
        whole = whole.movedim(1, -1).contiguous().movedim(-1, 1)
    for dim, (size, extra) in enumerate(zip(shape, more, strict=True)):
        whole = whole.narrow(dim, draw.randint(0, extra), size)
    return whole


def sent(one: Peers, messages: list[tuple[int, torch.Tensor]]) -> None:
    one.exchange(messages, [], messages[0][1])


def came(one: Peers, messages: list[tuple[int, Sequence[int]]], like: torch.Tensor) -> list[torch.Tensor]:
    return one.exchange([], messages, like)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.usefixtures("device")
def test_any_view_arrives(dtype: torch.dtype, near: bool) -> None:
    """Two at once, of unlike shapes, there and back, again and again through the same mailboxes."""
    draw = random.Random(str(dtype))
    places = Places(((1, 2), (0,), (0,)), 8 * CHUNK)
    first, *others = every = alone(places)
    for one in every:
        one.near = near
    for _ in range(8):
        out = [strided(draw, dtype) for _ in others]
        sent(first, [(1, out[0]), (2, out[1])])
        for one, tensor in zip(others, out, strict=True):
            (found,) = came(one, [(0, tensor.shape)], tensor)
            assert torch.equal(found, tensor)
            assert found.dim() < 3 or found.movedim(1, -1).is_contiguous()
            sent(one, [(0, found)])
        for found, tensor in zip(came(first, [(1, out[0].shape), (2, out[1].shape)], out[0]), out, strict=True):
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK + 1, CHANNELS * CHUNK + 3, (2 * CHANNELS + 1) * CHUNK])
@pytest.mark.usefixtures("device")
def test_chunks_and_channels(nbytes: int) -> None:
    places = Places(((1,), (0,)), (2 * CHANNELS + 1) * CHUNK)
    a, b = alone(places)
    for size in (nbytes, max(1, nbytes // 2), nbytes):
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
        sent(a, [(1, tensor)])
        assert torch.equal(came(b, [(0, (size,))], tensor)[0], tensor)


@pytest.mark.usefixtures("device")
def test_waiting_in_vain_moves_nothing_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK", 64)  # the interpreter's looks are slow
    places = Places(((1,), (0,)), CHUNK)
    a, b = alone(places, timeout=1e-3)
    like = torch.ones(7)
    came(b, [(0, like.shape)], like)
    assert late(b) == 0
    sent(a, [(1, like)])
    assert late(a) is None
    sent(a, [(1, like + 1)])  # the first was not read
    assert late(a) == 1
    assert torch.equal(came(b, [(0, like.shape)], like)[0], like)


@pytest.mark.usefixtures("device")
def test_a_kernel_that_waits_is_stopped() -> None:
    _, b = alone(Places(((1,), (0,)), CHUNK), timeout=1000)
    like = torch.ones(7)
    timer = threading.Timer(0.5, b.stop)
    timer.start()
    start = time.monotonic()
    came(b, [(0, like.shape)], like)
    assert late(b) == 0
    assert 0.4 < time.monotonic() - start < 30


def test_places_are_apart_and_alike_on_all_ranks() -> None:
    places = Places(((1, 3), (0, 2), (1,), (0,)), 3 * CHUNK)
    for owner, others in enumerate(places.neighbours):
        spans = [(places.box(owner, other), places.capacity) for other in others]
        spans += [(place(owner, other), 4 * CHANNELS) for other in others for place in (places.flag, places.ack)]
        spans.sort()
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= places.nbytes
    for neighbours, capacity in ((((1,), ()), CHUNK), (((1,), (0,)), CHUNK + 1), (((1,), (0,)), 0)):
        with pytest.raises(ValueError, match=r"neighbours|capacity"):
            Places(neighbours, capacity)


def test_dimensions_of_one_run_are_merged() -> None:
    whole = torch.zeros(4, 6, 8, 10)
    assert merged(whole, 4) == [(1, 0)] * 4 + [(1920, 1)]
    assert merged(whole, 8) == [(1, 0)] * 4 + [(960, 1)]
    assert merged(whole[:, :, 2:4], 8) == [(1, 0)] * 3 + [(24, 40), (10, 1)]
    assert merged(whole[..., 0], 4) == [(1, 0)] * 4 + [(192, 10)]


def shared(link: Link, capacity: int) -> Peers:
    """Buffers in files that all ranks map."""
    everyone = tuple(tuple(o for o in range(link.size) if o != i) for i in range(link.size))
    places = Places(everyone, capacity)
    return Peers(places, mapped(link, places.nbytes), link.index, link.timeout)


def by_ranks(capacity: int) -> int:
    """Convolutions of any kind, whose halos go this way, or some of them, beside one device in float64."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    link.peers = shared(link, capacity)
    carried = []
    run_one = Peers._run

    def counted(self: Peers, sends: Messages, receives: Messages) -> None:
        carried.append((len(sends), len(receives)))
        run_one(self, sends, receives)

    Peers._run = counted  # type: ignore[method-assign]
    test_convolution.many(dist.get_world_size(), 5, 6)
    test_convolution.modes()
    assert any(sends and receives for sends, receives in carried)
    return len(carried)


@pytest.mark.sampled(1)
@interpreted
@pytest.mark.parametrize(("ranks", "capacity"), [(2, CHUNK), (3, 16 * CHUNK)])
def test_halos_of_ranks(ranks: int, capacity: int) -> None:
    assert min(run(ranks, by_ranks, capacity, timeout=120)) > 20


def all_to_all() -> None:
    """Messages of unlike sizes between all ranks, three to each, of which some are late by turns."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    own = shared(link, 4 * CHUNK)
    for turn in range(3):
        if turn == link.index:
            time.sleep(0.3)
        own.near = turn == 1
        own._programs.clear()
        pairs = itertools.product(range(link.size), repeat=2)
        out = {(i, o): torch.full((2, 3, 1 + (7 * i + 5 * o + turn) % 11, 5), 10.0 * i + o) for i, o in pairs}
        found = own.exchange(
            [(o, out[link.index, o]) for o in link.others], [(o, out[o, link.index].shape) for o in link.others],
            torch.empty(0),
        )  # fmt: skip
        assert own.late() is None
        for o, tensor in zip(link.others, found, strict=True):
            assert torch.equal(tensor, out[o, link.index]), (turn, o)


@pytest.mark.slow
@interpreted
def test_more_neighbours_than_a_launch_has_messages() -> None:
    run(4, all_to_all, timeout=120)


def silent() -> str:
    """Rank 1 exchanges nothing; the others hear of it."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    link.peers = shared(link, CHUNK)
    link.peers.rounds, link.peers.look = 3, 256  # the interpreter's looks are slow
    if link.index == 1:
        time.sleep(60)
        return ""
    like = torch.zeros(4)
    pending = link.exchange("the layer", [(1, like)], [(1, (4,))], like)
    with pytest.raises(PeerError) as caught:
        pending.wait()
    return str(caught.value)


@interpreted
def test_a_silent_rank_is_named() -> None:
    text, _ = run(2, silent, without=1)
    assert "rank 1 gave no answer" in text
    assert "the layer" in text


def tried() -> list[str]:
    """What a trial finds: nothing, and then that a byte is not what was sent."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    own = shared(link, 2 * CHUNK)
    trial = _Trial(link, own, torch.device("cpu"))
    found = [trial.fault()]
    exchange = own.exchange

    def damaged(*arguments: Any) -> list[torch.Tensor]:
        every = exchange(*arguments)
        for tensor in every:
            tensor[(-1,) * tensor.dim()] += 1
        return every

    own.exchange = damaged  # type: ignore[method-assign]
    return [*found, trial.fault()]


@pytest.mark.slow
@interpreted
def test_a_trial_finds_what_is_not_as_it_was_sent() -> None:
    for right, wrong in run(2, tried):
        assert right == ""
        assert "do not arrive as they were sent" in wrong


def untried() -> list[PeerChoice]:
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    return [choose_peers(link, Noted(), torch.device("cpu"), graphs=False)]


def test_other_devices_than_gpus_say_why_not() -> None:
    for (chosen,) in run(2, untried):
        assert chosen == PeerChoice(0, "on cpu")
