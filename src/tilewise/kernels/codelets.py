"""Straight-line Fourier transforms of a thread's registers, generated: FFTW's codelets for a GPU.

A codelet is a list of steps ``target = a + factor * b`` on real numbers. All of them are additions or fused
multiply-adds, because a multiplication is never done where it arises: a value is kept as ``factor * variable``, and
whatever adds it to another value absorbs the factor. A twiddle factor c + is, for instance, is c times 1 + i(s/c): the
second is two fused multiply-adds, and c waits for the butterfly (Linzer and Feig, "Implementation of efficient FFT
algorithms on fused multiply-add architectures", IEEE Trans. Signal Processing 41, 1993).

Decimation in time with radix 4 first, then 2 and 3. Reordering is renaming and costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Codelet", "Step", "Term", "fft", "literal", "root", "rotation"]


@dataclass(frozen=True, slots=True)
class Term:
    """The real number ``factor * variable``."""

    factor: float
    variable: str

    def times(self, factor: float) -> Term:
        """The term multiplied by ``factor``, which costs nothing yet."""
        return Term(_snap(self.factor * factor), self.variable)


Complex = tuple[Term, Term]
"""Real and imaginary part."""


@dataclass(frozen=True, slots=True)
class Step:
    """``target = a + factor * b``: an addition where the factor is 1 or -1, else a fused multiply-add."""

    target: str
    a: str
    factor: float
    b: str

    @property
    def flops(self) -> int:
        """Floating-point operations as they are counted: a fused multiply-add is two."""
        return 1 if abs(self.factor) == 1.0 else 2


@dataclass(frozen=True, slots=True)
class Codelet:
    """Steps from ``len(outputs)`` complex inputs, named ``x0, y0, x1, y1, ...``, to the outputs in natural order."""

    name: str
    steps: tuple[Step, ...]
    outputs: tuple[Complex, ...]

    @property
    def size(self) -> int:
        """The number of complex inputs, and of outputs."""
        return len(self.outputs)

    @property
    def flops(self) -> int:
        """Floating-point operations of one transform, multiplications left for the outputs included."""
        ends = sum(abs(term.factor) != 1.0 for pair in self.outputs for term in pair)
        return sum(step.flops for step in self.steps) + ends

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run on complex numbers or arrays of them, in their own precision; returns the outputs."""
        values_of: dict[str, Any] = {}
        for i, value in enumerate(values):
            values_of[f"x{i}"], values_of[f"y{i}"] = value.real, value.imag
        for step in self.steps:
            values_of[step.target] = values_of[step.a] + step.factor * values_of[step.b]
        return [
            values_of[re.variable] * re.factor + 1j * (values_of[im.variable] * im.factor) for re, im in self.outputs
        ]

    def cpp(self) -> str:
        """The C++ function that transforms ``r`` in place; every index is known when it is compiled."""
        names = {f"{part}{i}": f"r[{i}].{part}" for i in range(self.size) for part in "xy"}
        head = f"__device__ __forceinline__ void {self.name}(float2 (&r)[{self.size}]) {{"
        return "\n".join((head, *(f"  {line}" for line in self._lines(names)), "}\n"))

    def _lines(self, names: dict[str, str]) -> Iterable[str]:
        """The function's lines; ``names`` holds the C++ expression of each input."""
        for step in self.steps:
            a, b = names.get(step.a, step.a), names.get(step.b, step.b)
            if abs(step.factor) == 1.0:
                value = f"{a} {'+' if step.factor > 0 else '-'} {b}"
            else:
                value = f"fmaf({literal(step.factor)}, {b}, {a})"
            yield f"const float {step.target} = {value};"
        # An output that is an unchanged input may be overwritten before it is read: copies come first.
        kept = {term.variable for pair in self.outputs for term in pair if term.variable in names}
        for variable in sorted(kept):
            yield f"const float {variable} = {names[variable]};"
        for k, pair in enumerate(self.outputs):
            parts = []
            for term in pair:
                factor = {1.0: "", -1.0: "-"}.get(term.factor, f"{literal(term.factor)} * ")
                parts.append(factor + term.variable)
            yield f"r[{k}] = make_float2({', '.join(parts)});"


def fft(n: int, sign: int = -1, name: str | None = None) -> Codelet:
    """The transform ``X[k] = sum_j x[j] exp(sign 2 pi i jk / n)`` of n = 2^a 3^b points, unscaled both ways.

    Raises ``ValueError`` for other sizes or signs.
    """
    if sign not in (-1, 1):
        raise ValueError(f"sign={sign}: must be -1 (forward) or 1 (inverse)")
    return _fft(n, sign, name or f"{'fft' if sign < 0 else 'ifft'}{n}")


def rotation(m: int, n: int, sign: int = -1, name: str | None = None) -> Codelet:
    """The codelet ``X[j] = x[j] exp(sign 2 pi i j / n)`` for j < m: the factors between parts of a longer transform."""
    if sign not in (-1, 1):
        raise ValueError(f"sign={sign}: must be -1 (forward) or 1 (inverse)")
    program = _Program(sign)
    outputs = [program.rotate(value, j, n) for j, value in enumerate(_inputs(m))]
    return Codelet(name or f"{'rotate' if sign < 0 else 'unrotate'}{m}of{n}", tuple(program.steps), tuple(outputs))


