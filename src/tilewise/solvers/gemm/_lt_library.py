"""cuBLASLt as C offers it: its structures, the numbers of its attributes, and the functions that are called.

The library is the one that torch has loaded. It is called through ctypes, so its header need not be installed: the
structures are part of its binary interface. Descriptors stay opaque; the library makes them itself.

Source: cuBLAS manual, "Using the cuBLASLt API", and the public header cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cublas import STATUS

__all__ = [
    "ATTRIBUTES", "EPILOGUES", "Algorithm", "Heuristic", "Library", "called", "handle_for", "load", "missing",
    "set_attribute",
]  # fmt: skip


class Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``: 64 bytes that mean something to the library alone."""

    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``: an algorithm, its workspace in bytes, whether it can run, and its waves.

    ``waves`` says how many times over the multiprocessors are filled.
    """

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Attribute(NamedTuple):
    """An attribute of a descriptor or of an algorithm: its number and its C type."""

    number: int
    type: Any


ATTRIBUTES = {
    "algo": Attribute(0, c_int32),
    "tile": Attribute(1, c_uint32),
    "splits": Attribute(2, c_int32),
    "reduction": Attribute(3, c_uint32),
    "swizzle": Attribute(4, c_uint32),
    "custom": Attribute(5, c_uint32),
    "stages": Attribute(6, c_uint32),
    "inner": Attribute(7, c_uint16),
    "cluster": Attribute(8, c_uint16),
}
"""Attributes of an algorithm (``cublasLtMatmulAlgoConfigAttributes_t``) by the names that they have in configs."""

TRANSPOSE_FIRST, TRANSPOSE_SECOND = Attribute(3, c_int32), Attribute(4, c_int32)
EPILOGUE, BIAS_POINTER = Attribute(7, c_uint32), Attribute(8, c_void_p)
"""Attributes of an operation (``cublasLtMatmulDescAttributes_t``)."""
BATCH_COUNT, BATCH_STEP = Attribute(5, c_int32), Attribute(6, c_int64)
"""Attributes of a matrix (``cublasLtMatrixLayoutAttribute_t``)."""
MOST_WORKSPACE = Attribute(1, c_uint64)
LEAST_ALIGNMENT = tuple(Attribute(number, c_uint32) for number in (5, 6, 7, 8))
"""Attributes of a search (``cublasLtMatmulPreferenceAttributes_t``); alignment of A, B, C and D, in bytes."""
WITH_BIAS = 4
"""``CUBLASLT_EPILOGUE_BIAS``: adds a vector along the rows of a column-major result. It is a bit of the others too."""
EPILOGUES = {"none": 1, "relu": 2, "gelu_tanh": 32}
"""What is applied to the result (``cublasLtEpilogue_t``): nothing, ``RELU`` or ``GELU``, which is the form by tanh."""


class Library(NamedTuple):
    """The functions that are called, without the ``cublasLt`` in front of their names."""

    create: Callable[..., int]
    matmul: Callable[..., int]
    heuristics: Callable[..., int]
    initialize: Callable[..., int]
    check: Callable[..., int]
    get_algorithm: Callable[..., int]
    set_algorithm: Callable[..., int]
    make_operation: Callable[..., int]
    set_operation: Callable[..., int]
    free_operation: Callable[..., int]
    make_matrix: Callable[..., int]
    set_matrix: Callable[..., int]
    free_matrix: Callable[..., int]
    make_search: Callable[..., int]
    set_search: Callable[..., int]
    free_search: Callable[..., int]


NAMES = (
    "Create", "Matmul", "MatmulAlgoGetHeuristic", "MatmulAlgoInit", "MatmulAlgoCheck", "MatmulAlgoConfigGetAttribute",
    "MatmulAlgoConfigSetAttribute", "MatmulDescCreate", "MatmulDescSetAttribute", "MatmulDescDestroy",
    "MatrixLayoutCreate", "MatrixLayoutSetAttribute", "MatrixLayoutDestroy", "MatmulPreferenceCreate",
    "MatmulPreferenceSetAttribute", "MatmulPreferenceDestroy",
)  # fmt: skip
"""The functions of :class:`Library` as the header names them, in the same order."""


@functools.cache
def load() -> tuple[Library | None, str]:
    """cuBLASLt as torch has loaded it, or ``None`` and the reason why it was not found."""
    # RTLD_NOLOAD finds only what is loaded already. A look-up in torch's library goes through those it was linked to.
    major = (torch.version.cuda or "").partition(".")[0]
    for name in ("libtorch_cuda.so", f"libcublasLt.so.{major}"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return Library(*(library[f"cublasLt{function}"] for function in NAMES)), ""
        except (OSError, AttributeError):
            continue
    return None, "torch has loaded no shared cuBLASLt"


def missing() -> str:
    """Why cuBLASLt cannot be called here; empty where it can. Only worth asking where CUDA is in use."""
    return load()[1]


def called(what: str, status: int) -> None:
    """Raise ``SolverUnavailable`` with the name of a status that is not 0."""
    if status:
        raise SolverUnavailable(f"{what} returned {STATUS.get(status, status)}")


def set_attribute(setter: Callable[..., int], of: Any, attribute: Attribute, value: Any) -> None:
    """Set an attribute of a descriptor or an algorithm. Raises ``SolverUnavailable`` with cuBLASLt's status."""
    held = attribute.type(value)
    status = setter(of, c_int(attribute.number), ctypes.byref(held), c_size_t(ctypes.sizeof(held)))
    called(f"setting attribute {attribute.number} to {value}", status)


@functools.cache
def handle_for(device: int) -> int:
    """The handle of cuBLASLt for GPU number ``device``, made once. Threads may share it."""
    library, reason = load()
    if library is None:
        raise SolverUnavailable(reason)
    handle = c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the device has a context from here on
        called("cublasLtCreate", library.create(ctypes.byref(handle)))
    return handle.value or 0
