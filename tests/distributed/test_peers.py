"""Messages through other ranks' memory, in Triton's interpreter and on one GPU: what arrives, and what does not."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed import test_convolution
from tests.distributed.ranks import parallel, run
from tests.interpreter import interpreted

from tilewise.comm import peers
from tilewise.comm.link import Link, PeerError
from tilewise.comm.peers import CHANNELS, CHUNK, Peers, Places, merged
from tilewise.distributed.peer_choice import PeerChoice, _Trial, choose_peers

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.usefixtures("device")
def test_any_view_arrives(dtype: torch.dtype) -> None:
    """Two at once, of unlike shapes, again and again through the same mailboxes."""
    draw = random.Random(str(dtype))
    places = Places(((1, 2), (0,), (0,)), 4 * CHUNK)
    first, *others = alone(places)
    for _ in range(12):
        sent = [strided(draw, dtype) for _ in others]
        arriving = [peers.exchange([], [(0, t.shape)], t) for peers, t in zip(others, sent, strict=True)]
        first.exchange([(1, sent[0]), (2, sent[1])], [], sent[0])
        for one, tensor in zip(arriving, sent, strict=True):
            (found,) = one.take()
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK + 1, CHANNELS * CHUNK + 3, (2 * CHANNELS + 1) * CHUNK])
@pytest.mark.usefixtures("device")
def test_chunks_and_channels(nbytes: int) -> None:
    places = Places(((1,), (0,)), (2 * CHANNELS + 1) * CHUNK)
    a, b = alone(places)
    for size in (nbytes, max(1, nbytes // 2), nbytes):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        arriving = b.exchange([], [(0, (size,))], sent)
        a.exchange([(1, sent)], [], sent)
        assert torch.equal(arriving.take()[0], sent)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("device")
def test_messages_are_added(dtype: torch.dtype, apart: bool) -> None:
    places = Places(((1, 2), (0,), (0,)), CHUNK)
    a, b, c = alone(places)
    terms = [torch.randn(2, 3, 2, 5).to(dtype) for _ in range(2)]
    whole = torch.randn(2, 3, 6, 5).to(dtype)
    expected = whole.clone()
    targets = [whole[:, :, :2], whole[:, :, -2:] if apart else whole[:, :, 1:3]]
    wanted = [expected[:, :, :2], expected[:, :, -2:] if apart else expected[:, :, 1:3]]
    arriving = a.exchange([], [(1, terms[0].shape), (2, terms[1].shape)], whole)
    b.exchange([(0, terms[0])], [], whole)
    c.exchange([(0, terms[1])], [], whole)
    arriving.add_to(targets, apart)
    for target, term in zip(wanted, terms, strict=True):
        target.add_(term)
    # The interpreter rounds bfloat16 towards zero.
    torch.testing.assert_close(whole, expected, rtol=0, atol=2**-5 if dtype is torch.bfloat16 else 0)


@pytest.mark.usefixtures("device")
def test_what_is_not_taken_is_taken_before_the_next() -> None:
    places = Places(((1,), (0,)), CHUNK)
    a, b = alone(places)
    sent = [torch.full((5,), float(n)) for n in range(3)]
    arriving = []
    for tensor in sent:
        arriving.append(b.exchange([], [(0, tensor.shape)], tensor))
        a.exchange([(1, tensor)], [], tensor)
    target = torch.ones(5)
    arriving[1].add_to([target], True)
    assert torch.equal(target, sent[1] + 1)
    assert [float(arriving[n].take()[0][0]) for n in (0, 2)] == [0, 2]


@pytest.mark.usefixtures("device")
def test_waiting_in_vain_moves_nothing_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK", 64)  # the interpreter's looks are slow
    places = Places(((1,), (0,)), CHUNK)
    a, b = alone(places, timeout=1e-3)
    like = torch.ones(7)
    arriving = b.exchange([], [(0, like.shape)], like)
    target = torch.zeros(7)
    arriving.add_to([target], True)
    assert late(b) == 0
    assert not target.any()
    a.exchange([(1, like)], [], like)
    assert late(a) is None
    a.exchange([(1, like + 1)], [], like)  # the first was not read
    assert late(a) == 1


@pytest.mark.usefixtures("device")
def test_a_kernel_that_waits_is_stopped() -> None:
    _, b = alone(Places(((1,), (0,)), CHUNK), timeout=1000)
    like = torch.ones(7)
    arriving = b.exchange([], [(0, like.shape)], like)
    timer = threading.Timer(0.5, b.stop)
    timer.start()
    start = time.monotonic()
    arriving.take()
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
    folder = Path(tempfile.gettempdir()) / f"tilewise-peers-{os.getppid()}-{link.key.replace('/', '-')}"
    folder.mkdir(exist_ok=True)
    with open(folder / str(link.index), "wb") as file:
        file.truncate(places.nbytes)
    dist.barrier(link.group)
    buffers = []
    for index in range(link.size):
        with open(folder / str(index), "r+b") as file:
            buffers.append(torch.frombuffer(mmap.mmap(file.fileno(), places.nbytes), dtype=torch.uint8))
    dist.barrier(link.group)
    (folder / str(link.index)).unlink()
    with contextlib.suppress(OSError):  # the last one's is empty
        folder.rmdir()
    return Peers(places, buffers, link.index, link.timeout)


def by_ranks(capacity: int) -> int:
    """Convolutions of any kind, whose halos go this way, or some of them, beside one device in float64."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    link.peers = shared(link, capacity)
    carried = []
    run_one = Peers._run

    def counted(self: Peers, kind: str, pair: object) -> None:
        carried.append(kind)
        run_one(self, kind, pair)  # type: ignore[arg-type]

    Peers._run = counted  # type: ignore[method-assign,assignment]
    test_convolution.many(dist.get_world_size(), 5, 6)
    test_convolution.modes()
    assert {"push", "take", "add"} <= set(carried)
    return len(carried)


