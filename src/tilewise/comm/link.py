"""The ranks that share one image: their process groups, their exchanges in one order, and their handling of failures.

Exchanges have a process group of their own, so that halos never wait behind sums of gradients, and so that messages of
this library are never taken for the user's. A rank that fails tells all others why (:mod:`tilewise.comm.presence`),
then breaks its group's connections: a rank that waits for it wakes, finds the reason and raises it as its own error.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tilewise.comm import presence
from tilewise.comm.agreement import gather
from tilewise.comm.ending import on_end
from tilewise.comm.failure_detector import FailureDetector, PeerError
from tilewise.comm.peer_sums import PeerSums
from tilewise.comm.peers import Peers
from tilewise.comm.process_groups import LAST_TAG, ProcessGroups
from tilewise.comm.texts import Texts
from tilewise.comm.watchdog import Watchdog, raise_in_main

__all__ = ["Link", "Noted", "PeerError", "Pending"]

_links: dict[tuple[int, ...], itertools.count[int]] = {}
_every: weakref.WeakSet[Link] = weakref.WeakSet()


class Pending:
    """An exchange under way. Either :meth:`wait` or :meth:`add_to` is called, once."""

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
        """The received tensors, in the order asked for. On a GPU the current stream waits, not the host.

        Raises :class:`PeerError`.
        """
        for peers, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._link.lost(self._what, peers, error) from error
        self._works, self._kept = [], []
        self._link.heed(self._what)
        return self._received

    def add_to(self, targets: Sequence[torch.Tensor]) -> None:
        """Wait as :meth:`wait` does, and add the received tensors to ``targets``, in order."""
        for tensor, target in zip(self.wait(), targets, strict=True):
            target.add_(tensor)


@dataclass
class Noted:
    """What one rank of a link sends and receives in a step.

    ``largest`` has the bytes of the largest message to or from each rank, by index. ``near_bytes`` is the bytes of sent
    images with channels innermost in memory, less the bytes of other images. ``norms`` has the shape, dtype name and
    "channels last" flag of each part whose norm is summed over the ranks.
    """

    largest: dict[int, int] = field(default_factory=dict)
    near_bytes: int = 0
    norms: list[tuple[list[int], str, bool]] = field(default_factory=list)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> None:  # fmt: skip
        """Note an exchange, with the arguments of :meth:`Link.exchange`."""
        for index, shape in (*((index, tensor.shape) for index, tensor in sends), *receives):
            self.largest[index] = max(self.largest.get(index, 0), math.prod(shape) * like.element_size())
        images = [tensor for _, tensor in sends if tensor.dim() > 2]
        self.near_bytes += sum(t.nbytes if t.stride(1) == 1 else -t.nbytes for t in images)


class Link:
    """The connection of ``ranks`` (global numbers, in the order of their index), one of which is this process.

    A rank that does not answer within ``timeout`` seconds is an error. Tensors are on devices of ``device_type``. Every
    one of the ranks makes its ``Link`` at the same point of the program. Raises ``ValueError`` where this process is
    none of them.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, device_type: str = "cpu") -> None:
        self.ranks = tuple(ranks)
        if dist.get_rank() not in self.ranks:
            raise ValueError(f"ranks={self.ranks}: rank {dist.get_rank()} is not among them")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout!r}: seconds above 0 would do")
        self.index, self.timeout = self.ranks.index(dist.get_rank()), timeout
        self._on_gpu = device_type != "cpu"
        number = next(_links.setdefault(self.ranks, itertools.count()))
        self.key = f"tilewise/{'-'.join(map(str, self.ranks))}/{number}"
        self._broken: PeerError | None = None
        self.peers: Peers | None = None
        """Carries the messages that it can; none before :func:`tilewise.distributed.optimize`."""
        self.peer_sums: PeerSums | None = None
        """Where kernels that add up numbers of all ranks keep them."""
        self.noted: Noted | None = None
        """What goes over the ranks, while somebody wants to know."""
        self.progress, self.doing = 0, "nothing yet"
        """How many exchanges and sums were begun here, and where in the model the last was."""
        self.texts = Texts(f"{self.key}/words")
        self._failures = FailureDetector(self.ranks, self.key, timeout)
        self._groups = ProcessGroups(self.ranks, timeout, self._on_gpu)
        self.places = self._groups.places
        """Of each rank, by index, its number in the process groups."""
        self._connect()
        self.group, self.sums, self.control = self._groups.halos, self._groups.sums, self._groups.control
        _every.add(self)
        on_end(_failed, _ended)
        if self._on_gpu:
            # NCCL lets a part of a group talk only once all of it has.
            for group in (self.group, self.sums):
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=group)
            Watchdog(self).start()

    def _connect(self) -> None:
        """Connect with the other ranks and make process groups. Raises :class:`PeerError` where one does not come."""
        self._failures.meet()
        try:
            self._groups.make()
        except RuntimeError as error:
            raise self.lost("making connections", self.others, error) from error

    @property
    def device(self) -> torch.device:
        """The device of tensors that the groups send."""
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")

    @property
    def broken(self) -> bool:
        """Whether a rank is lost, so that no further exchange is possible."""
        return self._broken is not None

    def begin(self, what: str) -> None:
        """Count an exchange or sum that begins now. Raises :class:`PeerError` where a rank is lost already."""
        if self._broken is not None:
            raise self._broken
        self.heed(what)
        self.progress += 1
        self.doing = what

    def heed(self, what: str) -> None:
        """Raise :class:`PeerError` where a message through peer memory did not come in time."""
        if (index := self.late()) is not None:
            raise self.lost(what, (index,), RuntimeError(f"nothing came for {self.timeout:g} s"))

    def late(self) -> int | None:
        """The index of a rank for which a kernel here waited in vain, if any. Only the host is asked."""
        for memory in (self.peers, self.peer_sums):
            if memory is not None and (index := memory.late()) is not None:
                return index
        return None

    @property
    def early(self) -> bool:
        """Whether an exchange should be launched before the work beside it. Not by NCCL, which takes 10 us to start."""
        return self.peers is not None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def exchange(
        self,
        what: str,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> Pending:
        """Send tensors to ranks, and receive tensors of the given shapes from ranks, all at once and without waiting.

        Ranks are given by index, and send at most one message to each other in one exchange. Every rank calls this for
        every exchange, even with nothing to send, since exchanges are matched by their number. ``what`` names the place
        in the model for errors. ``like`` has the dtype and device of received tensors.
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
        """Start the operations of one exchange; the works, each with the indices of its ranks."""
        tag = self.progress % LAST_TAG
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
        """Start one operation on a CPU."""
        peer = self.places[index]
        if operation is dist.isend:
            work = dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
        else:
            work = dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks in place, and return it."""
        self.finish_sum(what, self.start_sum(what, tensor))
        return tensor

    def start_sum(self, what: str, tensor: torch.Tensor) -> dist.Work:
        """Start to sum ``tensor`` over the ranks in place. It may be read after :meth:`finish_sum`."""
        self.begin(what)
        try:
            work = dist.all_reduce(tensor, group=self.sums, async_op=True)
        except RuntimeError as error:
            raise self.lost(what, self.others, error) from error
        assert isinstance(work, dist.Work)
        return work

    def finish_sum(self, what: str, work: dist.Work) -> None:
        """Wait for a sum. On a GPU the current stream waits."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(what, self.others, error) from error

    def gather(self, data: object) -> list[Any]:
        """The values of ``data`` of all ranks, by index, sent as JSON. Every rank calls this. It moves no tensors."""
        by_place = gather(data, self.control)
        return [by_place[place] for place in self.places]

    @property
    def others(self) -> tuple[int, ...]:
        """The indices of the other ranks."""
        return tuple(index for index in range(self.size) if index != self.index)

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell the other ranks of an error that leaves this block, so that none of them waits for this rank."""
        try:
            yield
        except BaseException as error:
            self.tell(what, error)
            raise

    def tell(self, what: str, error: BaseException) -> None:
        """Tell the other ranks once why this rank fails, and break its connections.

        ``what`` names the place in the program. A :class:`PeerError` is passed on with its own causes.
        """
        if self._broken is None:
            self._broken = self._failures.tell_failed(what, error)
            self._break()

    def lost(self, what: str, peers: Sequence[int], error: BaseException) -> PeerError:
        """The error for an exchange with ``peers`` in ``what`` that failed: which ranks failed, as far as is known."""
        if self._broken is None:
            awaited = [self.ranks[index] for index in peers]
            self._failures.tell_waited(what, awaited)
            if not self._on_gpu:
                self._break()
            self._broken = self._failures.diagnose(what, awaited, error)
        return self._broken

    def trouble(self) -> int | None:
        """The index of a rank that said it stopped, or whose process went before its program ended; else ``None``."""
        rank = self._failures.stopped()
        return None if rank is None else self.ranks.index(rank)

    def give_up(self, index: int | None) -> None:
        """Called by the watchdog's thread where rank ``index`` is lost, or with ``None`` where the store is.

        The main thread first gets the error and is then woken.
        """
        if self._broken is None:
            reason = "it went no further" if index is not None else "the ranks' store is gone"
            raise_in_main(self.lost(self.doing, self.others if index is None else (index,), RuntimeError(reason)))
            self._break()

    def _break(self) -> None:
        """End every connection, so that ranks that wait at the other end wake."""
        for memory in (self.peers, self.peer_sums):
            if memory is not None:
                memory.stop()
        self._groups.abort()


def _failed(error: BaseException) -> None:
    """Tell every link's ranks of an error that ends the program."""
    for link in list(_every):
        link.tell("its program", error)


def _ended() -> None:
    """Tell every rank that this program ended in order."""
    presence.say_everywhere({"kind": "ended"})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_every.clear)  # a fork's end is not the rank's
