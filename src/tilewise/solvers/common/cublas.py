"""Matrix products by address: cuBLAS called directly, the library that torch has loaded, with torch's own handle.

They are called through ctypes, or where launches come from C are entries of a list of launches.

A product through torch's operators makes a view of each tensor first; on a fast GPU those take longer than the kernel.
torch hands out the handle of the current device and thread set up as for ``torch.mm``: on the current stream, with
torch's workspace for that stream (as of torch 2.13). Streams, CUDA graphs and memory are those of ``torch.mm``. torch's
other flags for products (sums of 16-bit operands in 16 bits, cuBLASLt in place of cuBLAS) do not reach convolutions.

Source: cuBLAS manual, ``cublasGemmEx``, ``cublasGemmStridedBatchedEx``, ``cublasSetMathMode``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import torch

from tilewise.kernels.native.sequence import Address, LaunchSequence, LibraryCalls, Matrix, Product
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.buffers import Strided

__all__ = ["CublasRun", "Library", "bind", "missing"]

OP_N, OP_T = 0, 1
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""Numbers of CUDA_R_32F, CUDA_R_16F and CUDA_R_16BF in ``cudaDataType_t``."""
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
DEFAULT_MATH = 0
GEMM_DEFAULT = -1
"""cuBLAS chooses the kernel; the choices by number have had no effect since compute capability 8.0."""
LARGEST = 2**31 - 1
"""The largest size or leading dimension: they are C ints."""
STATUS = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}
"""Names of ``cublasStatus_t``."""

ZERO, ONE = ctypes.c_float(0), ctypes.c_float(1)
_int = ctypes.c_int.from_param
_long = ctypes.c_longlong.from_param
_address = ctypes.c_void_p.from_param


class Library(NamedTuple):
    """The functions that are called: three of cuBLAS, and torch's getter of the current handle."""

    gemm: Callable[..., int]
    batched: Callable[..., int]
    set_math_mode: Callable[..., int]
    handle: Callable[[], int]


