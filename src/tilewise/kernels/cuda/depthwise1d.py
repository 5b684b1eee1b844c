"""Depthwise convolutions of long signals, each pass in one kernel, by Fourier transforms (``depthwise1d.cu``).

A transform of three factors in shared memory (Bailey, "FFTs in external or hierarchical memory", J. Supercomputing 4,
1990), with the real signal's separation (Vasilache et al. 2014, section 5) and the product in registers of its last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.kernels.codelets import fft, literal, root
from tilewise.kernels.cuda.launch import block_limits, read_source
from tilewise.kernels.cuda.operands import REALS, constants

__all__ = ["SIZES", "Program", "spectrum_length"]

FACTORS = {
    512: (8, 8, 4), 1024: (8, 8, 8), 1536: (16, 8, 6), 2048: (16, 8, 8), 3072: (16, 12, 8), 4096: (16, 16, 8),
    6144: (16, 16, 12), 8192: (16, 16, 16), 9216: (32, 12, 12), 12288: (32, 16, 12), 16384: (32, 16, 16),
    24576: (32, 24, 16), 32768: (32, 32, 16),
}  # fmt: skip
"""Factors of the complex points (half as many as real ones) of a signal, by its number of elements."""
FACTORS_OF_TWO = {
    512: (8, 8, 4), 1024: (16, 8, 4), 1536: (16, 12, 4), 2048: (16, 16, 4), 3072: (16, 24, 4), 4096: (16, 16, 8),
    6144: (16, 24, 8), 8192: (32, 16, 8), 9216: (32, 24, 6), 12288: (32, 32, 6), 16384: (32, 32, 8),
    24576: (32, 24, 16), 32768: (32, 32, 16),
}  # fmt: skip
"""The factors for weight gradients, where two signals share a block's threads: more threads, with shorter rows."""
SIZES = tuple(FACTORS)
BANKS = 16
"""Banks of shared memory, counted in complex numbers."""


@dataclass(frozen=True, slots=True)
class Program:
    """One of the kernels ``depthwise1d_filter``, ``depthwise1d_image`` and ``depthwise1d_gradient``.

    ``signals`` of ``n`` elements go to a thread block; ``paired`` says of both operands and the result (the kernels of
    filters and of images have one operand) whether it is accessed two neighbouring elements at a time; ``resident``
    blocks a multiprocessor is to hold (0: no bound); ``correlate`` multiplies with the conjugate of the filter's
    spectrum; ``wide`` results are fp32 whatever the operands. ``apart``: how far apart the elements of both operands
    and the result lie in the basis; where that is more than 1, they are accessed one by one.
    """

    name: str
    n: int
    dtype: torch.dtype
    signals: int
    paired: tuple[bool, bool, bool] = (False, False, False)
    resident: int = 0
    correlate: bool = False
    wide: bool = False
    apart: tuple[int, int, int] = (1, 1, 1)

    @property
    def factors(self) -> tuple[int, int, int]:
        """A, B and C of the C++ source."""
        return FACTORS_OF_TWO[self.n] if self.name == "depthwise1d_gradient" else FACTORS[self.n]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        a, b, _ = self.factors
        return self.signals * a * b // 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        a, b, c = self.factors
        rows = b * (c | 1)
        copies = 2 if self.name == "depthwise1d_gradient" else 1
        return 8 * self.signals * copies * a * (rows + (c - rows) % BANKS)

    def problems(self) -> list[str]:
        """Reasons why it cannot run; empty where it can."""
        return block_limits(f"signals={self.signals}", self.threads, self.shared)

    def source(self) -> str:
        """The CUDA C++; :func:`~tilewise.kernels.cuda.launch.compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


def spectrum_length(n: int) -> int:
    """Complex numbers of a filter's spectrum."""
    a, b, _ = FACTORS[n]
    return n // 2 + a * b


@functools.lru_cache(maxsize=256)
def _source(p: Program) -> str:
    """The CUDA C++ of a program."""
    a, b, c = p.factors
    m = a * b * c
    codelets, macros = {}, []
    for name, size in (("a", a), ("b", b), ("c", c)):
        for sign, prefix in ((-1, "forward"), (1, "inverse")):
            codelet = fft(size, sign)
            codelets[codelet.name] = codelet
            macros.append(f"#define {prefix}_{name} {codelet.name}")
    bounds = f"{p.threads}, {p.resident}" if p.resident else f"{p.threads}"
    paired = dict(zip(("PAIRED_FIRST", "PAIRED_SECOND", "PAIRED_RESULT"), p.paired, strict=True))
    apart = dict(zip(("APART_FIRST", "APART_SECOND", "APART_RESULT"), p.apart, strict=True))
    values = {
        "A": a, "B": b, "C": c, "SIGNALS": p.signals, **paired, **apart, "CORRELATE": p.correlate, "WIDE": p.wide,
        "REAL": REALS[p.dtype], "STREAM_STORES": p.name == "depthwise1d_image",
    }  # fmt: skip
    texts = [
        constants(values), f"#define BOUNDS __launch_bounds__({bounds})", *macros, read_source("memory.cu"),
        _table("__device__", "TURNS_A", [root(j * power, m, -1) for power in _powers(a) for j in range(b * c)]),
        _table("__device__", "TURNS_B", [root(j * power, b * c, -1) for power in _powers(b) for j in range(c)]),
        _table("__device__", "TURNS", [root(_frequency(t, a, b), m, -1) for t in range(a * b // 2)]),
        _table("__constant__", "ROOTS", [root(j, 2 * c, -1) for j in range(2 * c)]),
        *(codelet.cpp() for codelet in codelets.values()), read_source("depthwise_result.cu"),
        read_source("depthwise1d.cu"), read_source(f"{p.name}.cu"),
    ]  # fmt: skip
    return "\n".join(texts)


def _frequency(t: int, a: int, b: int) -> int:
    """The lowest frequency of a thread's first row (see ``Rows`` in the C++ source)."""
    k1, k2 = divmod(t, b)
    if k1 == 0 and k2 >= b // 2:
        k1, k2 = a // 2, k2 - b // 2
    return k1 + a * k2


def _powers(count: int) -> tuple[int, ...]:
    """The powers from which ``turn`` makes all powers below ``count``."""
    return (1, 2, 3, *range(4, count, 4))


def _table(space: str, name: str, values: Sequence[tuple[float, float]]) -> str:
    """A C++ table of complex numbers."""
    numbers = ", ".join(f"{{{literal(c)}, {literal(s)}}}" for c, s in values)
    return f"{space} const float2 {name}[{len(values)}] = {{{numbers}}};"
