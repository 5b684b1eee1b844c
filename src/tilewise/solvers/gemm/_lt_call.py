"""A product as cuBLASLt is told of it: column-major matrices, descriptors, and the algorithms that there are."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cublas import COMPUTE_32F, COMPUTE_32F_FAST_TF32, LARGEST, OP_N, OP_T, TYPES
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.gemm import _lt_library as lt
from tilewise.solvers.gemm._lt_library import ATTRIBUTES, Algorithm, Heuristic, Library, called, set_attribute

__all__ = ["Call", "Descriptors", "Found", "call_of", "checked", "config_of", "for_any_bias", "found", "rebuilt"]

FP32 = TYPES[torch.float32]
"""The type of both factors of a sum, and of sums."""
REQUESTED = 200
"""Algorithms that the heuristic is asked for."""
MOST_VALUE = 2**16
"""No attribute of an algorithm is as large."""

Strides = tuple[int, ...]


class Matrix(NamedTuple):
    """A column-major matrix: type, rows, columns, elements between columns, elements between matrices of a batch."""

    type: int
    rows: int
    columns: int
    leading: int
    step: int


class Call(NamedTuple):
    """A product without addresses.

    BLAS reads rows as columns, so it computes the transposed result from the transposed operands in the other order:
    the first factor is the problem's ``b``, the second its ``a``. ``alignment`` has bytes of the first factor, the
    second and the result. ``batch`` is 1 where there is none. ``activation`` is one of the library's epilogues.
    """

    operations: tuple[int, int]
    matrices: tuple[Matrix, Matrix, Matrix]
    batch: int
    compute: int
    bias: bool
    activation: str
    alignment: tuple[int, int, int]


class Found(NamedTuple):
    """An algorithm: the library's 64 bytes, its workspace in bytes, and how many times it fills the multiprocessors."""

    algorithm: bytes
    workspace: int
    waves: float


def call_of(p: GemmProblem, strides: tuple[Strides, Strides, Strides]) -> Call:
    """The call for tensors a, b and c of these strides.

    Raises ``SolverUnavailable`` where rows are not contiguous, overlap, or are too long for the library.
    """
    a, b, c = (_matrix(p, role, stride) for role, stride in zip("abc", strides, strict=True))
    tf32 = p.dtype == "fp32" and p.precision == "tf32"
    return Call(
        operations=(OP_N if p.op[1] == "N" else OP_T, OP_N if p.op[0] == "N" else OP_T),
        matrices=(b, a, c),
        batch=max(1, p.batch),
        compute=COMPUTE_32F_FAST_TF32 if tf32 else COMPUTE_32F,
        bias=p.bias,
        activation=p.activation,
        alignment=(p.alignment_of("b"), p.alignment_of("a"), p.alignment_of("c")),
    )


def _matrix(p: GemmProblem, role: str, strides: Strides) -> Matrix:
    """The stored matrix of ``role`` as its transpose, column by column."""
    *_, rows, columns = p.shape(role)
    row, column = strides[-2:]
    leading = row if rows > 1 else columns
    if (column != 1 and columns > 1) or leading < columns:
        raise SolverUnavailable(
            f"{role} has strides {strides}: takes matrices with contiguous rows that do not overlap"
        )
    step = strides[0] if p.batch > 1 else rows * leading
    if max(rows, columns, leading) > LARGEST:
        raise SolverUnavailable(f"{role} has sizes or strides beyond {LARGEST}")
    return Matrix(TYPES[p.torch_dtype(role)], columns, rows, leading, step)


class Descriptors:
    """The library's descriptors of a call: of the operation and of the three matrices, as addresses.

    They are freed with the object. Raises ``SolverUnavailable`` with cuBLASLt's status.
    """

    __slots__ = ("__weakref__", "matrices", "operation")

    def __init__(self, library: Library, call: Call) -> None:
        made: list[tuple[bool, c_void_p]] = []
        weakref.finalize(self, _free, library, made).atexit = False  # the process frees them at its end
        self.operation = operation = c_void_p()
        status = library.make_operation(ctypes.byref(operation), c_int(call.compute), c_int(FP32))
        called("cublasLtMatmulDescCreate", status)
        made.append((True, operation))
        for attribute, value in zip((lt.TRANSPOSE_FIRST, lt.TRANSPOSE_SECOND), call.operations, strict=True):
            set_attribute(library.set_operation, operation, attribute, value)
        epilogue = lt.EPILOGUES[call.activation]
        if call.bias:
            epilogue = epilogue | lt.WITH_BIAS if call.activation != "none" else lt.WITH_BIAS
        if epilogue != lt.EPILOGUES["none"]:
            set_attribute(library.set_operation, operation, lt.EPILOGUE, epilogue)
        matrices = []
        for m in call.matrices:
            matrix = c_void_p()
            sizes = c_uint64(m.rows), c_uint64(m.columns), c_int64(m.leading)
            called("cublasLtMatrixLayoutCreate", library.make_matrix(ctypes.byref(matrix), c_int(m.type), *sizes))
            made.append((False, matrix))
            if call.batch > 1:
                set_attribute(library.set_matrix, matrix, lt.BATCH_COUNT, call.batch)
                set_attribute(library.set_matrix, matrix, lt.BATCH_STEP, m.step)
            matrices.append(matrix)
        self.matrices = (matrices[0], matrices[1], matrices[2])

    @property
    def places(self) -> tuple[int, int, int]:
        """The addresses of the descriptors of the three matrices."""
        first, second, result = (matrix.value or 0 for matrix in self.matrices)
        return first, second, result

    @property
    def all(self) -> tuple[c_void_p, ...]:
        """The operation, both factors, the result as it was and as it will be: as searches and checks take them."""
        first, second, result = self.matrices
        return self.operation, first, second, result, result


