"""Triton kernels compiled once and launched by address, with no autotuner or argument analysis in a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from tilewise.kernels.building import target, workers
from tilewise.kernels.building.kernel_keys import settle
from tilewise.kernels.building.noted import note, triton_entry
from tilewise.kernels.native import building
from tilewise.kernels.native.sequence import Address, KernelLaunch, LaunchSequence, launch_list
from tilewise.kernels.triton.driver_launch import hooks, kernel_launch, late_launchers, made_now
from tilewise.kernels.triton.own_cache import own_cache
from tilewise.machine.turns import pause
from tilewise.problems.limits import INT64_MAX

__all__ = ["Launch", "Pointer", "Program"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: ``offset`` bytes into tensor number ``source`` of those that a program is called with."""

    source: int
    offset: int
    dtype: torch.dtype
    anywhere: bool = False
    """Whether the kernel gains nothing from an alignment: it is then compiled once, for any address."""

    def promised(self, alignment: Sequence[int]) -> int:
        """Bytes that divide the address, as far as the kernel may know, for tensors that are aligned so."""
        return self.dtype.itemsize if self.anywhere else math.gcd(alignment[self.source], self.offset)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel, whose arguments are the ``pointers``, the ``scalars`` and, by name, the ``constants``."""

    kernel: Any
    grid: tuple[int, int, int]
    pointers: tuple[Pointer, ...]
    scalars: tuple[int | float, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2
    overlaps: bool = False
    """Whether it may start while the launch before it still runs: the kernel waits for that itself."""

    def compile(self, alignment: Sequence[int]) -> Any:
        """The kernel compiled for the current device; ``alignment`` is that of each source tensor in bytes.

        In a thread that a pool of workers serves, one of these compiles it first.
        """
        stand_ins = [_Address(p.dtype, p.promised(alignment)) for p in self.pointers]
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.overlaps:
            options["launch_pdl"] = True
        pause()
        settle(self.kernel)
        with own_cache():
            workers.reroute(self.kernel)
            compiled = self.kernel.warmup(*stand_ins, *self.scalars, **self.constants, grid=self.grid, **options)
        if key := getattr(compiled, "hash", ""):
            note(f"triton/{triton_entry(key)}")
        return compiled

    def interpret(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Run in Triton's interpreter, on CPU tensors."""
        views = [_view(tensors[p.source], p) for p in self.pointers]
        self.kernel[self.grid](*views, *self.scalars, **self.constants)


class Program:
    """Launches in order over the tensors that it is called with, on the current stream of ``device``.

    ``alignment`` is the number of bytes to which each tensor's address will be aligned. Raises what Triton raises for a
    kernel that does not compile or needs too much shared memory.
    """

    __slots__ = ("_current", "_device", "_interpreted", "_launches", "_native", "_steps", "_stream", "sequence")
    sequence: LaunchSequence | None
    """What the driver is told; ``None`` where it cannot be told without Triton."""

    def __init__(self, launches: Sequence[Launch], alignment: Sequence[int], device: torch.device) -> None:
        self._interpreted = device.type == "cpu"
        self._launches = launches if self._interpreted else ()
        self._steps: list[tuple[Callable[..., None], tuple[tuple[int, int], ...], tuple[Any, ...]]] = []
        self.sequence = self._native = None
        if target.sought() is not None:
            _compiled(launches, alignment)
            return
        if self._interpreted:
            for launch in launches:
                if not isinstance(launch.kernel, InterpretedFunction):
                    raise RuntimeError("Triton kernels run on CPU tensors in its interpreter alone: TRITON_INTERPRET=1")
            return
        building.start()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        described = []
        with torch.cuda.device(self._device), own_cache(), late_launchers():
            loaded = _compiled(launches, alignment)
            for launch, compiled in zip(launches, loaded, strict=True):
                pointers = tuple(Address(p.source, p.offset) for p in launch.pointers)
                constants = tuple(launch.constants[n] for n in launch.kernel.arg_names if n in launch.constants)
                rest = (*launch.scalars, *constants)
                self._steps.append((compiled[launch.grid], pointers, rest))
                described.append(kernel_launch(compiled, launch.grid, (*pointers, *rest)))
        self.sequence = _sequence(described, self._device)
        if self.sequence is not None:
            self._native = launch_list(self.sequence, self._launch)
        if self._native is None:
            with own_cache():
                for compiled in loaded:
                    made_now(compiled.run)

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch over tensors with the promised alignment."""
        if self._interpreted:
            for launch in self._launches:
                launch.interpret(tensors)
        else:
            self.at([0 if t is None else t.data_ptr() for t in tensors])

    def at(self, addresses: Sequence[int]) -> None:
        """Launch over memory at ``addresses``."""
        if self._native is not None:
            self._native(self._stream(self._device), *addresses)
        else:
            self._launch(*addresses)

    def _launch(self, *addresses: int) -> None:
        """Launch through Triton."""
        device = self._device
        if self._current is not None and self._current() != device:
            with torch.cuda.device(device):
                self._launch(*addresses)
            return
        stream = self._stream(device)
        for run, pointers, rest in self._steps:
            run(*[addresses[source] + offset for source, offset in pointers], *rest, stream=stream)


def _compiled(launches: Sequence[Launch], alignment: Sequence[int]) -> list[Any]:
    """The kernel of each launch."""
    return workers.all_of([functools.partial(launch.compile, alignment) for launch in launches])


def _sequence(described: Sequence[KernelLaunch | None], device: int) -> LaunchSequence | None:
    """The launches that have any blocks; ``None`` unless all can be told to the driver."""
    whole = [launch for launch in described if launch is not None]
    if not whole or len(whole) < len(described):
        return None
    return LaunchSequence(tuple(launch for launch in whole if all(launch.grid)), device, hooks())


class _Address:
    """Stands for a pointer argument while Triton compiles: its type and whether it is aligned."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """The address, of which Triton reads the alignment."""
        return self._address

    @staticmethod
    def ptr_range() -> int:
        """The bytes behind the address: any number."""
        return INT64_MAX


def _view(tensor: torch.Tensor | None, pointer: Pointer) -> torch.Tensor:
    """A flat view of a tensor's memory from a pointer on. Raises ``ValueError`` for a missing or misaligned tensor."""
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
