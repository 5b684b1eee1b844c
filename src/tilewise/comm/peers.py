"""Messages straight into another rank's memory, by a kernel on each side, where GPUs reach each other's memory.

Every rank has a buffer that all others see, with a mailbox for each rank that it talks with, and counts of messages
(:mod:`tilewise.kernels.triton.peer`). An exchange is one small kernel on each side: some of its blocks write messages
from wherever they lie, others wait for messages to come, beside whatever else the GPU computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.comm.waiting import Waiting
from tilewise.machine.recent import Recent

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
    """The layout of the buffers, in bytes, which every rank computes equally.

    ``neighbours`` has, for each rank by index, the ranks that it talks with; talking is mutual. ``capacity`` is the
    bytes of the largest message.
    """

    neighbours: tuple[tuple[int, ...], ...]
    capacity: int

    def __post_init__(self) -> None:
        for index, talked_with in enumerate(self.neighbours):
            if any(index not in self.neighbours[peer] for peer in talked_with):
                raise ValueError(f"neighbours={self.neighbours}: rank {index} talks with one that does not with it")
        if self.capacity <= 0 or self.capacity % CHUNK:
            raise ValueError(f"capacity={self.capacity}: a multiple of {CHUNK} above 0 would do")

    @property
    def most(self) -> int:
        """The most ranks that one rank talks with."""
        return max(map(len, self.neighbours), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of every rank's buffer."""
        return self.most * (self.capacity + 2 * 4 * CHANNELS)

    def box(self, owner: int, sender: int) -> int:
        """The offset of the mailbox of ``sender`` in the buffer of ``owner``."""
        return self.neighbours[owner].index(sender) * self.capacity

    def flag(self, owner: int, sender: int) -> int:
        """The offset, in the buffer of ``owner``, of the counts per channel of messages that ``sender`` has written."""
        return self.most * self.capacity + self.neighbours[owner].index(sender) * 4 * CHANNELS

    def ack(self, owner: int, receiver: int) -> int:
        """The offset, in the buffer of ``owner``, of the counts of its messages that ``receiver`` has read."""
        return self.flag(owner, receiver) + self.most * 4 * CHANNELS