def _free(library: Library, made: list[tuple[bool, c_void_p]]) -> None:
    """Free descriptors of operations (true) and of matrices."""
    for is_operation, descriptor in made:
        (library.free_operation if is_operation else library.free_matrix)(descriptor)


@contextlib.contextmanager
def _search(library: Library, call: Call, workspace: int) -> Iterator[c_void_p]:
    """A descriptor of a search: algorithms for the call's alignment with at most ``workspace`` bytes."""
    search = c_void_p()
    called("cublasLtMatmulPreferenceCreate", library.make_search(ctypes.byref(search)))
    try:
        set_attribute(library.set_search, search, lt.MOST_WORKSPACE, workspace)
        alignments = (*call.alignment, call.alignment[2])
        for attribute, value in zip(lt.LEAST_ALIGNMENT, alignments, strict=True):
            set_attribute(library.set_search, search, attribute, value)
        yield search
    finally:
        library.free_search(search)


def found(library: Library, handle: int, call: Call, workspace: int) -> list[Found]:
    """What the heuristic returns for a call when asked for 200 algorithms, in its order, the most promising first.

    Empty where it knows none. Raises ``SolverUnavailable`` where descriptors cannot be made.
    """
    descriptors = Descriptors(library, call)
    results, count = (Heuristic * REQUESTED)(), c_int(0)
    with _search(library, call, workspace) as search:
        status = library.heuristics(
            c_void_p(handle), *descriptors.all, search, c_int(REQUESTED), results, ctypes.byref(count)
        )
    if status:  # NOT_SUPPORTED is how it says that there is none
        return []
    some = results[: min(count.value, REQUESTED)]
    return [Found(bytes(r.algorithm), r.workspace, r.waves) for r in some if not r.state and r.workspace <= workspace]


def for_any_bias(library: Library, handle: int, call: Call, known: Found) -> bytes:
    """The algorithm for a bias that lies at any multiple of its numbers' size; ``known`` where there is no bias.

    Kernels read several numbers of a bias at once. The library is told how a bias is aligned in the same way as of the
    result, so it is asked for the first algorithm that takes a result anywhere. Raises ``SolverUnavailable`` where it
    has none.
    """
    if not call.bias:
        return known.algorithm
    itemsize = next(dtype.itemsize for dtype, number in TYPES.items() if number == call.matrices[2].type)
    for one in found(library, handle, call._replace(alignment=(*call.alignment[:2], itemsize)), known.workspace):
        return one.algorithm
    raise SolverUnavailable(f"cuBLASLt has no algorithm in {known.workspace} bytes for a bias that lies anywhere")


def config_of(library: Library, algorithm: bytes) -> Config:
    """The attributes of an algorithm by their names, without those that are 0."""
    held, values = Algorithm.from_buffer_copy(algorithm), {}
    for name, (number, kind) in ATTRIBUTES.items():
        value, written = kind(0), c_size_t(0)
        status = library.get_algorithm(
            ctypes.byref(held), c_int(number), ctypes.byref(value), c_size_t(ctypes.sizeof(value)),
            ctypes.byref(written),
        )  # fmt: skip
        if status == 0 and value.value:  # a library that does not know an attribute says so
            values[name] = int(value.value)
    return Config(**values)


def rebuilt(library: Library, handle: int, call: Call, c: Config) -> bytes:
    """The algorithm of a config, from its attributes alone.

    Raises ``SolverUnavailable`` for what names none, or none of this version of the library. Whether it can run is for
    :func:`checked` to say.
    """
    for name, value in c.items():
        if name not in ATTRIBUTES or type(value) is not int or not 0 <= value < MOST_VALUE:
            raise SolverUnavailable(f"{name}={value!r}: numbers below {MOST_VALUE} of {', '.join(ATTRIBUTES)} would do")
    algorithm = Algorithm()
    first, second, result = (c_int(m.type) for m in call.matrices)
    status = library.initialize(
        c_void_p(handle), c_int(call.compute), c_int(FP32), first, second, result, result,
        c_int(integer(c, "algo", 0)), ctypes.byref(algorithm),
    )  # fmt: skip
    called(f"cublasLtMatmulAlgoInit for {c}", status)
    for name, value in c.items():
        if name != "algo":
            set_attribute(library.set_algorithm, ctypes.byref(algorithm), ATTRIBUTES[name], value)
    return bytes(algorithm)


def checked(library: Library, handle: int, descriptors: Descriptors, algorithm: bytes) -> Found:
    """The algorithm with the workspace that it needs for these matrices.

    Raises ``SolverUnavailable`` with cuBLASLt's status where it cannot compute them.
    """
    held, result = Algorithm.from_buffer_copy(algorithm), Heuristic()
    status = library.check(c_void_p(handle), *descriptors.all, ctypes.byref(held), ctypes.byref(result))
    called("cublasLtMatmulAlgoCheck", status or result.state)
    return Found(algorithm, result.workspace, result.waves)
