"""How the matrices of a product lie: which of its sizes each has along which dimension, as stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

__all__ = [
    "OPS", "ROLES", "Product", "dense_row", "extents", "matrix_axes", "normal_leading",
    "require_product",
]  # fmt: skip

ROLES = ("a", "b", "c")
"""Tensors of a product by place: left operand, right operand, result."""
OPS = ("NN", "NT", "TN", "TT")
"""BLAS's words for how the operands are stored: N as they are multiplied, T with rows and columns exchanged."""


class Product(Protocol):
    """What functions in this folder read of a :class:`~tilewise.problems.gemm.problem.GemmProblem`.

    What each field means is said there.
    """

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def op(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def out_dtype(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def bias(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def accumulate(self) -> bool: ...
    @property
    def leading(self) -> tuple[int, int, int]: ...
    @property
    def alignment(self) -> tuple[int, int, int]: ...
    @property
    def device(self) -> str: ...
    def shape(self, role: str) -> tuple[int, ...]: ...
    def torch_dtype(self, role: str) -> torch.dtype: ...
    def extent(self, axis: str) -> int: ...


def matrix_axes(op: str, role: str) -> tuple[str, str]:
    """The axes along the two dimensions of a stored matrix, rows first: ``("rows", "depth")`` of ``a`` in ``NN``."""
    if role == "a":
        return ("rows", "depth") if op[0] == "N" else ("depth", "rows")
    if role == "b":
        return ("depth", "columns") if op[1] == "N" else ("columns", "depth")
    if role == "c":
        return ("rows", "columns")
    raise ValueError(f"role={role!r}: one of {', '.join(ROLES)} would do")


def extents(p: Product) -> dict[str, int]:
    """The sizes of a product by axis. ``batch`` is 0 where there is no such dimension."""
    return {"batch": p.batch, "rows": p.m, "columns": p.n, "depth": p.k}


def dense_row(p: Product, role: str) -> int:
    """Elements of one stored row of the matrix of ``role``."""
    return extents(p)[matrix_axes(p.op, role)[1]]


def normal_leading(batch: int, rows: int, row: int, leading: int) -> int:
    """``leading``, or 0 where a matrix of ``rows`` rows of ``row`` elements is dense: both would be one problem."""
    return 0 if not batch and (rows == 1 or leading == row) else leading


def require_product(p: Product, known: Mapping[str, Sequence[str]]) -> None:
    """Raise ``ValueError`` naming the field of ``p`` whose value makes no product.

    ``known`` has the values that there are, by field.
    """
    for name in ("m", "n", "k"):
        if getattr(p, name) < 1:
            raise ValueError(f"{name}={getattr(p, name)}: must be at least 1")
    if p.batch < 0:
        raise ValueError(
            f"batch={p.batch}: the number of products, or 0 for matrices without such a dimension, would do"
        )
    for name, values in known.items():
        if getattr(p, name) not in values:
            raise ValueError(f"{name}={getattr(p, name)!r}: one of {', '.join(values)} would do")
    if len(p.leading) != 3 or len(p.alignment) != 3:
        raise ValueError(f"leading={p.leading}, alignment={p.alignment}: one number for each of a, b and c would do")
    for role, leading in zip(ROLES, p.leading, strict=True):
        row = dense_row(p, role)
        if leading and leading < row:
            raise ValueError(f"leading={p.leading}: rows of {role} have {row} elements; as many or 0 (dense) would do")
