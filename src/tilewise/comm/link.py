"""The ranks that share one image: their process groups, exchanges in one order on all, and what becomes of a failure.

Exchanges have a group of their own, so that halos never queue behind sums of gradients, and so that this library's
messages are never taken for the user's. A rank that fails says why to all others (:mod:`tilewise.comm.presence`), then
breaks its group's connections: whoever waits for it wakes, finds the reason and raises it as its own error.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.comm import presence
from tilewise.comm.agreement import gather, named_ranks
from tilewise.comm.ending import on_end
from tilewise.comm.peer_sums import PeerSums
from tilewise.comm.peers import Peers
from tilewise.comm.verdict import Cause, Verdict, judge
from tilewise.comm.watch import Watch, raise_in_main

__all__ = ["Link", "Noted", "PeerError", "Pending"]

SETTLE_S = 1.5
"""How long a rank that lost another listens to the rest, where it is not known before who failed."""
LOOK_S = 0.01
AFTERMATH_S = 0.3
"""How long an error that may come of another rank's end waits for that to show."""
LONGEST = 8000
"""Characters of an error's text that others hear."""
TAGS = 2**30
NCCL_LATER_S = 60.0

_links: dict[tuple[int, ...], itertools.count[int]] = {}
_every: weakref.WeakSet[Link] = weakref.WeakSet()


