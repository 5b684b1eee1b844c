"""What a constant weight comes to, prepared once and kept beside it for as long as the weight is what it was."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tilewise.device import is_capturing
from tilewise.plan import Config
from tilewise.problem import ConvProblem, dense_strides
from tilewise.solvers import Prepare, Solver
from tilewise.workspaces import aligned

__all__ = ["CheckedFilter", "FrozenFilter", "KeptFilter", "compared_bytes", "kept_bytes", "kept_filter"]

ALONE = 1 << 20
"""Bytes that one thread compares sooner than torch's threads have come."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[int, ...]


def kept_bytes(solver: Solver, problem: ConvProblem, config: Config) -> int:
    """Bytes that stay between calls: the prepared filter, and of a weight that is checked a copy. 0: nothing does."""
    size = solver.constant(problem, config) if problem.constant_weight else 0
    return size + problem.nbytes("w") if size and problem.checked_weight else size


def compared_bytes(solver: Solver, problem: ConvProblem, config: Config) -> int:
    """Bytes that every call reads to see whether the weight is what it was."""
    return 2 * problem.nbytes("w") if problem.checked_weight and solver.constant(problem, config) else 0


def kept_filter(solver: Solver, problem: ConvProblem, config: Config, weight: torch.Tensor) -> KeptFilter | None:
    """What keeps filters for weights with the shape and strides of this example; ``None`` where nothing is kept."""
    size = solver.constant(problem, config) if problem.constant_weight else 0
    if not size:
        return None
    if not problem.checked_weight:
        return FrozenFilter(solver.prepare(problem, config, weight), size)
    layout = problem.layout("w")
    strides = dense_strides(problem.shape("w"), "contiguous" if layout == "view" else layout)
    like = torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device)
    return CheckedFilter(solver.prepare(problem, config, like), size, strides)


class Entry(NamedTuple):
    """A prepared filter. ``known``: by what its weight is recognised; ``storage``: whether that is still there."""

    known: Any
    prepared: torch.Tensor
    storage: StorageWeakRef


class KeptFilter:
    """Prepared filters, one for each place of a weight that is still there: layers of one problem share what is bound.

    Threads may call :meth:`of` at once. What was handed out to one is never written again.
    """

    __slots__ = ("_kept", "_lock", "_prepare", "_size")

    def __init__(self, prepare: Prepare, size: int) -> None:
        self._prepare, self._size = prepare, size
        self._kept: dict[Key, Entry] = {}
        self._lock = threading.Lock()

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """What ``weight`` comes to."""
        raise NotImplementedError

    def _entry(self, key: Key, weight: torch.Tensor, known: Any, prepared: torch.Tensor) -> torch.Tensor:
        reference = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]  # its address stays its own
        self._kept[key] = Entry(known, prepared, reference)
        return prepared

    def _forget(self, key: Key) -> None:
        """What is to be prepared anew, and what came of weights that are gone."""
        gone = [k for k, entry in self._kept.items() if entry.storage.expired()]  # type: ignore[no-untyped-call]
        for k in {key, *gone}:
            self._kept.pop(k, None)

    def _prepared(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        kept = aligned(self._size, weight.device)
        with torch.inference_mode(False), torch.no_grad():
            self._prepare(weight, kept, workspace)
        return kept


class FrozenFilter(KeptFilter):
    """For weights of which the caller promises that they stay: kept while memory and version counter are the same.

    Prepared anew on another stream, and at every call for a weight without a version (``torch.inference_mode``). A CUDA
    graph prepares its own at every replay: what it was captured with would not be there before the first, nor stay.
    """

    __slots__ = ()

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """What ``weight`` comes to."""
        if is_capturing(weight.device) or weight.is_inference():
            return self._prepared(weight, workspace)
        stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else 0
        key = *_place(weight), stream
        with self._lock:
            version = weight._version
            entry = self._kept.get(key)
            if entry is not None and entry.known == version:
                return entry.prepared
            self._forget(key)
            return self._entry(key, weight, version, self._prepared(weight, workspace))


class CheckedFilter(KeptFilter):
    """For weights that may change in any way, on a CPU: kept with a copy, with which every call compares the weight.

    They are compared bit by bit, so that no change is missed: whoever makes it, through whatever view, in this process
    or through memory shared with another. The copy has ``strides``, which are dense; filters are prepared from it, so
    that it always is what they came from.
    """

    __slots__ = ("_strides",)

    def __init__(self, prepare: Prepare, size: int, strides: tuple[int, ...]) -> None:
        super().__init__(prepare, size)
        self._strides = strides

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """What ``weight`` comes to."""
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
        own = aligned(weight.numel() * weight.element_size(), weight.device).view(weight.dtype)
        copy = own.as_strided(weight.shape, self._strides)
        with torch.inference_mode(False), torch.no_grad():
            _bits(copy).copy_(_bits(weight))
        return copy


def _place(weight: torch.Tensor) -> Key:
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


def same_bits(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether two CPU tensors of one shape and dtype hold the same bits, ``copy`` densely; at most one read of each.

    NaNs are equal where their bits are, and -0.0 is not 0.0.
    """
    if not _alike(weight, copy):
        return torch.equal(_bits(weight), _bits(copy))
    size = weight.numel() * weight.element_size()
    compare = _memcmp()
    if compare is not None and size <= ALONE:
        return bool(compare(weight.data_ptr(), copy.data_ptr(), size) == 0)
    one, other = (_bits(t).as_strided((t.numel(),), (1,)) for t in (weight, copy))
    if size % 8 == 0 and weight.storage_offset() * weight.element_size() % 8 == 0:
        one, other = one.view(torch.int64), other.view(torch.int64)
    return torch.equal(one, other)


def _alike(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether elements lie in the same order without gaps."""
    strides = zip(weight.shape, weight.stride(), copy.stride(), strict=True)
    return all(n == 1 or have == want for n, have, want in strides)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(INTEGERS[tensor.element_size()])


@functools.cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's, which is twice as fast as torch's comparison on one thread; ``None`` where it is not found."""
    try:
        function: Any = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found
