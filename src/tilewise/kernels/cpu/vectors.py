"""Vector instructions for Numba's kernels, which compute ``lanes`` channels at once with LLVM's vectors.

A *complex vector* in memory is ``lanes`` real parts followed by ``lanes`` imaginary parts, in fp32. Addresses and
distances are int64, in bytes. Every function makes an intrinsic: a call of it compiles to straight-line vector code, so
that no compiler must vectorize a loop. LLVM splits vectors that are wider than those of the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tilewise.kernels.cpu import halves
from tilewise.kernels.cpu.emitting import inner

__all__ = [
    "INT", "NUMBER", "SIZES", "Code", "Pair", "Values", "accumulate", "compiled", "intrinsic_of", "join", "multiply",
    "named", "next_number", "number_at", "pointer_call", "scale", "separate", "square_in", "square_out", "transposed",
    "vector_in", "vector_out", "zero",
]  # fmt: skip

NUMBER = 4
"""Bytes of an fp32 number."""
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number of each operand type."""
FLOAT = ir.FloatType()
INT = ir.IntType(64)
Values = Sequence[ir.Value]
Pair = tuple[ir.Value | None, ir.Value | None]


def compiled(*parameters: object) -> Callable[[Any], Any]:
    """Decorates a function that kernels call. ``parameters`` are those that its maker was called with.

    Numba names machine code by a function's name and a count that begins anew in each process. So names must be unique:
    else kernels that different processes compiled and kept could be linked with each other's functions.
    """

    def decorate(function: Any) -> Any:
        return inner(named(function, *parameters))

    return decorate


def named(function: Any, *parameters: object) -> Any:
    """``function``, renamed after its module, its maker and the maker's parameters."""
    maker = function.__qualname__.replace(".<locals>", "").removesuffix(".run")
    words = function.__module__.rpartition(".")[2], *maker.split("."), *map(str, parameters)
    function.__name__ = function.__qualname__ = "_".join(word.replace("-", "m") for word in words)
    return function