@functools.cache
def _load() -> tuple[Library | None, str]:
    """cuBLAS as torch has loaded it, or ``None`` and the reason why it was not found."""
    # Nothing is loaded here: RTLD_NOLOAD only finds what is there. A look-up in torch's library goes through those it
    # was linked to, so it gives the very cuBLAS that torch calls, whatever else the process has loaded.
    major = (torch.version.cuda or "").partition(".")[0]
    for name in ("libtorch_cuda.so", f"libcublas.so.{major}"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            gemm, batched = library["cublasGemmEx"], library["cublasGemmStridedBatchedEx"]
            return Library(gemm, batched, library["cublasSetMathMode"], torch._C._cuda_getCurrentBlasHandle), ""
        except (OSError, AttributeError):
            continue
    return None, "torch has loaded no shared cuBLAS: products go through torch's operators"


def missing() -> str:
    """Why products cannot be called by address here; empty when they can. Only worth asking where CUDA is in use."""
    return _load()[1]


def bind(p: ConvProblem, left: Strided, right: Strided, result: Strided, device: torch.device) -> CublasRun | None:
    """A run that computes ``result (+)= left @ right``, with 2-D or batched 3-D views.

    ``left`` views the problem's second operand, ``right`` its first, ``result`` its result.

    fp32 is computed in the problem's precision; products of 16-bit operands are summed in fp32. It adds where the
    problem accumulates. ``None`` where BLAS cannot express it in one call or the library is not found.
    """
    library, _ = _load()
    if library is None or len(result.sizes) > 3:
        return None
    arguments = _arguments(p, left, right, result)
    return None if arguments is None else CublasRun(library, arguments, device)


class Arguments(NamedTuple):
    """A call's numbers beside the handle and the addresses.

    Of operations and ``matrices`` the first factor comes first; ``matrices`` ends with the result. ``sizes`` are rows,
    columns and depth. ``offsets`` are in bytes. ``batch`` is the number of products, 0 where it is no batch.
    ``swapped``: the first factor is the problem's first operand. ``ieee``: the handle's mode must not be torch's.
    """

    operations: tuple[int, int]
    sizes: tuple[int, int, int]
    batch: int
    compute: int
    add: bool
    matrices: tuple[Matrix, Matrix, Matrix]
    offsets: tuple[int, int, int]
    swapped: bool
    ieee: bool


def _arguments(p: ConvProblem, left: Strided, right: Strided, result: Strided) -> Arguments | None:
    """The arguments of the call that computes ``result (+)= left @ right``; ``None`` where BLAS cannot express it."""
    rows, columns = result.sizes[-2:]
    depth = left.sizes[-1]
    views = (left, right, result)
    forms = [column_major(*v.sizes[-2:], *v.strides[-2:]) for v in views]
    dtypes = [p.torch_dtype(role) for role in (p.operands[1], p.operands[0], p.result)]
    batched = len(result.sizes) == 3
    batch = result.sizes[0] if batched else 1
    steps = [v.strides[0] if len(v.sizes) == 3 else 0 for v in views]
    if None in forms or any(dtype not in TYPES for dtype in dtypes) or (batch > 1 and not steps[2]):
        return None
    operations, leading = zip(*(form for form in forms if form), strict=True)
    if not all(0 < size <= LARGEST for size in (rows, columns, depth, batch, *leading)):
        return None
    swapped = operations[2] == OP_T
    first, second = 0, 1
    if swapped:  # BLAS sees the transposed result: the product of the transposed factors, in the other order
        first, second = 1, 0
        operations = tuple(OP_N + OP_T - operation for operation in operations)
        rows, columns = columns, rows
    order = (first, second, 2)
    one, other, total = (Matrix(TYPES[dtypes[i]], leading[i], steps[i] if batched else 0) for i in order)
    at_one, at_other, at_total = (views[i].offset * dtypes[i].itemsize for i in order)
    ieee = dtypes[0] is torch.float32 and p.precision != "tf32"
    return Arguments(
        operations=(operations[first], operations[second]),
        sizes=(rows, columns, depth),
        batch=batch if batched else 0,
        compute=COMPUTE_32F_FAST_TF32 if dtypes[0] is torch.float32 and not ieee else COMPUTE_32F,
        add=p.accumulate,
        matrices=(one, other, total),
        offsets=(at_one, at_other, at_total),
        swapped=swapped,
        ieee=ieee,
    )


def column_major(rows: int, columns: int, row: int, column: int) -> tuple[int, int] | None:
    """Operation and leading dimension with which BLAS, for which columns lie one after another, reads a matrix.

    ``row`` and ``column`` are its strides in elements; those of a size of 1 do not matter. ``None`` where neither is 1
    or rows (columns) overlap.
    """
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return OP_N, column if columns > 1 else rows
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return OP_T, row if rows > 1 else columns
    return None


class CublasRun:
    """A matrix product bound to operands' strides and a device. Threads may share it.

    Called with tensors it is a :data:`~tilewise.solvers.base.Run`; :meth:`run_pointers` takes their addresses.
    """

    __slots__ = (
        "_arguments", "_current", "_device", "_first", "_handle", "_head", "_mode", "_multiply", "_offsets", "_second",
        "_set_math_mode", "_swapped", "_tail",
    )  # fmt: skip

    def __init__(self, library: Library, arguments: Arguments, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        self._handle, self._set_math_mode = library.handle, library.set_math_mode
        self._multiply = library.batched if arguments.batch else library.gemm
        self._arguments = arguments
        self._head, self._first, self._second, self._tail = _as_c(arguments)
        self._offsets, self._swapped = arguments.offsets, arguments.swapped
        # Where torch's flag for products says TF32, the handle that it hands out takes TF32 for COMPUTE_32F. It sets
        # the mode anew whenever it hands the handle out, so what is set here reaches no other product.
        self._mode = _int(DEFAULT_MATH) if arguments.ieee else None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        assert out is not None
        self.run_pointers(a.data_ptr(), b.data_ptr(), out.data_ptr(), 0)
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int) -> None:
        """Queue the product on the device's current stream. Raises ``SolverUnavailable`` with cuBLAS's status."""
        if self._current is not None and self._current() != self._device:
            with torch.cuda.device(self._device):
                return self.run_pointers(a, b, out, workspace)
        first, second = (a, b) if self._swapped else (b, a)
        at_first, at_second, at_out = self._offsets
        handle = _address(self._handle())
        status = self._set_math_mode(handle, self._mode) if self._mode is not None else 0
        status = status or self._multiply(
            handle,
            *self._head,
            _address(first + at_first),
            *self._first,
            _address(second + at_second),
            *self._second,
            _address(out + at_out),
            *self._tail,
        )
        if status:
            _fail(status)
        return None

    @property
    def sequence(self) -> LaunchSequence:
        """The product as C queues it, over the addresses of both operands and the result."""
        given, sources = self._arguments, (0, 1, 2) if self._swapped else (1, 0, 2)
        product = Product(
            function=_place(self._multiply),
            set_mode=_place(self._set_math_mode) if given.ieee else 0,
            operations=given.operations,
            sizes=given.sizes,
            batch=given.batch,
            compute=given.compute,
            alpha=1.0,
            beta=1.0 if given.add else 0.0,
            mode=DEFAULT_MATH,
            parameters=tuple(Address(*place) for place in zip(sources, given.offsets, strict=True)),
            matrices=given.matrices,
            calls=LibraryCalls(self._handle, self._current, _fail),
            device=self._device,
        )
        return LaunchSequence((product,), self._device)


def _as_c(given: Arguments) -> tuple[tuple[Any, ...], ...]:
    """The arguments as ctypes passes them.

    In the order of the call: the first ones, address of the first factor, further ones, of the second, further ones, of
    the result, the last ones.
    """
    alpha, beta = (_address(ctypes.addressof(scale)) for scale in (ONE, ONE if given.add else ZERO))
    layouts = [(_int(m.type), _int(m.leading), *([_long(m.step)] if given.batch else [])) for m in given.matrices]
    count = (_int(given.batch),) if given.batch else ()
    head = (*(_int(n) for n in (*given.operations, *given.sizes)), alpha)
    return head, layouts[0], (*layouts[1], beta), (*layouts[2], *count, _int(given.compute), _int(GEMM_DEFAULT))


def _place(function: Callable[..., int]) -> int:
    """The address of a function of a library."""
    return ctypes.cast(cast(Any, function), ctypes.c_void_p).value or 0


def _fail(status: int) -> NoReturn:
    """Raise ``SolverUnavailable`` with the name of cuBLAS's status."""
    raise SolverUnavailable(f"cuBLAS returned {STATUS.get(status, status)}")
