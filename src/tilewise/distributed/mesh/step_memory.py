"""Every block of memory that a traced step allocates, and when it is given back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from tilewise.distributed.mesh.events import Allocated, Array, Event, Freed, Gradient, Kernel
from tilewise.distributed.parts.ghosts import Reader

__all__ = ["StepMemory"]


@dataclass
class _Block:
    """One block of memory, the first tensor in it, and the windows that slide over it."""

    nbytes: int
    array: Array
    readers: dict[tuple[Reader, ...], None] = field(default_factory=dict)


class StepMemory:
    """The events of a step, in which each storage of a tensor is an allocated block.

    ``space`` is the number of spatial dimensions, and ``weights`` are the shapes of the model's parameters.
    """

    def __init__(self, space: int, weights: frozenset[tuple[int, ...]]) -> None:
        self._space, self._weights = space, weights
        self._events: list[Kernel | int | Freed | Gradient] = []
        """The events so far; an allocation is the index of its block, as windows over it may still come."""
        self._blocks: list[_Block] = []
        self._index_of: dict[int, int] = {}
        """The index of each living block, by the address of its storage."""

    def append(self, event: Kernel | Gradient) -> None:
        """Add an event to the step."""
        self._events.append(event)

    def events(self) -> tuple[Event, ...]:
        """All events so far, each allocation with all windows over it."""
        return tuple(self._allocated(event) if isinstance(event, int) else event for event in self._events)

    def _allocated(self, index: int) -> Allocated:
        """The allocation of block number ``index``."""
        block = self._blocks[index]
        return Allocated(index, block.nbytes, block.array, tuple(block.readers))

    def array(self, tensor: torch.Tensor) -> Array:
        """The shape and type of ``tensor``, and which of its dimensions are spatial."""
        shape = tuple(map(int, tensor.shape))
        space = self._space if len(shape) >= self._space + 2 and shape not in self._weights else 0
        return Array(shape, tensor.element_size(), space)

    def hold(self, tensor: torch.Tensor, backward: bool) -> None:
        """Record the storage of ``tensor`` as allocated where it is new, and as freed once it is gone."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._index_of or not storage.nbytes():
            return
        index = self._index_of[address] = len(self._blocks)
        self._blocks.append(_Block(storage.nbytes(), self.array(tensor)))
        # A gradient of a parameter is counted with the parameter, which has it in the steps to come as well.
        if backward and tuple(tensor.shape) in self._weights:
            weakref.finalize(storage, self._index_of.pop, address, None).atexit = False
            return
        self._events.append(index)

        def freed() -> None:
            if self._index_of.get(address) == index:
                del self._index_of[address]
            self._events.append(Freed(index))

        weakref.finalize(storage, freed).atexit = False

    def add_window(self, tensor: torch.Tensor, readers: tuple[Reader, ...]) -> Array:
        """Note that a window slides over ``tensor``, whose block then needs ghost zones; returns its array."""
        index = self._index_of.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._blocks[index].readers[readers] = None
        return self.array(tensor)
