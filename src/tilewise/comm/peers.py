"""Messages straight into another rank's memory, by a kernel on each side, where GPUs reach each other's.

Every rank has a buffer that all others see: a mailbox for each rank that it talks with, and the counts that go with it
(:mod:`tilewise.kernels.triton.peer`). A message takes two small kernels: one that writes it there from wherever it
lies, and one that reads it from there to wherever it belongs, or adds it to what is there. Neither packs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Program

__all__ = ["Arriving", "Peers", "Places", "merged"]

CHANNELS = 32
"""Blocks of one message at most: enough for a link of 450 GB/s, few enough for a convolution to run beside them."""
CHUNK = 1 << 14
"""Bytes. With 8 warps each thread has 8 words of 8 bytes on their way."""
WARPS = 8
DIMS = 5
"""Dimensions of strided memory that kernels take, after those that lie in one run are merged."""
LOOK = 1 << 13
"""Looks at a flag between two at the page, which lies in the host's memory."""
LOOK_S = 0.25e-6
"""Least time of a look, which goes to L2 and back."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
ALIGNED = 16


@dataclass(frozen=True)
class Places:
    """Where what lies in the buffers, in bytes: the same arithmetic on every rank.

    ``neighbours`` has for each rank, by index, those that it talks with; whoever talks is talked to. ``capacity`` is
    the largest message.
    """

    neighbours: tuple[tuple[int, ...], ...]
    capacity: int

    def __post_init__(self) -> None:
        for index, others in enumerate(self.neighbours):
            if any(index not in self.neighbours[other] for other in others):
                raise ValueError(f"neighbours={self.neighbours}: rank {index} talks with one that does not with it")
        if self.capacity <= 0 or self.capacity % CHUNK:
            raise ValueError(f"capacity={self.capacity}: a multiple of {CHUNK} above 0 would do")

    @property
    def most(self) -> int:
        """How many ranks one talks with at most."""
        return max(map(len, self.neighbours), default=0)

    @property
    def nbytes(self) -> int:
        """Size of every rank's buffer."""
        return self.most * (self.capacity + 2 * 4 * CHANNELS)

    def box(self, owner: int, sender: int) -> int:
        """The mailbox of ``sender`` in the buffer of ``owner``."""
        return self.neighbours[owner].index(sender) * self.capacity

    def flag(self, owner: int, sender: int) -> int:
        """How many messages ``sender`` has written for ``owner``, a count a channel."""
        return self.most * self.capacity + self.neighbours[owner].index(sender) * 4 * CHANNELS

    def ack(self, owner: int, receiver: int) -> int:
        """How many messages of ``owner`` that ``receiver`` has read."""
        return self.flag(owner, receiver) + self.most * 4 * CHANNELS


