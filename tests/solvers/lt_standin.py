"""cuBLASLt on host memory, as its manual says: descriptors, a heuristic of made-up algorithms, and the product.

It is called as C functions by address, as those of the library are. It has four algorithms; only number 1 takes any
sizes, and number 3 takes none whose result is not of whole tiles. It checks all that it is given, so that a wrong
argument is a wrong status or a wrong result.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.gemm import _lt_library, cublaslt_gemm
from tilewise.solvers.gemm._lt_call import call_of, for_any_bias
from tilewise.solvers.gemm._lt_library import ATTRIBUTES, Algorithm, Heuristic, Library
from tilewise.solvers.gemm._lt_run import LtRun

HANDLE, STREAM = 0x7FFF_0000_4321, 0x5713EA
SUCCESS, INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 0, 7, 13, 15
TYPES = {0: np.float32, 2: np.float16}
ALGORITHMS = (1, 2, 3, 5)
"""Numbers of the algorithms, in the heuristic's order."""
SCRATCH = {1: 0, 2: 4096, 3: 0, 5: 2**23}
"""Workspace of each algorithm in bytes."""
TILE, WIDE = 16, 7
NAMES = ("algo", "tile", "stages", "splits", "reduction", "swizzle", "custom", "inner", "cluster")
"""Where this library keeps attributes in an algorithm's 64 bytes: seven bytes of each of the first eight, and more."""
PLACES = {ATTRIBUTES[name].number: (4 * index, ATTRIBUTES[name].type) for index, name in enumerate(NAMES)}


