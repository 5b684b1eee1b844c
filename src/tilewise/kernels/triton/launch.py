"""Kernels compiled once and launched by address: no autotuner, no argument analysis and no tensor views in a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from tilewise.kernels.triton import workers
from tilewise.kernels.triton.own_cache import own_cache

__all__ = ["Launch", "Pointer", "Program"]

ALIGNED = 16
"""Bytes; Triton compiles one version for pointers at multiples of this and one for others."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: ``offset`` bytes into tensor number ``source`` of those a program is called with."""

    source: int
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. The kernel takes the ``pointers``, then the ``scalars``, then the ``constants`` by name."""

    kernel: Any
    grid: tuple[int, int, int]
    pointers: tuple[Pointer, ...]
    scalars: tuple[int | float, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2

    def compile(self, alignment: Sequence[int]) -> Any:
        """The compiled kernel for the current device; ``alignment`` in bytes of each source tensor.

        In a thread that a pool of workers serves, one of them compiles it first.
        """
        stand_ins = [_Address(p.dtype, math.gcd(alignment[p.source], p.offset)) for p in self.pointers]
        options = {"num_warps": self.warps, "num_stages": self.stages}
        with own_cache():
            workers.reroute(self.kernel)
            return self.kernel.warmup(*stand_ins, *self.scalars, **self.constants, grid=self.grid, **options)

    def interpret(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Run in Triton's interpreter, on CPU tensors."""
        views = [_view(tensors[p.source], p) for p in self.pointers]
        self.kernel[self.grid](*views, *self.scalars, **self.constants)


class Program:
    """Launches in order over the tensors it is called with, on the current stream of ``device``.

    ``alignment`` gives the bytes to which each tensor's address will be aligned. Raises what Triton raises for a kernel
    that does not compile or needs more shared memory than there is.
    """

    __slots__ = ("_current", "_device", "_interpreted", "_launches", "_steps", "_stream")

    def __init__(self, launches: Sequence[Launch], alignment: Sequence[int], device: torch.device) -> None:
        self._interpreted = device.type == "cpu"
        self._launches = launches if self._interpreted else ()
        self._steps: list[tuple[Callable[..., None], tuple[tuple[int, int], ...], tuple[Any, ...]]] = []
        if self._interpreted:
            for launch in launches:
                if not isinstance(launch.kernel, InterpretedFunction):
                    raise RuntimeError("Triton kernels run on CPU tensors in its interpreter alone: TRITON_INTERPRET=1")
            return
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        with torch.cuda.device(self._device), own_cache():
            for launch in launches:
                compiled = launch.compile(alignment)
                pointers = tuple((p.source, p.offset) for p in launch.pointers)
                constants = tuple(launch.constants[n] for n in launch.kernel.arg_names if n in launch.constants)
                self._steps.append((compiled[launch.grid], pointers, (*launch.scalars, *constants)))

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch over tensors aligned as promised."""
        if self._interpreted:
            for launch in self._launches:
                launch.interpret(tensors)
        else:
            self.at([0 if t is None else t.data_ptr() for t in tensors])

    def at(self, addresses: Sequence[int]) -> None:
        """Launch over memory at ``addresses``."""
        device = self._device
        if self._current is not None and self._current() != device:
            with torch.cuda.device(device):
                self.at(addresses)
            return
        stream = self._stream(device)
        for run, pointers, rest in self._steps:
            run(*[addresses[source] + offset for source, offset in pointers], *rest, stream=stream)


class _Address:
    """What Triton asks of a pointer argument when it compiles: a type and whether it is aligned."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        return 2**63 - 1


def _view(tensor: torch.Tensor | None, pointer: Pointer) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"tensor {pointer.source} is None, a kernel takes its address")
    itemsize = pointer.dtype.itemsize
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size() + pointer.offset
    flat = torch.empty(0, dtype=pointer.dtype, device=tensor.device)
    size = (storage.nbytes() - start) // itemsize
    if start % itemsize:
        raise ValueError(f"byte {start} of tensor {pointer.source} is no multiple of {itemsize}")
    return flat.set_(storage, start // itemsize, (size,), (1,))


def interpreting() -> bool:
    """Whether kernels defined now run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)
