"""Filters prepared from a constant weight, such as its spectrum: kept between calls while the weight is unchanged."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tilewise.kernels.cpu.recording import recorder
from tilewise.machine.device import is_capturing
from tilewise.machine.workspaces import aligned
from tilewise.plan import Config
from tilewise.problems.base import Problem, dense_strides
from tilewise.solvers import Solver

__all__ = ["CheckedFilter", "FrozenFilter", "KeptFilter", "compared_bytes", "kept_bytes", "kept_filter"]

ALONE = 1 << 20
"""Up to this many bytes one thread compares faster than torch's threads can be started."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[int, ...]
Make = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``make(weight, workspace)`` returns a new prepared filter."""


def kept_bytes(solver: Solver, problem: Problem, config: Config) -> int:
    """Bytes that stay between calls, if any: the prepared filter, and a copy of a weight that is checked."""
    size = solver.constant(problem, config) if problem.constant_operand else 0
    return size + problem.nbytes(problem.constant_operand) if size and problem.checked_operand else size


def compared_bytes(solver: Solver, problem: Problem, config: Config) -> int:
    """Bytes that every call reads to see whether the weight has changed: the weight and its copy."""
    return (
        2 * problem.nbytes(problem.constant_operand)
        if problem.checked_operand and solver.constant(problem, config)
        else 0
    )


def kept_filter(solver: Solver, problem: Problem, config: Config, weight: torch.Tensor) -> KeptFilter | None:
    """The keeper of filters for weights with the shape and strides of ``weight``; ``None`` where nothing is kept."""
    size = solver.constant(problem, config) if problem.constant_operand else 0
    if not size:
        return None
    if not problem.checked_operand:
        return FrozenFilter(_maker(solver, problem, config, weight, size))
    layout = problem.layout(problem.constant_operand)
    strides = dense_strides(weight.shape, "contiguous" if layout == "view" else layout)
    like = torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device)
    return CheckedFilter(_maker(solver, problem, config, like, size), strides)


def _maker(solver: Solver, problem: Problem, config: Config, weight: torch.Tensor, size: int) -> Make:
    """What makes prepared filters, of ``size`` bytes, from weights like ``weight``."""
    if (pack := solver.pack(problem, config, weight)) is not None:
        return lambda weight, workspace: pack(weight)
    prepare = solver.prepare(problem, config, weight)

    def make(weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        prepared = aligned(size, weight.device)
        prepare(weight, prepared, workspace)
        return prepared

    return make


class Entry(NamedTuple):
    """A filter in the form that a solver prepared, and what tells whether its weight is the same.

    ``known`` is what its weight is compared with: a version or a copy. ``storage`` is the weight's.
    """

    known: Any
    prepared: torch.Tensor
    storage: StorageWeakRef


class KeptFilter:
    """Keeps prepared filters, one for each weight that still exists: layers of equal problems share one bound plan.

    Threads may call :meth:`of` at the same time. A filter that was handed out is never written again.
    """

    __slots__ = ("_kept", "_lock", "_make")

    def __init__(self, make: Make) -> None:
        self._make = make
        self._kept: dict[Key, Entry] = {}
        self._lock = threading.Lock()

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The filter prepared from ``weight``, kept or new."""
        raise NotImplementedError

    def _entry(self, key: Key, weight: torch.Tensor, known: Any, prepared: torch.Tensor) -> torch.Tensor:
        """Keep ``prepared`` under ``key``, and return it."""
        reference = StorageWeakRef(weight.untyped_storage())  # its address stays its own
        self._kept[key] = Entry(known, prepared, reference)
        return prepared

    def _forget(self, key: Key) -> None:
        """Drop the filter under ``key``, and the filters of weights that no longer exist."""
        gone = [k for k, entry in self._kept.items() if entry.storage.expired()]
        for k in {key, *gone}:
            self._kept.pop(k, None)

    def _prepared(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """A new filter prepared from ``weight``."""
        with torch.inference_mode(False), torch.no_grad():
            return self._make(weight, workspace)


class FrozenFilter(KeptFilter):
    """Keeps filters of weights that the caller promises not to change, while memory and version counter are the same.

    A filter is prepared anew on another stream, and at every call for a weight without a version counter
    (``torch.inference_mode``). A CUDA graph prepares its own at every replay: a filter kept at capture would neither
    exist before the first replay nor stay.
    """

    __slots__ = ()

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The filter prepared from ``weight``, kept or new."""
        if is_capturing(weight.device) or weight.is_inference():
            return self._prepared(weight, workspace)
        stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else 0
        key = *_place(weight), stream
        with self._lock:
            version = weight._version
            entry = self._kept.get(key)
            if entry is not None and entry.known == version:
                recorder.hold(entry.prepared)
                return entry.prepared
            self._forget(key)
            return self._entry(key, weight, version, self._prepared(weight, workspace))


class CheckedFilter(KeptFilter):
    """Keeps filters of weights on a CPU that may change in any way: every call compares the weight with a kept copy.

    The two are compared bit by bit, so that no change is missed: whoever makes it, through whatever view, in this
    process or through memory shared with another. The copy has ``strides``, which are dense. Filters are prepared from
    the copy, so that the two always agree.
    """

    __slots__ = ("_strides",)

    def __init__(self, make: Make, strides: tuple[int, ...]) -> None:
        super().__init__(make)
        self._strides = strides

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The filter prepared from ``weight``, kept or new."""
        key = _place(weight)
        entry = self._kept.get(key)
        if entry is not None and same_bits(weight, entry.known):
            return entry.prepared
        with self._lock:
            entry = self._kept.get(key)  # of another thread, meanwhile
            if entry is not None and same_bits(weight, entry.known):
                return entry.prepared
            del entry
            self._forget(key)
            copy = self._copy(weight)
            return self._entry(key, weight, copy, self._prepared(copy, workspace))

    def _copy(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of ``weight`` in its own memory, with the dense strides."""
        memory = aligned(weight.numel() * weight.element_size(), weight.device).view(weight.dtype)
        copy = memory.as_strided(weight.shape, self._strides)
        with torch.inference_mode(False), torch.no_grad():
            _bits(copy).copy_(_bits(weight))
        return copy


def _place(weight: torch.Tensor) -> Key:
    """What identifies a weight: its storage and where it begins in it."""
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


def same_bits(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether two CPU tensors of one shape and dtype hold the same bits. ``copy`` is dense; each is read at most once.

    NaNs are equal where their bits are, and -0.0 is not 0.0.
    """
    if not _alike(weight, copy):
        return torch.equal(_bits(weight), _bits(copy))
    size = weight.numel() * weight.element_size()
    compare = _memcmp()
    if compare is not None and size <= ALONE:
        return bool(compare(weight.data_ptr(), copy.data_ptr(), size) == 0)
    weight_bits, copy_bits = (_bits(t).as_strided((t.numel(),), (1,)) for t in (weight, copy))
    if size % 8 == 0 and weight.storage_offset() * weight.element_size() % 8 == 0:
        weight_bits, copy_bits = weight_bits.view(torch.int64), copy_bits.view(torch.int64)
    return torch.equal(weight_bits, copy_bits)


def _alike(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the elements of both tensors lie in the same order in memory."""
    strides = zip(weight.shape, weight.stride(), copy.stride(), strict=True)
    return all(n == 1 or have == want for n, have, want in strides)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same size."""
    return tensor.detach().view(INTEGERS[tensor.element_size()])


@functools.cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's ``memcmp``, twice as fast as torch's comparison on one thread; ``None`` where it is not found."""
    try:
        function: Any = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    memcmp: Callable[[int, int, int], int] = function
    return memcmp