class LtStand:
    """The functions, what they were told, and what they hold. ``fails`` is the status of the next product."""

    def __init__(self) -> None:
        self.products: list[dict[str, Any]] = []
        self.searches: list[dict[int, int]] = []
        self.fails = SUCCESS
        self.twins = 0
        """How many further algorithms have the numbers of number 2."""
        self.gone: set[int] = set()
        """Algorithms that this version does not have."""
        self.held: dict[int, dict[Any, Any]] = {}
        self._next = 0x1000
        p, i, n = c_void_p, c_int, c_size_t
        described = [p] * 5
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "create": (self._create, [p]),
            "matmul": (self._matmul, [p] * 14 + [n, p]),
            "heuristics": (self._heuristics, [p, *described, p, i, p, p]),
            "initialize": (self._initialize, [p, *[i] * 7, p]),
            "check": (self._check, [p, *described, p, p]),
            "get_algorithm": (self._get_algorithm, [p, i, p, n, p]),
            "set_algorithm": (self._set_algorithm, [p, i, p, n]),
            "make_operation": (self._make_operation, [p, i, i]),
            "set_operation": (self._set, [p, i, p, n]),
            "free_operation": (self._free, [p]),
            "make_matrix": (self._make_matrix, [p, i, c_uint64, c_uint64, c_int64]),
            "set_matrix": (self._set, [p, i, p, n]),
            "free_matrix": (self._free, [p]),
            "make_search": (self._make_search, [p]),
            "set_search": (self._set, [p, i, p, n]),
            "free_search": (self._free, [p]),
        }
        self._kept = {name: ctypes.CFUNCTYPE(c_int, *kinds)(guarded(f)) for name, (f, kinds) in signatures.items()}
        # By address and without declared arguments, as the functions of a library are.
        addresses = {name: ctypes.cast(f, c_void_p).value for name, f in self._kept.items()}
        self.library = Library(**{name: ctypes.CFUNCTYPE(c_int)(place) for name, place in addresses.items()})  # type: ignore[arg-type]

    def _create(self, handle: int) -> int:
        c_void_p.from_address(handle).value = HANDLE
        return SUCCESS

    def _new(self, place: int, values: dict[Any, Any]) -> int:
        self._next += 16
        self.held[self._next] = values
        c_void_p.from_address(place).value = self._next
        return SUCCESS

    def _make_operation(self, place: int, compute: int, scale: int) -> int:
        return self._new(place, {"compute": compute}) if scale == 0 else INVALID_VALUE

    def _make_matrix(self, place: int, kind: int, rows: int, columns: int, leading: int) -> int:
        if leading < rows:
            return INVALID_VALUE
        return self._new(place, {"type": kind, "rows": rows, "columns": columns, "leading": leading, 5: 1, 6: 0})

    def _make_search(self, place: int) -> int:
        return self._new(place, {})

    def _set(self, descriptor: int, number: int, value: int, size: int) -> int:
        if size not in (4, 8):
            return INVALID_VALUE
        self.held[descriptor][number] = int.from_bytes(ctypes.string_at(value, size), "little")
        return SUCCESS

    def _free(self, descriptor: int) -> int:
        del self.held[descriptor]
        return SUCCESS

    def _initialize(self, handle: int, compute: int, scale: int, a: int, b: int, c: int, d: int, number: int,
                    algorithm: int) -> int:  # fmt: skip
        if handle != HANDLE or scale or a != b or c != d or number not in ALGORITHMS or number in self.gone:
            return INVALID_VALUE
        ctypes.memmove(algorithm, struct.pack("<i60x", number), 64)
        return SUCCESS

    def _get_algorithm(self, algorithm: int, number: int, value: int, size: int, written: int) -> int:
        place, kind = PLACES[number]
        if size != ctypes.sizeof(kind):
            return INVALID_VALUE
        ctypes.memmove(value, algorithm + place, size)
        c_size_t.from_address(written).value = size
        return SUCCESS

    def _set_algorithm(self, algorithm: int, number: int, value: int, size: int) -> int:
        place, kind = PLACES[number]
        if size != ctypes.sizeof(kind) or number == 0:
            return INVALID_VALUE
        ctypes.memmove(algorithm + place, value, size)
        return SUCCESS

    def _state(self, number: int, d: int) -> int:
        whole = self.held[d]["rows"] % TILE == 0 and self.held[d]["columns"] % TILE == 0
        unable = number not in ALGORITHMS or number in self.gone or (number == 3 and not whole)
        return NOT_SUPPORTED if unable else SUCCESS

    def _check(self, handle: int, operation: int, a: int, b: int, c: int, d: int, algorithm: int, result: int) -> int:
        number = Algorithm.from_address(algorithm).data[0] & 0xFFFFFFFF
        found = Heuristic.from_address(result)
        found.state = self._state(number, d)
        found.workspace = SCRATCH.get(number, 0)
        return SUCCESS if handle == HANDLE and self._sizes(operation, a, b, d) and c == d else INVALID_VALUE

    def _sizes(self, operation: int, a: int, b: int, d: int) -> tuple[int, int, int] | None:
        """Rows, columns and depth; ``None`` where matrices do not fit together."""
        held = self.held
        first = self._shape(a, held[operation].get(3, 0))
        second = self._shape(b, held[operation].get(4, 0))
        fits = first[1] == second[0] and (first[0], second[1]) == self._shape(d, 0)
        same = len({held[m][5] for m in (a, b, d)}) == 1
        return (first[0], second[1], first[1]) if fits and same else None

    def _shape(self, matrix: int, turned: int) -> tuple[int, int]:
        rows, columns = self.held[matrix]["rows"], self.held[matrix]["columns"]
        return (columns, rows) if turned else (rows, columns)

    def _heuristics(self, handle: int, operation: int, a: int, b: int, c: int, d: int, search: int, asked: int,
                    results: int, count: int) -> int:  # fmt: skip
        if handle != HANDLE or not self._sizes(operation, a, b, d) or c != d:
            return INVALID_VALUE
        wanted = dict(self.held[search])
        self.searches.append(wanted)
        able = [n for n in ALGORITHMS if SCRATCH[n] <= wanted[1] and not self._state(n, d)]
        able += [2] * self.twins if 2 in able else []
        found = (Heuristic * asked).from_address(results)
        for index, number in enumerate(able[:asked]):
            twin = sum(other == 2 for other in able[:index]) if number == 2 else 0
            wide = WIDE if wanted[8] == 16 else 0  # it reads 16 bytes of a bias at once
            words = struct.pack("<9i16xiq", number, 20 + number, number, *[0] * 5, 2, wide, twin)
            ctypes.memmove(ctypes.addressof(found[index].algorithm), words, 64)
            found[index].workspace, found[index].waves = SCRATCH[number], 1.0
        c_int.from_address(count).value = len(able)
        return SUCCESS if able else NOT_SUPPORTED

    def _matmul(self, handle: int, operation: int, alpha: int, a: int, of_a: int, b: int, of_b: int, beta: int, c: int,
                of_c: int, d: int, of_d: int, algorithm: int, workspace: int, size: int,
                stream: int) -> int:  # fmt: skip
        if self.fails:
            return self.fails
        held, sizes = self.held[operation], self._sizes(operation, of_a, of_b, of_d)
        if held.get(7) == 4 and held[8] % 16 and Algorithm.from_address(algorithm).data[6] >> 32 == WIDE:
            return EXECUTION_FAILED
        number = Algorithm.from_address(algorithm).data[0] & 0xFFFFFFFF
        if handle != HANDLE or sizes is None or (c, of_c) != (d, of_d) or self._state(number, of_d):
            return INVALID_VALUE
        if size < SCRATCH[number] or (size and not workspace):
            return INVALID_VALUE
        scales = [c_float.from_address(place).value for place in (alpha, beta)]
        for index in range(self.held[of_d][5]):
            left, right, result = (self._values(m, place, index) for m, place in ((of_a, a), (of_b, b), (of_d, d)))
            left, right = left.T if held.get(3) else left, right.T if held.get(4) else right
            total = scales[0] * (left.astype(float) @ right.astype(float))
            if scales[1]:
                total += scales[1] * result
            if held.get(7) == 4:
                kind = np.dtype(TYPES[self.held[of_d]["type"]])
                bias = np.frombuffer(ctypes.string_at(held[8], sizes[0] * kind.itemsize), kind)
                total += bias.astype(float)[:, None]
            result[:] = total
        self.products.append({"algorithm": number, "compute": held["compute"], "stream": stream, "workspace": size})
        return SUCCESS

    def _values(self, matrix: int, address: int, index: int) -> Any:
        """Matrix ``index`` of a batch at an address, column by column."""
        held = self.held[matrix]
        dtype = np.dtype(TYPES[held["type"]])
        size = (held["columns"] - 1) * held["leading"] + held["rows"]
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address + index * held[6] * dtype.itemsize)
        steps = (dtype.itemsize, held["leading"] * dtype.itemsize)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, dtype), (held["rows"], held["columns"]), steps)


