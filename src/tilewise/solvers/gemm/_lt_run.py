"""A product by one algorithm of cuBLASLt as a solver's run: descriptors are made once, a call queues the product."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint64
from typing import Any, cast

import torch

from tilewise.kernels.native.sequence import Address, LaunchSequence, LtProduct
from tilewise.problems.base import ALIGNMENT
from tilewise.solvers.common.cublas import ONE, ZERO
from tilewise.solvers.gemm._lt_call import Call, Descriptors
from tilewise.solvers.gemm._lt_library import BIAS_POINTER, Algorithm, Library, called

__all__ = ["LtRun"]

_address = ctypes.c_void_p.from_param


class LtRun:
    """A product bound to an algorithm, operands' strides and a device. Threads may share it.

    Called with tensors it is a :data:`~tilewise.solvers.base.Run`; :meth:`run_pointers` takes their addresses. It is
    queued on the current stream of the device, and makes no memory: ``workspace`` is the bytes that it is given. Of two
    ``algorithms`` the second computes products with a bias that lies anywhere, the first all others.
    """

    __slots__ = (
        "_algorithms",
        "_between",
        "_current",
        "_descriptors",
        "_device",
        "_head",
        "_library",
        "_lock",
        "_size",
        "_stream",
        "_told",
    )

    def __init__(
        self,
        library: Library,
        handle: int,
        call: Call,
        algorithms: tuple[bytes, bytes],
        workspace: int,
        add: bool,
        device: int,
    ) -> None:
        self._library, self._descriptors, self._device = library, Descriptors(library, call), device
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._lock = threading.Lock()
        held = [ctypes.byref(Algorithm.from_buffer_copy(algorithm)) for algorithm in algorithms]
        first, second, result = self._descriptors.matrices
        beta = ONE if add else ZERO
        self._head = (_address(handle), self._descriptors.operation, _address(ctypes.addressof(ONE)))
        self._between = first, (second, _address(ctypes.addressof(beta))), result
        self._algorithms, self._size = held, c_size_t(workspace)
        self._told = handle, call, algorithms, workspace, beta.value

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        space = 0 if workspace is None else workspace.data_ptr()
        self.run_pointers(a.data_ptr(), b.data_ptr(), out.data_ptr(), space, *(t.data_ptr() for t in bias))
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        """Queue the product. Raises ``SolverUnavailable`` with cuBLASLt's status."""
        if self._current is not None and self._current() != self._device:
            with torch.cuda.device(self._device):
                return self.run_pointers(a, b, out, workspace, *bias)
        if not bias:
            return self._queue(a, b, out, workspace, 0)
        place = c_uint64(bias[0])
        with self._lock:  # the address of the bias is an attribute of the operation, which all calls share
            status = self._library.set_operation(
                self._descriptors.operation, c_int(BIAS_POINTER.number), ctypes.byref(place), c_size_t(8)
            )
            called("setting the address of the bias", status)
            return self._queue(a, b, out, workspace, bias[0] % ALIGNMENT)

    def _queue(self, a: int, b: int, out: int, workspace: int, misaligned: int) -> None:
        """Call the library, by the algorithm for a bias at such an address.

        The first factor is ``b``: see :class:`~tilewise.solvers.gemm._lt_call.Call`.
        """
        first, second, result = self._between
        target = _address(out)
        status = self._library.matmul(
            *self._head, _address(b), first, _address(a), *second, target, result, target, result,
            self._algorithms[misaligned != 0], _address(workspace), self._size,
            _address(self._stream(self._device)),
        )  # fmt: skip
        if status:
            called("cublasLtMatmul", status)

    @property
    def sequence(self) -> LaunchSequence:
        """The product as C queues it, over the addresses of operands, result, workspace and bias.

        It has descriptors of its own: calls from Python set the address of a bias in theirs.
        """
        handle, call, algorithms, workspace, beta = self._told
        owner = Descriptors(self._library, call)
        product = LtProduct(
            function=_place(self._library.matmul),
            set_attribute=_place(self._library.set_operation),
            handle=handle,
            operation=owner.operation.value or 0,
            matrices=owner.places,
            scales=(1.0, beta),
            algorithms=algorithms,
            workspace=workspace,
            attribute=BIAS_POINTER.number,
            parameters=(
                Address(1, 0), Address(0, 0), Address(2, 0), Address(3, 0) if workspace else None,
                Address(4, 0) if call.bias else None,
            ),
            failed=_fail,
            owner=owner,
        )  # fmt: skip
        return LaunchSequence((product,), self._device)


def _place(function: Callable[..., int]) -> int:
    """The address of a function of the library."""
    return ctypes.cast(cast(Any, function), ctypes.c_void_p).value or 0


def _fail(status: int) -> None:
    """Raise ``SolverUnavailable`` with the name of a status of a product."""
    called("cublasLtMatmul", status)