class Peers:
    """The buffers of all ranks, as rank ``index`` sees them, all zero at first; used in one order by all ranks.

    ``timeout`` is in seconds, after which a kernel gives up and :meth:`late` tells for whom it waited. ``kept`` is what
    the buffers need to stay there.
    """

    def __init__(
        self, places: Places, buffers: Sequence[torch.Tensor], index: int, timeout: float, kept: object = None
    ) -> None:
        self.places, self.index, self._buffers, self._kept = places, index, list(buffers), kept
        self.largest = places.capacity
        """Bytes of the largest message that goes this way."""
        self.page = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=buffers[index].is_cuda)
        """By which kernels are stopped, and on which they tell for whom they waited in vain."""
        self._seen = self.page.numpy()
        self._rounds = min(max(1, math.ceil(timeout / (LOOK * LOOK_S))), 2**31 - 1)
        device = buffers[index].device
        self._counts = torch.zeros((2, places.most, CHANNELS), dtype=torch.int32, device=device)
        """How many messages were sent to each neighbour and taken from it, by channel."""
        self._programs: dict[Any, Program] = {}
        self._open: Arriving | None = None
        self._last: tuple[torch.cuda.Stream, bool] | None = None

    def carries(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether such messages go to and come from rank ``index`` here. Both ends give one answer."""
        size = dtype.itemsize
        return (
            index in self.places.neighbours[self.index]
            and size in WORDS
            and 0 < math.prod(shape) * size <= self.largest
        )

    def late(self) -> int | None:
        """The rank for which a kernel waited in vain; asks only the host."""
        rank = int(self._seen[1])
        return rank - 1 if rank else None

    def stop(self) -> None:
        """Have kernels that wait give up; may be called from any thread, and while the GPU captures a graph."""
        self._seen[0] = 1

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> Arriving:  # fmt: skip
        """Write messages, and what comes: their shapes, and ``like`` for type and device."""
        if self._open is not None:
            # The others' next messages wait until their last ones are read.
            self._open.take()
        self._in_order()
        flat = [(index, tensor if tensor.dim() <= DIMS else tensor.contiguous()) for index, tensor in sends]
        for first in range(0, len(flat), 2):
            self._run("push", flat[first : first + 2])
        found = Arriving(self, list(receives), like)
        self._open = found if receives else None
        return found

    def compile(self, like: torch.Tensor) -> None:
        """Compile the kernels for messages such as ``like``. Raises what Triton raises."""
        for index in self.places.neighbours[self.index][:1]:
            for kind in ("push", "take", "add"):
                self._program(kind, [(index, like)], self._tensors([(index, like)]))

    def _in_order(self) -> None:
        """Have the current stream wait for the last message's, where that is another."""
        if not self._counts.is_cuda:
            return
        stream = torch.cuda.current_stream(self._counts.device)
        capturing = torch.cuda.is_current_stream_capturing()
        last = self._last
        self._last = stream, capturing
        if last is None or last[0] == stream or last[1] != capturing:
            return
        # What was captured before did not run, and a capture cannot wait for what is none of its own.
        if not capturing or _captures(last[0]):
            stream.wait_stream(last[0])

    def _take(self, pairs: Iterable[Sequence[tuple[int, torch.Tensor]]], add: bool) -> None:
        self._in_order()
        for pair in pairs:
            self._run("add" if add else "take", pair)

    def _run(self, kind: str, pair: Sequence[tuple[int, torch.Tensor]]) -> None:
        tensors = self._tensors(pair)
        self._program(kind, pair, tensors)(tensors)

    def _tensors(self, pair: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        theirs = [self._buffers[index] for index, _ in pair]
        return [*(tensor for _, tensor in pair), *theirs, self._buffers[self.index], self._counts, self.page]

    def _program(self, kind: str, pair: Sequence[tuple[int, torch.Tensor]], tensors: list[torch.Tensor]) -> Program:
        key = (kind, *((i, t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNED) for i, t in pair))
        if key not in self._programs:
            self._programs[key] = self._made(kind, pair, tensors)
        return self._programs[key]

    def _made(self, kind: str, pair: Sequence[tuple[int, torch.Tensor]], tensors: list[torch.Tensor]) -> Program:
        from tilewise.kernels.triton import peer
        from tilewise.kernels.triton.launch import Launch, Pointer, Program

        places, me, number, take = self.places, self.index, len(pair), kind != "push"
        two = (0, number - 1)
        ranks = [pair[n][0] for n in two]
        theirs, own, counts, page = [number + n for n in two], 2 * number, 2 * number + 1, 2 * number + 2
        word = pair[0][1].dtype if kind == "add" else WORDS[min(_word(t) for _, t in pair)]
        at = functools.partial(Pointer, dtype=torch.int32)
        if take:
            boxes = [Pointer(own, places.box(me, rank), word) for rank in ranks]
            awaited = [at(own, places.flag(me, rank)) for rank in ranks]
            released = [at(source, places.ack(rank, me)) for source, rank in zip(theirs, ranks, strict=True)]
        else:
            boxes = [Pointer(source, places.box(rank, me), word) for source, rank in zip(theirs, ranks, strict=True)]
            awaited = [at(own, places.ack(me, rank)) for rank in ranks]
            released = [at(source, places.flag(rank, me)) for source, rank in zip(theirs, ranks, strict=True)]
        rows = [take * places.most + places.neighbours[me].index(rank) for rank in ranks]
        pointers = (
            *(Pointer(n, 0, word) for n in two), *boxes, *awaited, *released,
            *(at(counts, 4 * CHANNELS * row) for row in rows), at(page, 0),
        )  # fmt: skip
        shapes = [merged(pair[n][1], word.itemsize) for n in two]
        words = [math.prod(size for size, _ in shape) for shape in shapes]
        chunk = CHUNK // word.itemsize
        blocks = [min(CHANNELS, -(-n // chunk)) for n in words]
        scalars = [self._rounds, blocks[0]]
        for rank, count, shape in zip(ranks, words, shapes, strict=True):
            scalars += [rank, count, *(size for size, _ in shape[1:])]
        scalars += [stride for shape in shapes for _, stride in shape]
        constants = {
            "TAKE": take, "ADD": kind == "add", "WORDS": chunk, "CHANNELS": CHANNELS,
            "DIMS": max(map(_dims, shapes)), "LOOK": LOOK,
        }  # fmt: skip
        launch = Launch(peer.message, (sum(blocks[:number]), 1, 1), pointers, tuple(scalars), constants, WARPS)
        alignment = [math.gcd(t.data_ptr(), ALIGNED) for t in tensors]
        return Program([launch], alignment, tensors[0].device)


class Arriving:
    """Messages on their way here; either :meth:`take` or :meth:`add_to` is called, once."""

    __slots__ = ("_found", "_like", "_peers", "_receives")

    def __init__(self, peers: Peers, receives: list[tuple[int, Sequence[int]]], like: torch.Tensor) -> None:
        self._peers, self._receives, self._like = peers, receives, like
        self._found: list[torch.Tensor] | None = None

    def take(self) -> list[torch.Tensor]:
        """The messages, in tensors of their own. The current stream waits."""
        if self._found is None:
            like = self._like
            self._found = [torch.empty(tuple(s), dtype=like.dtype, device=like.device) for _, s in self._receives]
            pairs = list(zip((i for i, _ in self._receives), self._found, strict=True))
            self._peers._take((pairs[n : n + 2] for n in range(0, len(pairs), 2)), add=False)
            self._settled()
        return self._found

    def add_to(self, targets: Sequence[torch.Tensor], apart: bool) -> None:
        """Add each message to its target, of its shape; ``apart``: the targets share no element."""
        if self._found is not None or not all(t.dim() <= DIMS and t.is_floating_point() for t in targets):
            for found, target in zip(self.take(), targets, strict=True):
                target.add_(found)
            return
        pairs = list(zip((i for i, _ in self._receives), targets, strict=True))
        step = 2 if apart else 1
        self._peers._take((pairs[n : n + step] for n in range(0, len(pairs), step)), add=True)
        self._settled()

    def _settled(self) -> None:
        if self._peers._open is self:
            self._peers._open = None


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def merged(tensor: torch.Tensor, word: int) -> list[tuple[int, int]]:
    """(size, stride) of five dimensions of ``tensor``, at most as many itself, in words of ``word`` bytes.

    Dimensions that follow each other in memory are one.
    """
    size = tensor.element_size()
    found: list[tuple[int, int]] = []
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 1:
            continue
        if found and found[-1][1] == length * stride:
            found[-1] = found[-1][0] * length, stride
        else:
            found.append((length, stride))
    found = found or [(1, 1)]
    if word > size:
        per_word = word // size
        inner = found.pop()
        found = [(length, stride // per_word) for length, stride in found] + [(inner[0] // per_word, 1)]
    return [(1, 0)] * (DIMS - len(found)) + found


def _dims(shape: list[tuple[int, int]]) -> int:
    """How many of the innermost dimensions are there; 0: one run."""
    count = next((DIMS - i for i, (size, _) in enumerate(shape) if size > 1), 1)
    return 0 if count == 1 and shape[-1][1] == 1 else count


def _word(tensor: torch.Tensor) -> int:
    """Bytes of the largest word in which ``tensor`` can be moved."""
    size = tensor.element_size()
    shape = merged(tensor, size)
    word = 8
    while word > size:
        strides = [stride for length, stride in shape[:-1] if length > 1]
        bytes_ = [tensor.data_ptr(), shape[-1][0] * size, *(stride * size for stride in strides)]
        if shape[-1][1] == 1 and all(n % word == 0 for n in bytes_):
            return word
        word //= 2
    return size