def guarded(function: Any) -> Any:
    """A function that returns a status where it would raise: no exception may leave a callback. ``None`` is 0."""

    def called(*given: int | None) -> int:
        try:
            return int(function(*(0 if value is None else value for value in given)))
        except Exception:
            return EXECUTION_FAILED

    return called


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[LtStand]:
    """The stand-in in place of the library, for tensors on the CPU in place of those on a GPU."""
    found = LtStand()
    monkeypatch.setattr(_lt_library, "load", lambda: (found.library, ""))
    monkeypatch.setattr(_lt_library, "handle_for", lambda device: HANDLE)
    monkeypatch.setattr(cublaslt_gemm, "_index", lambda p: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    for cached in (cublaslt_gemm._listing, cublaslt_gemm._algorithm):
        cached.cache_clear()
    yield found
    for cached in (cublaslt_gemm._listing, cublaslt_gemm._algorithm):
        cached.cache_clear()


def bound(p: GemmProblem, c: Config, *tensors: torch.Tensor) -> LtRun:
    """The run of a config for tensors on the CPU."""
    library, _ = _lt_library.load()
    assert library is not None
    known = cublaslt_gemm._algorithm(cublaslt_gemm._summed(p), c, 0)
    a, b, out = tensors
    call = call_of(p, (a.stride(), b.stride(), out.stride()))
    algorithms = known.algorithm, for_any_bias(library, HANDLE, call, known)
    return LtRun(library, HANDLE, call, algorithms, known.workspace, p.accumulate, 0)