class Code:
    """Writes instructions that work on ``lanes`` numbers at once. The value ``None`` stands for zero."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{lanes}f32")

    def splat(self, value: float) -> ir.Value:
        """A constant vector with ``value`` in all lanes."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def at(self, base: ir.Value, offset: int, stride: ir.Value | None = None) -> ir.Value:
        """The address ``base + offset * stride``."""
        step = ir.Constant(INT, offset) if stride is None else self.builder.mul(stride, ir.Constant(INT, offset))
        return self.builder.add(base, step) if offset else base

    def prefetch(self, address: ir.Value) -> None:
        """Prefetch the cache line at ``address`` to the second cache; the address need not be valid."""
        whole = ir.IntType(32)
        place = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, whole, whole, whole])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [place, *(ir.Constant(whole, i) for i in (0, 2, 1))])

    def load(self, address: ir.Value) -> ir.Value:
        """The vector at ``address``."""
        return self.builder.load(self.builder.inttoptr(address, self.vector.as_pointer()), align=4)

    def store(self, value: ir.Value | None, address: ir.Value) -> None:
        """Store a vector at ``address``."""
        value = self.splat(0.0) if value is None else value
        self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer()), align=4)

    def widened(self, address: ir.Value, dtype: str) -> ir.Value:
        """The vector of ``dtype`` at ``address`` as fp32."""
        if dtype == "fp32":
            return self.load(address)
        kind = ir.VectorType(ir.IntType(16), self.lanes)
        return self.wide(self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=2), dtype)

    def wide(self, bits: ir.Value, dtype: str) -> ir.Value:
        """The fp32 values of numbers of ``dtype``, given as integers of the same width."""
        if dtype == "fp32":
            return self.builder.bitcast(bits, self.vector)
        if dtype == "fp16":
            return halves.widened(self.builder, bits, self.lanes)
        bits = self.builder.zext(bits, ir.VectorType(ir.IntType(32), self.lanes))
        return self.builder.bitcast(self.builder.shl(bits, self.whole(16)), self.vector)

    def narrow(self, value: ir.Value, address: ir.Value, dtype: str) -> None:
        """Store fp32 as ``dtype``, rounded as :meth:`rounded` does."""
        if dtype == "fp32":
            self.store(value, address)
            return
        bits = self.rounded(value, dtype)
        self.builder.store(bits, self.builder.inttoptr(address, bits.type.as_pointer()), align=2)

    def rounded(self, value: ir.Value, dtype: str) -> ir.Value:
        """fp32 numbers as ``dtype``, given as integers of the same width: to nearest, ties to even; NaN stays NaN."""
        b, kind = self.builder, ir.VectorType(ir.IntType(16), self.lanes)
        if dtype == "fp16":
            return halves.narrowed(b, value, self.lanes)
        bits = b.bitcast(value, ir.VectorType(ir.IntType(32), self.lanes))
        if dtype == "fp32":
            return bits
        odd = b.and_(b.lshr(bits, self.whole(16)), self.whole(1))
        rounded = b.add(bits, b.add(odd, self.whole(0x7FFF)))
        quiet = b.or_(bits, self.whole(0x400000))
        kept = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        return b.trunc(b.lshr(kept, self.whole(16)), kind)

    def whole(self, value: int) -> ir.Value:
        """A 32-bit integer in all lanes."""
        return ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [value] * self.lanes)

    def load_pair(self, address: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The real and imaginary parts of the complex vector at ``address``."""
        return self.load(address), self.load(self.at(address, NUMBER * self.lanes))

    def store_pair(self, pair: Pair, address: ir.Value) -> None:
        """Store the real and imaginary parts of a complex vector at ``address``."""
        self.store(pair[0], address)
        self.store(pair[1], self.at(address, NUMBER * self.lanes))

    def everywhere(self, scalar: ir.Value) -> ir.Value:
        """A vector with the number ``scalar`` in all lanes."""
        first_lane = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(INT, 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first_lane, ir.Constant(self.vector, ir.Undefined), zeros)

    def broadcast(self, address: ir.Value) -> ir.Value:
        """A vector with the number at ``address`` in all lanes."""
        return self.everywhere(self.builder.load(self.builder.inttoptr(address, FLOAT.as_pointer()), align=4))

    def times(self, factor: float, value: ir.Value | None) -> ir.Value | None:
        """``factor * value``."""
        if value is None or factor == 1.0:
            return value
        return self.builder.fneg(value) if factor == -1.0 else self.builder.fmul(self.splat(factor), value)

    def plus(self, a: ir.Value | None, factor: float, b: ir.Value | None) -> ir.Value | None:
        """``a + factor * b``."""
        if a is None or b is None:
            return self.times(factor, b) if a is None else a
        if abs(factor) == 1.0:
            return self.builder.fadd(a, b) if factor > 0 else self.builder.fsub(a, b)
        return self.builder.call(self.fma, [self.splat(factor), b, a])

    def product(self, a: Pair, b: Pair, conjugate: bool, plus: Pair = (None, None)) -> Pair:
        """``plus + a * b``, or with ``conjugate`` ``plus + a * conj(b)``."""
        negated = self.builder.fneg(b[1])
        minus, other = (b[1], negated) if conjugate else (negated, b[1])
        return (
            self._dot(a[0], b[0], a[1], minus, plus[0]),
            self._dot(a[1], b[0], a[0], other, plus[1]),
        )

    def _dot(self, a: ir.Value | None, b: ir.Value, c: ir.Value | None, d: ir.Value, plus: ir.Value | None) -> ir.Value:
        """``plus + c * d + a * b``."""
        total = plus
        for x, y in ((c, d), (a, b)):
            if x is not None:
                total = self.builder.fmul(x, y) if total is None else self.builder.call(self.fma, [x, y, total])
        return total


def intrinsic_of(lanes: int, emit: Callable[[Code, Values], None]) -> Callable[..., None]:
    """An intrinsic that takes any number of integers and returns nothing; ``emit`` writes its instructions."""

    def made(typingctx, *arguments):
        count = len(arguments)

        def generate(context, builder, signature, packed):
            emit(Code(builder, lanes), [builder.extract_value(packed[0], i) for i in range(count)])
            return context.get_dummy_value()

        return types.void(types.StarArgTuple([types.int64] * count)), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def next_number() -> Callable[..., int]:
    """Makes ``(numbers, index)``, which returns an int64 at a pointer and adds 1 to it, atomically for all threads."""

    def generate(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", place, ir.Constant(INT, 1), "monotonic")

    def made(typingctx, numbers, index):
        return types.int64(types.CPointer(types.int64), types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def number_at() -> Callable[..., int]:
    """Makes ``(address, index)``, which returns the int64 number ``index`` at ``address``."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT.as_pointer())
        return builder.load(builder.gep(place, [arguments[1]]))

    def made(typingctx, address, index):
        return types.int64(types.int64, types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def pointer_call() -> Callable[..., None]:
    """Makes ``(address, ...)``, which calls the compiled function at ``address`` with the integers that follow.

    A function that is called so is compiled once, however many functions call it.
    """

    def made(typingctx, *arguments):
        count = len(arguments)

        def generate(context, builder, signature, packed):
            to, *values = (builder.extract_value(packed[0], i) for i in range(count))
            kind = ir.FunctionType(ir.VoidType(), [INT] * (count - 1))
            builder.call(builder.inttoptr(to, kind.as_pointer()), values)
            return context.get_dummy_value()

        return types.void(types.StarArgTuple([types.int64] * count)), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def separate(lanes: int) -> Callable[..., None]:
    """Makes ``(f, g, a, b)``: from frequencies k and -k of ``a + ib``, it computes twice frequency k of a and of b."""

    def emit(code: Code, arguments: Values) -> None:
        f, g, a, b = arguments
        (fx, fy), (gx, gy) = code.load_pair(f), code.load_pair(g)
        code.store_pair((code.plus(fx, 1.0, gx), code.plus(fy, -1.0, gy)), a)
        code.store_pair((code.plus(fy, 1.0, gy), code.plus(gx, -1.0, fx)), b)

    return intrinsic_of(lanes, emit)


@functools.cache
def join(lanes: int) -> Callable[..., None]:
    """Makes ``(f, g, a, b)``: it computes frequencies k and -k of ``a + ib`` from frequency k of a and of b."""

    def emit(code: Code, arguments: Values) -> None:
        f, g, a, b = arguments
        (ax, ay), (bx, by) = code.load_pair(a), code.load_pair(b)
        code.store_pair((code.plus(ax, 1.0, by), code.plus(bx, -1.0, ay)), g)
        code.store_pair((code.plus(ax, -1.0, by), code.plus(ay, 1.0, bx)), f)

    return intrinsic_of(lanes, emit)


@functools.cache
def multiply(lanes: int, conjugate: bool) -> Callable[..., None]:
    """Makes ``(a, b)``, which computes ``a *= b``, or with ``conjugate`` ``a *= conj(b)``, for complex vectors."""

    def emit(code: Code, arguments: Values) -> None:
        a, b = arguments
        code.store_pair(code.product(code.load_pair(a), code.load_pair(b), conjugate), a)

    return intrinsic_of(lanes, emit)


@functools.cache
def accumulate(lanes: int) -> Callable[..., None]:
    """Makes ``(sum, a, b)``, which computes ``sum += a * conj(b)`` for complex vectors."""

    def emit(code: Code, arguments: Values) -> None:
        total, a, b = arguments
        code.store_pair(code.product(code.load_pair(a), code.load_pair(b), True, code.load_pair(total)), total)

    return intrinsic_of(lanes, emit)


@functools.cache
def scale(lanes: int) -> Callable[..., None]:
    """Makes ``(address, factor)``, which multiplies a complex vector by the fp32 number at the address ``factor``."""

    def emit(code: Code, arguments: Values) -> None:
        address, factor = arguments
        by = code.broadcast(factor)
        re, im = code.load_pair(address)
        code.store_pair((code.builder.fmul(re, by), code.builder.fmul(im, by)), address)

    return intrinsic_of(lanes, emit)


@functools.cache
def zero(lanes: int) -> Callable[..., None]:
    """Makes ``(address)``, which sets one real vector to zero."""

    def emit(code: Code, arguments: Values) -> None:
        code.store(None, arguments[0])

    return intrinsic_of(lanes, emit)


@functools.cache
def vector_in(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(source, target)``, which loads one real vector from neighbouring numbers of ``dtype``."""

    def emit(code: Code, arguments: Values) -> None:
        source, target = arguments
        code.store(code.widened(source, dtype), target)

    return intrinsic_of(lanes, emit)


@functools.cache
def vector_out(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(target, source)``, the inverse, which stores one real vector as numbers of ``dtype``."""

    def emit(code: Code, arguments: Values) -> None:
        target, source = arguments
        code.narrow(code.load(source), target, dtype)

    return intrinsic_of(lanes, emit)


@functools.cache
def square_in(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(source, channel, valid, target, stride)``, which transposes ``lanes`` numbers of each lane to vectors.

    The numbers of a lane are neighbours in memory, lanes are ``channel`` bytes apart, and the vectors are ``stride``
    bytes apart. Lanes from ``valid`` on repeat the last valid one.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, target, stride = arguments
        rows = [code.widened(place, dtype) for place in _lanes(code, source, channel, valid)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i, stride))

    return intrinsic_of(lanes, emit)


@functools.cache
def square_out(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(target, channel, valid, source, stride)``, the inverse.

    Lanes from ``valid`` on are written to the last valid one, so they must have the same numbers.
    """

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, source, stride = arguments
        rows = [code.load(code.at(source, i, stride)) for i in range(lanes)]
        for row, place in zip(transposed(code, rows), _lanes(code, target, channel, valid), strict=True):
            code.narrow(row, place, dtype)

    return intrinsic_of(lanes, emit)


def _lanes(code: Code, base: ir.Value, channel: ir.Value, valid: ir.Value) -> list[ir.Value]:
    """The address of every lane; lanes from ``valid`` on have that of the last valid one."""
    last = code.builder.sub(valid, ir.Constant(INT, 1))
    addresses = []
    for i in range(code.lanes):
        index = ir.Constant(INT, i)
        lane = code.builder.select(code.builder.icmp_signed("<", index, last), index, last)
        addresses.append(code.builder.add(base, code.builder.mul(lane, channel)))
    return addresses


def transposed(code: Code, rows: list[ir.Value]) -> list[ir.Value]:
    """The transpose of a square of vectors.

    Each of log2(lanes) stages rotates the digits of row and column by one, so that in the end both are swapped.
    """
    n = code.lanes
    kind = ir.VectorType(ir.IntType(32), n)
    low, high = (
        ir.Constant(kind, [start + i // 2 + n * (i % 2) for i in range(n)]) for start in (0, n // 2)
    )  # fmt: skip
    for _ in range(n.bit_length() - 1):
        pairs = [(rows[i], rows[i + n // 2]) for i in range(n // 2)]
        rows = [code.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows
