"""The ranks that share one image: their process groups, exchanges in one order on all, and what becomes of a failure.

Exchanges have a group of their own, so that halos never queue behind sums of gradients, and so that this library's
messages are never taken for the user's. A rank that fails writes its reason into the store that the ranks started
from, then breaks its connections: whoever waits for it wakes, reads the reason and raises it as its own error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.comm.agreement import gather
from tilewise.comm.peer_sums import PeerSums
from tilewise.comm.peers import Peers
from tilewise.comm.watch import Watch, raise_in_main

__all__ = ["Link", "Noted", "PeerError", "Pending"]

GRACE_S = 0.5
"""How long a rank that lost another waits for what the others write of it."""
TAGS = 2**30
NCCL_LATER_S = 60.0

_links: dict[tuple[int, ...], itertools.count[int]] = {}


class PeerError(RuntimeError):
    """Another rank failed, ended, or said nothing in time; the message names that rank and where in the model."""


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
        self.group, self.sums = self._new_group(None), self._new_group(None)
        self.control = self._new_group("gloo") if self._on_gpu else self.sums
        self.places = tuple(sorted(self.ranks).index(rank) for rank in self.ranks)
        """Of each rank, by index, its number in the process groups."""
        number = next(_links.setdefault(self.ranks, itertools.count()))
        self.key = f"tilewise/{'-'.join(map(str, self.ranks))}/{number}"
        self.told: set[bytes] = set()
        """Digests of texts that this rank has written for the others with :meth:`tell_words`."""
        self.progress, self.doing = 0, "nothing yet"
        """How many exchanges and sums were begun here, and where in the model the last was."""
        self.peers: Peers | None = None
        """Carries the messages that it can; none before :func:`tilewise.distributed.optimize`."""
        self.peer_sums: PeerSums | None = None
        """Where kernels that add up numbers of all ranks keep them."""
        self.noted: Noted | None = None
        """What goes over the ranks, while somebody wants to know."""
        self._broken: PeerError | None = None
        if self._on_gpu:
            # NCCL lets a part of a group talk only once all of it has.
            for group in (self.group, self.sums):
                here = torch.device("cuda", torch.cuda.current_device())
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=here), group=group)
            Watch(self).start()

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
        """Write why this rank fails, once, and break its connections. A rank that only heard of it tells nothing."""
        if self._broken is not None:
            return
        text = f"rank {self.ranks[self.index]} failed in {what}: {type(error).__name__}: {error}"
        self._post({"failed": text})
        self._broken = PeerError(text)
        self._break()

    def lost(self, what: str, peers: Sequence[int], error: BaseException) -> PeerError:
        """The error for an exchange in ``what`` with ``peers`` that came to nothing: who failed, as far as is known."""
        if self._broken is not None:
            return self._broken
        names = " and ".join(f"rank {self.ranks[index]}" for index in peers)
        own = f"rank {self.ranks[self.index]} waited for {names} in {what}"
        self._post({"waited": own})
        if not self._on_gpu:
            self._break()
        time.sleep(GRACE_S)
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        self._broken = PeerError(self._story(own, first_line))
        return self._broken

    def _story(self, own: str, first_line: str) -> str:
        said = self._posted()
        failed = [entry["failed"] for entry in said.values() if "failed" in entry]
        if failed:
            return f"{'; '.join(failed)} ({own})"
        waited = [own, *(entry["waited"] for index, entry in said.items() if index != self.index)]
        silent = [f"rank {self.ranks[index]}" for index in self.others if index not in said]
        if not silent:
            return f"{'; '.join(waited)}: {first_line}"
        return (
            f"{' and '.join(silent)} ended or gave no answer for {self.timeout:g} s ({'; '.join(waited)}: {first_line})"
        )

    def give_up(self, index: int | None) -> None:
        """From the watching thread: rank ``index`` is lost (``None``: the store is).

        The main thread gets the error first and is then woken.
        """
        if self._broken is None:
            said = "it went no further" if index is not None else "the ranks' store is gone"
            raise_in_main(self.lost(self.doing, self.others if index is None else (index,), RuntimeError(said)))
            self._break()

    def _post(self, entry: dict[str, str]) -> None:
        # Where the store went with the rank that kept it, the broken connection is all the others hear.
        with contextlib.suppress(RuntimeError):
            distributed_c10d._get_default_store().set(f"{self.key}/{self.index}", json.dumps(entry))

    def _posted(self) -> dict[int, dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        with contextlib.suppress(RuntimeError):
            store = distributed_c10d._get_default_store()
            for index in range(self.size):
                key = f"{self.key}/{index}"
                if store.check([key]):
                    found[index] = json.loads(store.get(key))
        return found

    def _break(self) -> None:
        """End every connection, so that whoever waits at the other end wakes."""
        for memory in (self.peers, self.peer_sums):
            if memory is not None:
                memory.stop()
        for group in dict.fromkeys((self.group, self.sums, self.control)):
            if self._on_gpu and group is not self.control:
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
