"""Vector instructions for Numba's kernels: what works on ``lanes`` planes at once, as LLVM's vectors.

A *complex vector* is ``lanes`` real parts and then ``lanes`` imaginary parts, fp32, in memory. Addresses and distances
are int64, in bytes. Every function makes an intrinsic: a call of it compiles to straight-line code, with no loop left
to be found parallel. LLVM splits vectors that are wider than the machine's.
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
"""Bytes of an operand's numbers."""
FLOAT = ir.FloatType()
INT = ir.IntType(64)
Values = Sequence[ir.Value]
Pair = tuple[ir.Value | None, ir.Value | None]


def compiled(*parameters: object) -> Callable[[Any], Any]:
    """Decorates functions around intrinsics with what their maker was called with. Threads run them side by side.

    Numba names machine code by a function's name and a count that begins anew in each process, so that kernels kept by
    different ones would be linked with each other's parts if the name did not tell them apart.
    """

    def decorate(function: Any) -> Any:
        return inner(named(function, *parameters))

    return decorate


def named(function: Any, *parameters: object) -> Any:
    """The function, called after its module, maker and the maker's parameters."""
    maker = function.__qualname__.replace(".<locals>", "").removesuffix(".run")
    words = function.__module__.rpartition(".")[2], *maker.split("."), *map(str, parameters)
    function.__name__ = function.__qualname__ = "_".join(word.replace("-", "m") for word in words)
    return function


class Code:
    """Instructions being written down, on ``lanes`` numbers at once. Of values, ``None`` is zero."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{lanes}f32")

    def splat(self, value: float) -> ir.Value:
        return ir.Constant(self.vector, [value] * self.lanes)

    def at(self, base: ir.Value, offset: int, stride: ir.Value | None = None) -> ir.Value:
        """The address ``base + offset * stride``."""
        step = ir.Constant(INT, offset) if stride is None else self.builder.mul(stride, ir.Constant(INT, offset))
        return self.builder.add(base, step) if offset else base

    def prefetch(self, address: ir.Value) -> None:
        """Ask for the line of the cache there, for the second cache; there need be none."""
        whole = ir.IntType(32)
        place = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, whole, whole, whole])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [place, *(ir.Constant(whole, i) for i in (0, 2, 1))])

    def load(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, self.vector.as_pointer()), align=4)

    def store(self, value: ir.Value | None, address: ir.Value) -> None:
        value = self.splat(0.0) if value is None else value
        self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer()), align=4)

    def widened(self, address: ir.Value, dtype: str) -> ir.Value:
        """A vector of ``dtype`` as fp32."""
        if dtype == "fp32":
            return self.load(address)
        kind = ir.VectorType(ir.IntType(16), self.lanes)
        return self.wide(self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=2), dtype)

    def wide(self, bits: ir.Value, dtype: str) -> ir.Value:
        """What integers as wide as ``dtype`` stand for, as fp32."""
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
        """The integers that stand for fp32 as ``dtype``, to nearest and ties to even; NaN stays NaN."""
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
        return self.load(address), self.load(self.at(address, NUMBER * self.lanes))

    def store_pair(self, pair: Pair, address: ir.Value) -> None:
        self.store(pair[0], address)
        self.store(pair[1], self.at(address, NUMBER * self.lanes))

    def everywhere(self, scalar: ir.Value) -> ir.Value:
        """One number in all lanes."""
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(INT, 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), zeros)

    def broadcast(self, address: ir.Value) -> ir.Value:
        """The number there in all lanes."""
        return self.everywhere(self.builder.load(self.builder.inttoptr(address, FLOAT.as_pointer()), align=4))

    def times(self, factor: float, value: ir.Value | None) -> ir.Value | None:
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
        found = plus
        for x, y in ((c, d), (a, b)):
            if x is not None:
                found = self.builder.fmul(x, y) if found is None else self.builder.call(self.fma, [x, y, found])
        return found


def intrinsic_of(count: int, lanes: int, emit: Callable[[Code, Values], None]) -> Callable[..., None]:
    """An intrinsic of ``count`` integers, 1 to 6, without a result."""

    def generate(context, builder, signature, arguments):
        emit(Code(builder, lanes), arguments)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * count)

    def one(typingctx, a):
        return signature, generate

    def two(typingctx, a, b):
        return signature, generate

    def three(typingctx, a, b, c):
        return signature, generate

    def four(typingctx, a, b, c, d):
        return signature, generate

    def five(typingctx, a, b, c, d, e):
        return signature, generate

    def six(typingctx, a, b, c, d, e, f):
        return signature, generate

    made: Any = {1: one, 2: two, 3: three, 4: four, 5: five, 6: six}[count]
    return intrinsic(made)


@functools.cache
def next_number() -> Callable[..., int]:
    """``(numbers, index)``: an int64 of those at a pointer, which is counted up for all threads at once."""

    def generate(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", place, ir.Constant(INT, 1), "monotonic")

    def made(typingctx, numbers, index):
        return types.int64(types.CPointer(types.int64), types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def number_at() -> Callable[..., int]:
    """``(address, index)``: the int64 there."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], INT.as_pointer())
        return builder.load(builder.gep(place, [arguments[1]]))

    def made(typingctx, address, index):
        return types.int64(types.int64, types.int64), generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def pointer_call() -> Callable[..., None]:
    """``(address, ...)``: calls the compiled function there with the integers that follow.

    What is called so is compiled once, however many functions call it.
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
    """``(f, g, a, b)``: from frequencies k and -k of ``a + ib``, twice frequency k of a and of b."""

    def emit(code: Code, arguments: Values) -> None:
        f, g, a, b = arguments
        (fx, fy), (gx, gy) = code.load_pair(f), code.load_pair(g)
        code.store_pair((code.plus(fx, 1.0, gx), code.plus(fy, -1.0, gy)), a)
        code.store_pair((code.plus(fy, 1.0, gy), code.plus(gx, -1.0, fx)), b)

    return intrinsic_of(4, lanes, emit)


@functools.cache
def join(lanes: int) -> Callable[..., None]:
    """``(f, g, a, b)``: frequencies k and -k of ``a + ib`` from frequency k of a and of b."""

    def emit(code: Code, arguments: Values) -> None:
        f, g, a, b = arguments
        (ax, ay), (bx, by) = code.load_pair(a), code.load_pair(b)
        code.store_pair((code.plus(ax, 1.0, by), code.plus(bx, -1.0, ay)), g)
        code.store_pair((code.plus(ax, -1.0, by), code.plus(ay, 1.0, bx)), f)

    return intrinsic_of(4, lanes, emit)


@functools.cache
def multiply(lanes: int, conjugate: bool) -> Callable[..., None]:
    """``(a, b)``: ``a *= b``, or ``a *= conj(b)``."""

    def emit(code: Code, arguments: Values) -> None:
        a, b = arguments
        code.store_pair(code.product(code.load_pair(a), code.load_pair(b), conjugate), a)

    return intrinsic_of(2, lanes, emit)


@functools.cache
def accumulate(lanes: int) -> Callable[..., None]:
    """``(sum, a, b)``: ``sum += a * conj(b)``."""

    def emit(code: Code, arguments: Values) -> None:
        total, a, b = arguments
        code.store_pair(code.product(code.load_pair(a), code.load_pair(b), True, code.load_pair(total)), total)

    return intrinsic_of(3, lanes, emit)


@functools.cache
def scale(lanes: int) -> Callable[..., None]:
    """``(address, factor)``: a complex vector times the fp32 number at the address ``factor``."""

    def emit(code: Code, arguments: Values) -> None:
        address, factor = arguments
        by = code.broadcast(factor)
        re, im = code.load_pair(address)
        code.store_pair((code.builder.fmul(re, by), code.builder.fmul(im, by)), address)

    return intrinsic_of(2, lanes, emit)


@functools.cache
def zero(lanes: int) -> Callable[..., None]:
    """``(address)``: zeros in one vector, not a complex one."""

    def emit(code: Code, arguments: Values) -> None:
        code.store(None, arguments[0])

    return intrinsic_of(1, lanes, emit)


@functools.cache
def vector_in(lanes: int, dtype: str) -> Callable[..., None]:
    """``(source, target)``: one vector, not a complex one, from neighbouring numbers of ``dtype``."""

    def emit(code: Code, arguments: Values) -> None:
        source, target = arguments
        code.store(code.widened(source, dtype), target)

    return intrinsic_of(2, lanes, emit)


@functools.cache
def vector_out(lanes: int, dtype: str) -> Callable[..., None]:
    """``(target, source)``: the way back."""

    def emit(code: Code, arguments: Values) -> None:
        target, source = arguments
        code.narrow(code.load(source), target, dtype)

    return intrinsic_of(2, lanes, emit)


@functools.cache
def square_in(lanes: int, dtype: str) -> Callable[..., None]:
    """``(source, channel, valid, target, stride)``: ``lanes`` neighbours of each lane, lanes ``channel`` apart.

    They become vectors ``stride`` apart. Lanes from ``valid`` on repeat the last valid one.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, target, stride = arguments
        rows = [code.widened(place, dtype) for place in _lanes(code, source, channel, valid)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i, stride))

    return intrinsic_of(5, lanes, emit)