class Peers(Waiting):
    """The buffers of all ranks, as seen by rank ``index``. They are zero at first, and all ranks use them in one order.

    After ``timeout`` seconds a kernel gives up, and :meth:`late` tells for which rank it waited. ``kept`` is an object
    that keeps the buffers alive.
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
        """Whether messages of this shape and dtype between this rank and rank ``index`` go through memory.

        Both ends get the same answer.
        """
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
        """Send messages, and return the received tensors of the given shapes and the dtype of ``like``.

        The current stream waits for them. Received images have channels innermost in memory.
        """
        self.in_order()
        flat = [(index, tensor if tensor.dim() <= DIMS else tensor.contiguous()) for index, tensor in sends]
        received = [(index, _image(tuple(shape), like)) for index, shape in receives]
        pushes, takes = _by_twos(flat), _by_twos(received)
        # Whatever a rank waits for is sent before its sender waits for anything.
        for pair in pushes[:-1]:
            self._run(pair, [])
        if pushes or takes:
            self._run(pushes[-1] if pushes else [], takes[0] if takes else [])
        for pair in takes[1:]:
            self._run([], pair)
        return [tensor for _, tensor in received]

    def compile(self, like: torch.Tensor) -> None:
        """Compile the kernels for messages such as ``like``. Raises what Triton raises."""
        for index in self.places.neighbours[self.index][:1]:
            self._program([(index, like)], [(index, like)])

    def _run(self, sends: Messages, receives: Messages) -> None:
        """Run the kernel for at most two messages each way."""
        self._program(sends, receives)(self._tensors(sends, receives))

    def _tensors(self, sends: Messages, receives: Messages) -> list[torch.Tensor]:
        """The tensors that the kernel takes: messages, the other ranks' buffers, this rank's, and the counts."""
        both = [*sends, *receives]
        peer_buffers = [self._buffers[index] for index, _ in both]
        return [*(tensor for _, tensor in both), *peer_buffers, self._buffers[self.index], self._counts, self.page]

    def _program(self, sends: Messages, receives: Messages) -> Program:
        """The compiled kernel for messages of these forms, kept for the next time."""
        key = (len(sends), *((i, t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNED) for i, t in (*sends, *receives)))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._made(sends, receives)
        return program

    def _made(self, sends: Messages, receives: Messages) -> Program:
        """Compile the kernel for messages of these forms."""
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
        """The kernel's arguments for messages, which are the tensors from ``first`` on of ``number``."""
        from tilewise.kernels.triton.launch import Pointer

        places, me, own_buffer, counts = self.places, self.index, 2 * number, 2 * number + 1
        word = WORDS[min((_word(self._ordered(tensor)) for _, tensor in messages), default=1)]
        at = functools.partial(Pointer, dtype=torch.int32)
        slots = []
        for n, (rank, tensor) in enumerate(messages, first):
            if take:
                box, awaited = Pointer(own_buffer, places.box(me, rank), word), at(own_buffer, places.flag(me, rank))
                released = at(number + n, places.ack(rank, me))
            else:
                box, awaited = Pointer(number + n, places.box(rank, me), word), at(own_buffer, places.ack(me, rank))
                released = at(number + n, places.flag(rank, me))
            row = take * places.most + places.neighbours[me].index(rank)
            pointers = Pointer(n, 0, word), box, awaited, released, at(counts, 4 * CHANNELS * row)
            shape = merged(self._ordered(tensor), word.itemsize)
            slots.append(_Slot(pointers, rank, math.prod(size for size, _ in shape), shape, CHUNK // word.itemsize))
        return slots

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with its dimensions in the order in which its elements travel."""
        return tensor.movedim(1, -1) if self.near and tensor.dim() > 2 else tensor


@dataclass(frozen=True, slots=True)
class _Slot:
    """The kernel's arguments for one message; ``words`` and ``chunk`` count words."""

    pointers: tuple[Pointer, ...]
    rank: int
    words: int
    shape: list[tuple[int, int]]
    chunk: int

    @property
    def blocks(self) -> int:
        """The number of blocks that move the message."""
        return min(CHANNELS, -(-self.words // self.chunk))


def _image(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory for a message; with three dimensions or more it is an image, with channels innermost."""
    if len(shape) < 3:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    n, c, *sizes = shape
    return torch.empty((n, *sizes, c), dtype=like.dtype, device=like.device).movedim(-1, 1)


def _by_twos(messages: list[tuple[int, torch.Tensor]]) -> list[Messages]:
    """The messages in groups of at most two."""
    return [messages[n : n + 2] for n in range(0, len(messages), 2)]


def merged(tensor: torch.Tensor, word: int) -> list[tuple[int, int]]:
    """Five pairs (size, stride) that describe ``tensor``, in words of ``word`` bytes.

    Dimensions that follow each other in memory are merged, and missing ones have size 1.
    """
    size = tensor.element_size()
    pairs: list[tuple[int, int]] = []
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 1:
            continue
        if pairs and pairs[-1][1] == length * stride:
            pairs[-1] = pairs[-1][0] * length, stride
        else:
            pairs.append((length, stride))
    pairs = pairs or [(1, 1)]
    if word > size:
        per_word = word // size
        innermost = pairs.pop()
        pairs = [(length, stride // per_word) for length, stride in pairs] + [(innermost[0] // per_word, 1)]
    return [(1, 0)] * (DIMS - len(pairs)) + pairs


def _dims(shape: list[tuple[int, int]]) -> int:
    """How many of the innermost dimensions there are; 0 for one contiguous run."""
    count = next((DIMS - i for i, (size, _) in enumerate(shape) if size > 1), 1)
    return 0 if count == 1 and shape[-1][1] == 1 else count


def _word(tensor: torch.Tensor) -> int:
    """The bytes of the largest word in which ``tensor`` can be moved."""
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
