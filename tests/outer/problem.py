"""A kind of problems that has nothing of a convolution: scaled outer products, one for each item of a batch.

``z[b, m, n] = s[b] u[b, m] v[b, n]`` and ``t[b, m] = s[b] u[b, m]``: three operands and two results. As a package
``tilewise.problems.outer`` it registers itself; no other file names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tilewise.problems.base import Part, Problem, Range, Write
from tilewise.problems.checks import errors_of_products
from tilewise.problems.kinds import Kind, register

KEY = re.compile(r"outer (fp32|bf16|fp16)(?:>(fp32|bf16|fp16))? b(\d+)m(\d+)n(\d+)( accumulate)? (cpu|cuda:[^\n]+)")


class UndeclaredError(Exception):
    """Something asked for what the contract of a problem does not declare."""


@dataclass(frozen=True, slots=True)
class OuterProblem(Problem):
    """``batch`` outer products of ``rows`` by ``columns``."""

    kind: ClassVar[str] = "outer"
    precision: ClassVar[str] = "ieee"
    operands: ClassVar[tuple[str, ...]] = ("u", "v", "s")
    results: ClassVar[tuple[str, ...]] = ("z", "t")
    cut_axes: ClassVar[tuple[str, ...]] = ("batch", "rows")

    batch: int
    rows: int
    columns: int
    dtype: str = "fp32"
    out_dtype: str = ""
    accumulate: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UndeclaredError(f"OuterProblem.{name}")

    @property
    def key(self) -> str:
        dtypes = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}>{self.out_dtype}"
        flag = " accumulate" if self.accumulate else ""
        return f"outer {dtypes} b{self.batch}m{self.rows}n{self.columns}{flag} {self.device}"

    @classmethod
    def from_key(cls, text: str) -> OuterProblem:
        found = KEY.fullmatch(text)
        if found is None:
            raise ValueError(f"problem {text!r}: not an outer product's key")
        dtype, out_dtype, batch, rows, columns, accumulate, device = found.groups()
        return cls(int(batch), int(rows), int(columns), dtype, out_dtype or "", bool(accumulate), device)

    def shape(self, role: str) -> tuple[int, ...]:
        return {
            "u": (self.batch, self.rows),
            "v": (self.batch, self.columns),
            "s": (self.batch,),
            "z": (self.batch, self.rows, self.columns),
            "t": (self.batch, self.rows),
        }[role]

    @property
    def flops(self) -> int:
        return self.batch * self.rows * (self.columns + 1)

    @property
    def bytes(self) -> int:
        return sum(self.nbytes(role) for role in self.roles)

    def extent(self, axis: str) -> int:
        return {"batch": self.batch, "rows": self.rows}[axis]

    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[OuterProblem], ...]:
        parts, start = [], 0
        for size in sizes:
            items, rows = (Range(0, start, size),), (Range(1, start, size),)
            if axis == "batch":
                child, uses = replace(self, batch=size), dict.fromkeys(self.roles, items)
            else:
                child, uses = replace(self, rows=size), {"u": rows, "z": rows, "t": rows}
            parts.append(Part(child, uses, Write.SET))
            start += size
        return tuple(parts)

    def reference(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, v, s = (operand.double() for operand in operands)
        t = s[:, None] * u
        return t[:, :, None] * v[:, None, :], t


register(Kind(OuterProblem, "outer products", "outer_torch", errors_of_products))