@functools.lru_cache(maxsize=256)
def _fft(n: int, sign: int, name: str) -> Codelet:
    """As :func:`fft`, kept for further calls."""
    program = _Program(sign)
    outputs = program.transform(_inputs(n))
    return Codelet(name, tuple(program.steps), tuple(outputs))


def _inputs(n: int) -> list[Complex]:
    """The ``n`` complex inputs of a codelet."""
    return [(Term(1.0, f"x{i}"), Term(1.0, f"y{i}")) for i in range(n)]


class _Program:
    """The steps of a codelet while it is generated."""

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.steps: list[Step] = []
        self.butterflies: dict[int, Callable[[list[Complex]], list[Complex]]] = {
            2: self._radix2,
            3: self._radix3,
            4: self._radix4,
        }

    def transform(self, x: list[Complex]) -> list[Complex]:
        """Decimation in time: transforms of every r-th value, rotated and combined by radix-r butterflies."""
        n = len(x)
        if n == 1:
            return x
        r = _radix(n)
        m = n // r
        parts = [self.transform(x[q::r]) for q in range(r)]
        out: list[Complex] = [(Term(0.0, ""), Term(0.0, ""))] * n
        for k in range(m):
            out[k::m] = self.butterflies[r]([self.rotate(parts[q][k], q * k, n) for q in range(r)])
        return out

    def add(self, a: Term, b: Term) -> Term:
        """The sum of two terms, by one step. Of their factors one that is 1 or -1 stays outside, else that of ``a``."""
        if abs(b.factor) == 1.0 and abs(a.factor) != 1.0:
            a, b = b, a
        target = f"t{len(self.steps)}"
        self.steps.append(Step(target, a.variable, _snap(b.factor / a.factor), b.variable))
        return Term(a.factor, target)

    def plus(self, a: Complex, b: Complex) -> Complex:
        """The sum of two complex numbers."""
        return self.add(a[0], b[0]), self.add(a[1], b[1])

    def minus(self, a: Complex, b: Complex) -> Complex:
        """The difference of two complex numbers."""
        return self.plus(a, _scaled(b, -1.0))

    def turned(self, a: Complex) -> Complex:
        """``a`` times ``sign * i``."""
        return a[1].times(-self.sign), a[0].times(self.sign)

    def rotate(self, a: Complex, k: int, n: int) -> Complex:
        """``a`` times ``exp(sign 2 pi i k / n)``: two steps and a factor that waits, or no step for a quarter turn."""
        c, s = root(k, n, self.sign)
        if s == 0.0:
            return _scaled(a, c)
        if c == 0.0:
            return a[1].times(-s), a[0].times(s)
        re, im = a
        # What is divided by is the larger of the two, so that no factor inside a step grows beyond 1.
        if abs(c) >= abs(s):
            return self.add(re.times(c), im.times(-s)), self.add(im.times(c), re.times(s))
        return self.add(im.times(-s), re.times(c)), self.add(re.times(s), im.times(c))

    def _radix2(self, x: list[Complex]) -> list[Complex]:
        """The transform of two numbers."""
        return [self.plus(*x), self.minus(*x)]

    def _radix3(self, x: list[Complex]) -> list[Complex]:
        """The transform of three numbers."""
        a, b, c = x
        both, difference = self.plus(b, c), self.minus(b, c)
        middle = self.plus(a, _scaled(both, -0.5))
        side = _scaled(self.turned(difference), math.sqrt(0.75))
        return [self.plus(a, both), self.plus(middle, side), self.minus(middle, side)]

    def _radix4(self, x: list[Complex]) -> list[Complex]:
        """The transform of four numbers."""
        a, b, c, d = x
        even, odd = self._radix2([a, c]), self._radix2([b, d])
        side = self.turned(odd[1])
        return [
            self.plus(even[0], odd[0]),
            self.plus(even[1], side),
            self.minus(even[0], odd[0]),
            self.minus(even[1], side),
        ]


def _radix(n: int) -> int:
    """The radix with which a transform of ``n`` points begins. Raises ``ValueError`` where n is not 2^a 3^b."""
    for r in (4, 2, 3):
        if n % r == 0:
            return r
    raise ValueError(f"n={n}: a codelet's size is 2^a * 3^b")


def _scaled(a: Complex, factor: float) -> Complex:
    """``a`` times a real factor."""
    return a[0].times(factor), a[1].times(factor)


def _snap(factor: float) -> float:
    """``factor``, or 1 or -1 where only rounding made it something else."""
    return math.copysign(1.0, factor) if math.isclose(abs(factor), 1.0, rel_tol=1e-14) else factor


def root(k: int, n: int, sign: int = 1) -> tuple[float, float]:
    """Cosine and sine of ``sign 2 pi k / n``, from an angle in the first octant: exact symmetry, exact zeros."""
    eighths, rest = divmod(8 * (k % n), n)
    if eighths % 2:  # the octant counted back from its end
        rest = n - rest
    angle = math.pi * rest / (4 * n)
    c, s = (math.cos(angle), math.sin(angle)) if rest < n else (math.sqrt(0.5), math.sqrt(0.5))
    if eighths % 4 in (1, 2):
        c, s = s, c
    if eighths in (2, 3, 4, 5):
        c = -c
    if eighths >= 4:
        s = -s
    return c + 0.0, sign * s + 0.0


def literal(value: float) -> str:
    """A C++ ``float`` literal of the nearest single-precision number."""
    text = f"{float(np.float32(value)):.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"
