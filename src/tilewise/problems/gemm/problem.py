"""Matrix products: frozen, hashable problems with a canonical text key, and how they are cut.

A :class:`GemmProblem` knows its sizes, floating-point operations and least memory traffic, how it splits into smaller
products, and its value in float64. It knows nothing of algorithms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tilewise.machine.torch_state import framework_flags
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.base import ALIGNMENT, DTYPES, PRECISIONS, Part, Problem, dense_strides, require_sizes
from tilewise.problems.gemm.cuts import SIZES, cut
from tilewise.problems.gemm.key import fields_of, key_of
from tilewise.problems.gemm.layouts import (
    OPS,
    ROLES,
    dense_row,
    extents,
    matrix_axes,
    normal_leading,
    require_product,
)
from tilewise.problems.limits import INT64_MAX

__all__ = ["ROLES", "GemmProblem"]


@dataclass(frozen=True, slots=True)
class GemmProblem(Problem):
    """A matrix product ``c = op(a) op(b)`` of ``m`` by ``k`` and ``k`` by ``n``, or ``batch`` of them.

    ``op`` is BLAS's pair of letters (Dongarra et al. 1990, "A set of level 3 basic linear algebra subprograms"): with
    ``N`` an operand is stored as it is multiplied, with ``T`` its rows and columns are exchanged. So ``a`` is stored as
    (m, k) or (k, m), ``b`` as (k, n) or (n, k), and ``c`` as (m, n). ``nn.Linear`` is ``NT`` with the weight as ``b``,
    its gradients are ``NN`` and ``TN``. With a ``batch`` all three tensors have it as their first dimension; 0 stands
    for plain matrices.

    ``leading`` has, for a, b and c, the elements from one stored row to the next; 0 where the tensor is dense.
    ``alignment`` is in bytes, at most 16. ``dtype`` is the operands', ``out_dtype`` the result's: sums over parts are
    kept in fp32. ``precision`` is torch's precision of matrix products for fp32 operands, ``ieee`` or ``tf32``.
    ``bias`` adds a vector of ``n`` numbers to every row. ``activation`` is applied to every number of the result, after
    the bias: ``relu``, ``gelu`` by the error function or ``gelu_tanh``, ``silu``, ``tanh``, ``sigmoid`` or ``none``.
    ``accumulate`` adds into the result, without an activation. ``device`` is ``"cpu"``
    or ``"cuda:<name>"``.

    Raises ``ValueError`` naming the field for values that make no product. For example
    ``GemmProblem(16, 1024, 512, "NT", bias=True)`` is the forward of ``nn.Linear(512, 1024)`` on 16 rows.

    >>> problem = tilewise.GemmProblem(16, 1024, 512, "NT", bias=True)  # nn.Linear(512, 1024) on 16 rows
    >>> problem.shape("b"), problem.flops
    ((1024, 512), 16777216)
    """

    kind: ClassVar[str] = "gemm"
    operands: ClassVar[tuple[str, str]] = ("a", "b")
    results: ClassVar[tuple[str]] = ("c",)

    m: int
    n: int
    k: int
    op: str = "NN"
    batch: int = 0
    dtype: str = "fp32"
    out_dtype: str = ""
    precision: str = "ieee"
    bias: bool = False
    activation: str = "none"
    accumulate: bool = False
    leading: tuple[int, int, int] = (0, 0, 0)
    alignment: tuple[int, int, int] = (ALIGNMENT, ALIGNMENT, ALIGNMENT)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        known = {
            "op": OPS,
            "dtype": tuple(DTYPES),
            "out_dtype": tuple(DTYPES),
            "precision": PRECISIONS,
            "activation": ACTIVATIONS,
        }
        require_product(self, known)
        if self.accumulate and self.activation != "none":
            raise ValueError(f"activation={self.activation!r}: none would do for a product that accumulates")
        if self.dtype != "fp32" and self.precision != "ieee":
            # Only fp32 operands can be rounded to TF32, so both names would be one problem.
            object.__setattr__(self, "precision", "ieee")
        leading = tuple(
            normal_leading(self.batch, self.shape(role)[-2], dense_row(self, role), lead)
            for role, lead in zip(ROLES, self.leading, strict=True)
        )
        object.__setattr__(self, "leading", leading)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the stored tensor of ``role``, with the batch first where there is one."""
        sizes = extents(self)
        matrix = tuple(sizes[axis] for axis in matrix_axes(self.op, role))
        return (self.batch, *matrix) if self.batch else matrix

    def layout(self, role: str) -> str:
        """``contiguous``, or ``view`` where rows or matrices have gaps between them."""
        return "view" if self.leading[ROLES.index(role)] else "contiguous"

    def strides(self, role: str) -> tuple[int, ...]:
        """Strides of an example of the tensor of ``role``: its rows are ``leading`` elements apart."""
        shape, lead = self.shape(role), self.leading[ROLES.index(role)]
        if not lead:
            return dense_strides(shape, "contiguous")
        gap = 0 if lead > shape[-1] else 1  # matrices of a batch that are dense themselves lie apart
        matrix = (lead, 1)
        return ((shape[-2] + gap) * lead, *matrix) if self.batch else matrix

    def alignment_of(self, role: str) -> int:
        """Bytes by which the address of the tensor of ``role`` is aligned."""
        return self.alignment[ROLES.index(role)]

    @property
    def bias_dim(self) -> int:
        """The last dimension of the result."""
        return 2 if self.batch else 1

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that :meth:`split` knows."""
        return ("batch", "rows", "columns", "depth") if self.batch else ("rows", "columns", "depth")

    @property
    def task(self) -> str:
        """Which of a layer's products it is: ``nt`` is its forward, ``nn`` and ``tn`` its gradients."""
        return self.op.lower()

    def flags(self, *, deterministic: bool) -> AbstractContextManager[None]:
        """A context with the problem's precision of matrix products on a GPU."""
        return framework_flags(self.device_type, self.precision, deterministic=deterministic, operation="matmul")

    @property
    def flops(self) -> int:
        """Floating-point operations, two for a multiply-add."""
        return 2 * max(1, self.batch) * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands read once, the result written once (and read, when accumulated into)."""
        moved = sum(self.nbytes(role) for role in ROLES)
        return moved + (self.nbytes("c") if self.accumulate else 0)

    @property
    def key(self) -> str:
        """Canonical text: equal for equal problems, different for different ones."""
        return key_of(self)

    @classmethod
    def from_key(cls, text: str) -> GemmProblem:
        """Read :attr:`key` back, whoever wrote it. Raises ``ValueError`` for what is no product's key."""
        problem = cls(**fields_of(text))
        if problem.key != text or any(n not in (1, 2, 4, 8, 16) for n in problem.alignment):
            raise ValueError(f"problem {text[:200]!r}: not as tilewise writes a problem's key")
        spans = (problem.strides(role)[0] * problem.shape(role)[0] for role in ROLES)
        if max(*spans, *(problem.nbytes(role) for role in ROLES)) > INT64_MAX // 4:
            raise ValueError(f"problem {text[:200]!r}: one of its tensors is beyond any memory")
        return problem

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[GemmProblem], ...]:
        """Cut along ``axis`` into parts of the given ``sizes``, in order.

        ``axis`` is one of :attr:`cut_axes`. Parts of ``rows``, ``columns`` and ``batch`` write their own range of the
        result. Parts of ``depth`` are terms of its sums, which are kept in fp32.

        Raises ``ValueError`` for an unknown axis and for sizes that do not sum to the whole.
        """
        require_sizes(sizes, axis, self.extent(axis))
        ends = itertools.accumulate(sizes)
        parts = []
        for size, end in zip(sizes, ends, strict=True):
            uses, write, changes = cut(self, axis, end - size, size)
            parts.append(Part(replace(self, **changes), uses, write))
        return tuple(parts)

    def extent(self, axis: str) -> int:
        """What the sizes of a split along ``axis`` sum to. Raises ``ValueError`` for an unknown axis."""
        if axis not in self.cut_axes:
            raise ValueError(f"axis={axis!r}: one of {', '.join(self.cut_axes)} would do")
        return int(getattr(self, SIZES[axis]))

    def reference(self, *operands: torch.Tensor) -> torch.Tensor:
        """The result in float64, without bias, activation or accumulation, from ``a`` and ``b`` as they are stored."""
        a, b = (operand.double() for operand in operands)
        return (a if self.op[0] == "N" else a.mT) @ (b if self.op[1] == "N" else b.mT)