@interpreted
@pytest.mark.parametrize(("ranks", "capacity"), [(2, CHUNK), (3, 16 * CHUNK)])
def test_halos_of_ranks(ranks: int, capacity: int) -> None:
    assert min(run(ranks, by_ranks, capacity, timeout=120)) > 20


def silent() -> str:
    """Rank 1 exchanges nothing; the others hear of it."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    link.peers = shared(link, CHUNK)
    link.peers._rounds, peers.LOOK = 3, 256  # the interpreter's looks are slow
    if link.index == 1:
        time.sleep(2)
        return ""
    like = torch.zeros(4)
    pending = link.exchange("the layer", [(1, like)], [(1, (4,))], like)
    with pytest.raises(PeerError) as caught:
        pending.wait()
    return str(caught.value)


@interpreted
def test_a_silent_rank_is_named() -> None:
    text, _ = run(2, silent)
    assert "rank 1 ended or gave no answer" in text
    assert "the layer" in text


def tried() -> list[str]:
    """What a trial finds: nothing, and then that a byte is not what was sent."""
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    own = shared(link, 2 * CHUNK)
    trial = _Trial(link, own, torch.device("cpu"))
    found = [trial.fault()]
    take = own._take

    def damaged(pairs: Iterable[Sequence[tuple[int, torch.Tensor]]], add: bool) -> None:
        every = list(pairs)
        take(every, add)
        if add:
            every[0][0][1].view(-1)[-1] += 1

    own._take = damaged  # type: ignore[method-assign]
    return [*found, trial.fault()]


@interpreted
def test_a_trial_finds_what_is_not_as_it_was_sent() -> None:
    for right, wrong in run(2, tried):
        assert right == ""
        assert "do not arrive as they were sent" in wrong


def untried() -> list[PeerChoice]:
    p = parallel(torch.nn.Identity(), (dist.get_world_size(),), ("h",))
    link = p.space.link
    return [choose_peers(link, torch.device("cpu"), graphs=False)]


def test_other_devices_than_gpus_say_why_not() -> None:
    for (chosen,) in run(2, untried):
        assert chosen == PeerChoice(0, "on cpu")