@functools.cache
def square_out(lanes: int, dtype: str) -> Callable[..., None]:
    """``(target, channel, valid, source, stride)``: the way back; lanes from ``valid`` on write what the last one does.

    So they must hold the same.
    """

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, source, stride = arguments
        rows = [code.load(code.at(source, i, stride)) for i in range(lanes)]
        for row, place in zip(transposed(code, rows), _lanes(code, target, channel, valid), strict=True):
            code.narrow(row, place, dtype)

    return intrinsic_of(5, lanes, emit)


def _lanes(code: Code, base: ir.Value, channel: ir.Value, valid: ir.Value) -> list[ir.Value]:
    """Every lane's address."""
    last = code.builder.sub(valid, ir.Constant(INT, 1))
    found = []
    for i in range(code.lanes):
        own = ir.Constant(INT, i)
        lane = code.builder.select(code.builder.icmp_signed("<", own, last), own, last)
        found.append(code.builder.add(base, code.builder.mul(lane, channel)))
    return found


def transposed(code: Code, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of vectors: each stage turns the digits of row and column by one, log2(lanes) of them swap both."""
    n = code.lanes
    kind = ir.VectorType(ir.IntType(32), n)
    low, high = (
        ir.Constant(kind, [start + i // 2 + n * (i % 2) for i in range(n)]) for start in (0, n // 2)
    )  # fmt: skip
    for _ in range(n.bit_length() - 1):
        pairs = [(rows[i], rows[i + n // 2]) for i in range(n // 2)]
        rows = [code.builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows
