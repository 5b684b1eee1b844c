"""Messages straight into another rank's memory, by a kernel on each side, where GPUs reach each other's.

Every rank has a buffer that all others see: a mailbox for each rank that it talks with, and the counts that go with it
(:mod:`tilewise.kernels.triton.peer`). An exchange is one small kernel on each side: some of its blocks write messages
from wherever they lie, others wait for those that come, beside whatever else the GPU computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.comm.waiting import Waiting
from tilewise.recent import Recent

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Pointer, Program

__all__ = ["Peers", "Places", "merged"]

MOST_PROGRAMS = 1024
"""Kernels, by the messages that they carry, that are kept."""
CHANNELS = 32
"""Blocks of one message at most: enough for a link of 450 GB/s, few enough for a convolution to run beside them."""
CHUNK = 1 << 13
"""Bytes. With 4 warps each thread has 8 words of 8 bytes on their way."""
WARPS = 4
DIMS = 5
"""Dimensions of strided memory that kernels take, after those that lie in one run are merged."""
Messages = Sequence[tuple[int, torch.Tensor]]
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


class Peers(Waiting):
    """The buffers of all ranks, as rank ``index`` sees them, all zero at first; used in one order by all ranks.

    ``timeout`` is in seconds, after which a kernel gives up and :meth:`late` tells for whom it waited. ``kept`` is what
    the buffers need to stay there.
    """

    def __init__(
        self, places: Places, buffers: Sequence[torch.Tensor], index: int, timeout: float, kept: object = None
    ) -> None:
        device = buffers[index].device
        super().__init__(device, timeout)
        self.places, self.index, self._buffers, self._kept = places, index, list(buffers), kept
        self.largest = places.capacity
        """Bytes of the largest message that goes this way."""
        self._counts = torch.zeros((2, places.most, CHANNELS), dtype=torch.int32, device=device)
        """How many messages were sent to each neighbour and taken from it, by channel."""
        self._programs: Recent[Any, Program] = Recent(MOST_PROGRAMS)
        self.near = False
        """Whether images travel with channels innermost; the same on all ranks."""

    def carries(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether such messages go to and come from rank ``index`` here. Both ends give one answer."""
        size = dtype.itemsize
        return (
            index in self.places.neighbours[self.index]
            and size in WORDS
            and 0 < math.prod(shape) * size <= self.largest
        )

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, Sequence[int]]],
        like: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Send messages, and what comes, of these shapes and of the type of ``like``: the current stream waits for it.

        Images that come have their channels next to each other in memory.
        """
        self.in_order()
        flat = [(index, tensor if tensor.dim() <= DIMS else tensor.contiguous()) for index, tensor in sends]
        found = [(index, _image(tuple(shape), like)) for index, shape in receives]
        pushes, takes = _by_twos(flat), _by_twos(found)
        # Whatever a rank waits for is sent before its sender waits for anything.
        for pair in pushes[:-1]:
            self._run(pair, [])
        if pushes or takes:
            self._run(pushes[-1] if pushes else [], takes[0] if takes else [])
        for pair in takes[1:]:
            self._run([], pair)
        return [tensor for _, tensor in found]

    def compile(self, like: torch.Tensor) -> None:
        """Compile the kernels for messages such as ``like``. Raises what Triton raises."""
        for index in self.places.neighbours[self.index][:1]:
            self._program([(index, like)], [(index, like)])

    def _run(self, sends: Messages, receives: Messages) -> None:
        self._program(sends, receives)(self._tensors(sends, receives))

    def _tensors(self, sends: Messages, receives: Messages) -> list[torch.Tensor]:
        both = [*sends, *receives]
        theirs = [self._buffers[index] for index, _ in both]
        return [*(tensor for _, tensor in both), *theirs, self._buffers[self.index], self._counts, self.page]

    def _program(self, sends: Messages, receives: Messages) -> Program:
        key = (len(sends), *((i, t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNED) for i, t in (*sends, *receives)))
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._made(sends, receives)
        return found

    def _made(self, sends: Messages, receives: Messages) -> Program:
        from tilewise.kernels.triton import peer
        from tilewise.kernels.triton.launch import Launch, Pointer, Program

        number = len(sends) + len(receives)
        pushes = self._slots(sends, 0, number, take=False)
        takes = self._slots(receives, len(sends), number, take=True)
        blocks = [n for slots in (pushes, takes) for n in [*(slot.blocks for slot in slots), 0, 0][:2]]
        # Of a message that is not there nothing is read: another stands for it.
        push, take = pushes or takes, takes or pushes
        four = [push[0], push[-1], take[0], take[-1]]
        pointers = [pointer for column in zip(*(slot.pointers for slot in four), strict=True) for pointer in column]
        pointers.append(Pointer(2 * number + 2, 0, torch.int32))
        scalars = [self.rounds, *blocks[:3]]
        for slot in four:
            scalars += [slot.rank, slot.words, *(size for size, _ in slot.shape[1:])]
        scalars += [stride for slot in four for _, stride in slot.shape]
        constants = {
            "PUSH_WORDS": push[0].chunk, "PUSH_DIMS": max(_dims(slot.shape) for slot in push),
            "TAKE_WORDS": take[0].chunk, "TAKE_DIMS": max(_dims(slot.shape) for slot in take),
            "CHANNELS": CHANNELS, "LOOK": self.look,
        }  # fmt: skip
        launch = Launch(peer.message, (sum(blocks), 1, 1), tuple(pointers), tuple(scalars), constants, WARPS)
        tensors = self._tensors(sends, receives)
        return Program([launch], [math.gcd(t.data_ptr(), ALIGNED) for t in tensors], tensors[0].device)

    def _slots(self, messages: Messages, first: int, number: int, take: bool) -> list[_Slot]:
        """What the kernel is told of messages, which are the tensors from ``first`` on of ``number``."""
        from tilewise.kernels.triton.launch import Pointer

        places, me, own, counts = self.places, self.index, 2 * number, 2 * number + 1
        word = WORDS[min((_word(self._ordered(tensor)) for _, tensor in messages), default=1)]
        at = functools.partial(Pointer, dtype=torch.int32)
        found = []
        for n, (rank, tensor) in enumerate(messages, first):
            if take:
                box, awaited = Pointer(own, places.box(me, rank), word), at(own, places.flag(me, rank))
                released = at(number + n, places.ack(rank, me))
            else:
                box, awaited = Pointer(number + n, places.box(rank, me), word), at(own, places.ack(me, rank))
                released = at(number + n, places.flag(rank, me))
            row = take * places.most + places.neighbours[me].index(rank)
            pointers = Pointer(n, 0, word), box, awaited, released, at(counts, 4 * CHANNELS * row)
            shape = merged(self._ordered(tensor), word.itemsize)
            found.append(_Slot(pointers, rank, math.prod(size for size, _ in shape), shape, CHUNK // word.itemsize))
        return found

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with its dimensions in the order in which elements travel."""
        return tensor.movedim(1, -1) if self.near and tensor.dim() > 2 else tensor


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a kernel is told of one message; ``chunk`` is in words."""

    pointers: tuple[Pointer, ...]
    rank: int
    words: int
    shape: list[tuple[int, int]]
    chunk: int

    @property
    def blocks(self) -> int:
        return min(CHANNELS, -(-self.words // self.chunk))


def _image(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory for what comes; of three dimensions or more it is an image."""
    if len(shape) < 3:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    n, c, *sizes = shape
    return torch.empty((n, *sizes, c), dtype=like.dtype, device=like.device).movedim(-1, 1)


def _by_twos(messages: list[tuple[int, torch.Tensor]]) -> list[Messages]:
    return [messages[n : n + 2] for n in range(0, len(messages), 2)]


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