class PeerError(RuntimeError):
    """Another rank failed, ended, or said nothing in time; the message says which, why, and where this one waited.

    ``causes`` has the ranks that failed, each with what became of it in words.
    """

    def __init__(self, text: str, causes: Sequence[Cause] = ()) -> None:
        super().__init__(text)
        self.causes = tuple(causes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that failed, without those that only stopped because of them."""
        return tuple(rank for rank, _ in self.causes)


class Pending:
    """An exchange under way; :meth:`wait` gives what was received, in the order asked for, or :meth:`add_to` adds it.

    Of these one is called, once.
    """

    __slots__ = ("_kept", "_link", "_received", "_what", "_works")

    def __init__(
        self,
        link: Link,
        what: str,
        works: list[tuple[tuple[int, ...], dist.Work]],
        kept: list[torch.Tensor],
        received: list[torch.Tensor],
    ) -> None:
        self._link, self._what, self._works, self._kept, self._received = link, what, works, kept, received

    def wait(self) -> list[torch.Tensor]:
        """The tensors received. On a GPU the current stream waits, not the host. Raises :class:`PeerError`."""
        for peers, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._link.lost(self._what, peers, error) from error
        self._works, self._kept = [], []
        self._link.heed(self._what)
        return self._received

    def add_to(self, targets: Sequence[torch.Tensor]) -> None:
        """Add what is received to ``targets``, in order. As :meth:`wait`."""
        for tensor, target in zip(self.wait(), targets, strict=True):
            target.add_(tensor)


@dataclass
class Noted:
    """What goes over the ranks of a link in a step, as one of them sees it.

    ``largest`` has the bytes of the largest message to or from each rank, by index; ``near_bytes`` those of images sent
    whose channels are next to each other, less those of others. ``norms`` are parts whose norms are summed up over the
    ranks: shape, type, and whether channels are last.
    """

    largest: dict[int, int] = field(default_factory=dict)
    near_bytes: int = 0
    norms: list[tuple[list[int], str, bool]] = field(default_factory=list)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> None:  # fmt: skip
        """Note one; see :meth:`Link.exchange`."""
        for index, shape in (*((index, tensor.shape) for index, tensor in sends), *receives):
            self.largest[index] = max(self.largest.get(index, 0), math.prod(shape) * like.element_size())
        images = [tensor for _, tensor in sends if tensor.dim() > 2]
        self.near_bytes += sum(t.nbytes if t.stride(1) == 1 else -t.nbytes for t in images)


class Link:
    """Ranks ``ranks`` (global, in the order of their index), of which this process is one.

    ``timeout`` is in seconds: what another rank has not answered by then is an error. Tensors are on devices of
    ``device_type``. Every one of the ranks makes its ``Link`` at the same point of the program. Raises ``ValueError``
    where this process is none of them.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, device_type: str = "cpu") -> None:
        self.ranks = tuple(ranks)
        if dist.get_rank() not in self.ranks:
            raise ValueError(f"ranks={self.ranks}: rank {dist.get_rank()} is not among them")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout!r}: seconds above 0 would do")
        self.index, self.timeout = self.ranks.index(dist.get_rank()), timeout
        self._on_gpu = device_type != "cpu"
        self.places = tuple(sorted(self.ranks).index(rank) for rank in self.ranks)
        """Of each rank, by index, its number in the process groups."""
        number = next(_links.setdefault(self.ranks, itertools.count()))
        self.key = f"tilewise/{'-'.join(map(str, self.ranks))}/{number}"
        self._broken: PeerError | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._presence = presence.here()
        self._connect()
        self.group, self.sums = self._groups[:2]
        self.control = self._groups[-1] if self._on_gpu else self.sums
        self.told: set[bytes] = set()
        """Digests of texts that this rank has written for the others with :meth:`tell_words`."""
        self.progress, self.doing = 0, "nothing yet"
        """How many exchanges and sums were begun here, and where in the model the last was."""
        self.peers: Peers | None
        """Carries the messages that it can; none before :func:`tilewise.distributed.optimize`."""
        self.peer_sums: PeerSums | None
        """Where kernels that add up numbers of all ranks keep them."""
        self.noted: Noted | None = None
        """What goes over the ranks, while somebody wants to know."""
        _every.add(self)
        on_end(_failed, _ended)
        if self._on_gpu:
            # NCCL lets a part of a group talk only once all of it has.
            for group in (self.group, self.sums):
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=group)
            Watch(self).start()

    def _connect(self) -> None:
        """Find the other ranks, and make groups with them; raise :class:`PeerError` where one does not come."""
        self.peers = self.peer_sums = None
        try:
            self._presence.meet(self.ranks, self.key, self.timeout)
        except presence.NotThere as error:
            became = "ended, or could not be reached," if error.came else "did not come"
            causes = [(rank, f"rank {rank} {became} within {self.timeout:g} s") for rank in error.ranks]
            self._broken = PeerError(f"{'; '.join(text for _, text in causes)} to make connections", causes)
            self._say({"kind": "heard", "causes": causes})
            raise self._broken from error
        for backend in (None, None, "gloo")[: 3 if self._on_gpu else 2]:
            try:
                self._groups.append(self._new_group(backend))
            except RuntimeError as error:
                raise self.lost("making connections", self.others, error) from error

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        # Where NCCL runs out of time it ends the process: the watch comes before it.
        late = self._on_gpu and backend is None
        limit = timedelta(seconds=self.timeout + (NCCL_LATER_S if late else 0))
        group = dist.new_group(list(self.ranks), timeout=limit, backend=backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def device(self) -> torch.device:
        """Where tensors of its groups lie."""
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")

    @property
    def broken(self) -> bool:
        """Whether a rank is lost; there are no more exchanges."""
        return self._broken is not None

    def begin(self, what: str) -> None:
        """Count an exchange or a sum that begins here; raise :class:`PeerError` where one of before is lost."""
        if self._broken is not None:
            raise self._broken
        self.heed(what)
        self.progress += 1
        self.doing = what

    def heed(self, what: str) -> None:
        """Raise :class:`PeerError` where a message from peer memory is known not to have come in time."""
        if (index := self.late()) is not None:
            raise self.lost(what, (index,), RuntimeError(f"nothing came for {self.timeout:g} s"))

    def late(self) -> int | None:
        """The rank for which a kernel here waited in vain; asks only the host."""
        for memory in (self.peers, self.peer_sums):
            if memory is not None and (index := memory.late()) is not None:
                return index
        return None

    @property
    def early(self) -> bool:
        """Whether an exchange is best launched before what it travels beside: NCCL's takes 10 us of starting."""
        return self.peers is not None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def exchange(
        self,
        what: str,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> Pending:
        """Send tensors to ranks by index, and receive tensors of these shapes; all at once, and without waiting.

        At most one message goes from a rank to another in one exchange. Every rank calls this for every exchange, also
        with nothing to send: exchanges are numbered, and a number is one exchange on all ranks. ``what`` says where in
        the model this is; ``like`` has the type and device of what is received.
        """
        self.begin(what)
        if self.noted is not None:
            self.noted.exchange(sends, receives, like)
        peers = self.peers
        out: set[int] = set()
        into: dict[int, torch.Tensor] = {}
        if peers is not None:
            out = {index for index, tensor in sends if peers.carries(index, tensor.shape, tensor.dtype)}
            ways = [pair for pair in receives if peers.carries(pair[0], pair[1], like.dtype)]
            came = peers.exchange([pair for pair in sends if pair[0] in out], ways, like)
            into = {index: tensor for (index, _), tensor in zip(ways, came, strict=True)}
        kept = [tensor.contiguous() for index, tensor in sends if index not in out]
        received = [
            into[index] if index in into else torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
            for index, shape in receives
        ]
        operations: list[tuple[Any, torch.Tensor, int]] = [
            (dist.irecv, tensor, index)
            for (index, _), tensor in zip(receives, received, strict=True)
            if index not in into
        ]
        operations += zip(itertools.repeat(dist.isend), kept, (index for index, _ in sends if index not in out))
        works = self._started(what, operations) if operations else []
        return Pending(self, what, works, kept, received)

    def _started(
        self, what: str, operations: list[tuple[Any, torch.Tensor, int]]
    ) -> list[tuple[tuple[int, ...], dist.Work]]:
        tag = self.progress % TAGS
        peers = tuple(dict.fromkeys(index for *_, index in operations))
        try:
            if not self._on_gpu:
                return [((index,), self._one(operation, tensor, index, tag)) for operation, tensor, index in operations]
            batch = [
                dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=self.places[index])
                for operation, tensor, index in operations
            ]
            return [(peers, work) for work in dist.batch_isend_irecv(batch)]
        except RuntimeError as error:
            raise self.lost(what, peers, error) from error

    def _one(self, operation: object, tensor: torch.Tensor, index: int, tag: int) -> dist.Work:
        peer = self.places[index]
        if operation is dist.isend:
            work = dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
        else:
            work = dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, summed over the ranks in place."""
        self.finish_sum(what, self.start_sum(what, tensor))
        return tensor

    def start_sum(self, what: str, tensor: torch.Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over the ranks in place; it may be read after :meth:`finish_sum`."""
        self.begin(what)
        try:
            work = dist.all_reduce(tensor, group=self.sums, async_op=True)
        except RuntimeError as error:
            raise self.lost(what, self.others, error) from error
        assert isinstance(work, dist.Work)
        return work

    def finish_sum(self, what: str, work: dist.Work) -> None:
        """Wait for a sum; on a GPU the current stream waits."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(what, self.others, error) from error

    def gather(self, data: object) -> list[Any]:
        """What each rank gives, by index, read as JSON; every rank calls it. Tensors stay where they are."""
        found = gather(data, self.control)
        return [found[place] for place in self.places]

    @property
    def others(self) -> tuple[int, ...]:
        """Indices of the other ranks."""
        return tuple(index for index in range(self.size) if index != self.index)

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Have the others hear of an error that leaves this block, so that none of them waits for this rank."""
        try:
            yield
        except BaseException as error:
            self.tell(what, error)
            raise

    def tell_words(self, name: str, text: str) -> None:
        """Write ``text`` where the other ranks find it by ``name``."""
        distributed_c10d._get_default_store().set(f"{self.key}/words/{name}", text)

    def words(self, name: str) -> str:
        """The text that another rank wrote as ``name``."""
        return distributed_c10d._get_default_store().get(f"{self.key}/words/{name}").decode()

    def tell(self, what: str, error: BaseException) -> None:
        """Say why this rank fails, once, and break its connections. One that only heard of it passes on what it heard.

        ``what`` says where in the program this is.
        """
        if self._broken is not None:
            return
        if isinstance(error, PeerError):
            self._say({"kind": "heard", "causes": error.causes})
            self._broken = PeerError(str(error), error.causes)
        else:
            own = self.ranks[self.index]
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"rank {own} failed in {what}: {said[:LONGEST]}"
            self._say({"kind": "failed", "text": text, "lost": self._lost_before(error)})
            self._broken = PeerError(text, [(own, text)])
        self._break()

    def _lost_before(self, error: BaseException) -> list[int]:
        """Ranks of which ``error`` may come, as they were gone: then it is they that failed, not this rank."""
        # A connection of the user's own that breaks is a RuntimeError.
        verdict = self._verdict((), AFTERMATH_S if isinstance(error, RuntimeError) else 0)
        return [rank for rank, _ in verdict.causes if verdict.sure]

    def lost(self, what: str, peers: Sequence[int], error: BaseException) -> PeerError:
        """The error for an exchange in ``what`` with ``peers`` that came to nothing: who failed, as far as is known."""
        if self._broken is not None:
            return self._broken
        awaited = [self.ranks[index] for index in peers]
        self._say({"kind": "waited", "for": awaited, "text": what})
        if not self._on_gpu:
            self._break()
        causes = self._verdict(awaited, SETTLE_S).causes
        own = f"this rank waited in {what}"
        if causes:
            text = f"{'; '.join(text for _, text in causes)} ({own})"
        else:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            text = (
                f"ranks wait for each other, as where one skips a layer: {own} for {named_ranks(awaited)}, {first_line}"
            )
        self._broken = PeerError(text, causes)
        return self._broken

    def _verdict(self, awaited: Sequence[int], seconds: float) -> Verdict:
        """Who failed, as soon as that is sure, or as it looks after so many ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            found = judge(*self._news(), awaited, self.timeout)
            if found.sure or time.monotonic() >= deadline:
                return found
            time.sleep(LOOK_S)

    def _news(self) -> tuple[dict[int, list[dict[str, Any]]], set[int]]:
        """What the others said of this link or of their end, and which of them are gone."""
        heard, gone = self._presence.news(rank for rank in self.ranks if rank != self.ranks[self.index])
        return {r: [e for e in own if e.get("link", self.key) == self.key] for r, own in heard.items()}, gone

    def trouble(self) -> int | None:
        """A rank that stopped, by index: it said so, or its process is gone and its program had not come to its end."""
        said, gone = self._news()
        for rank, entries in said.items():
            kinds = {entry.get("kind") for entry in entries}
            if kinds - {"ended"} or (rank in gone and not kinds):
                return self.ranks.index(rank)
        return None

    def _say(self, entry: dict[str, Any]) -> None:
        others = [rank for rank in self.ranks if rank != self.ranks[self.index]]
        self._presence.say(others, {"link": self.key, **entry})

    def give_up(self, index: int | None) -> None:
        """From the watching thread: rank ``index`` is lost (``None``: the store is).

        The main thread gets the error first and is then woken.
        """
        if self._broken is None:
            said = "it went no further" if index is not None else "the ranks' store is gone"
            raise_in_main(self.lost(self.doing, self.others if index is None else (index,), RuntimeError(said)))
            self._break()

    def _break(self) -> None:
        """End every connection, so that whoever waits at the other end wakes."""
        for memory in (self.peers, self.peer_sums):
            if memory is not None:
                memory.stop()
        for group in self._groups:
            if self._on_gpu and group is not self._groups[-1]:
                group.abort()
            elif self.size > 1:
                # Gloo has no abort: a receive that runs out of time ends the connections of its group.
                with contextlib.suppress(RuntimeError):
                    peer = self.places[self.others[0]]
                    work = dist.irecv(
                        torch.empty(1, dtype=torch.float32, device="cpu"), group=group, tag=TAGS, group_src=peer
                    )
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


def _failed(error: BaseException) -> None:
    for link in list(_every):
        link.tell("its program", error)


def _ended() -> None:
    presence.say_everywhere({"kind": "ended"})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_every.clear)  # a fork's end is not the rank's
