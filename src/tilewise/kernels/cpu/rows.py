"""Rows of numbers to vectors of one number of each channel, and back, whatever their strides and however few."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.moves import DTYPES
from tilewise.kernels.cpu.vectors import INT, NUMBER, SIZES, Code, Values, compiled, intrinsic_of, named, transposed

__all__ = ["BACK", "added", "region_in", "row_awaited", "rows", "zeros"]

BACK = len(DTYPES)
"""What is added to a dtype's number on the way back."""
LINE = 64
"""Bytes that caches take at once, on most processors."""


def _short(code: Code, count: ir.Value) -> ir.Value:
    """A mask of the first ``count`` lanes, or of all."""
    b, kind = code.builder, ir.VectorType(ir.IntType(32), code.lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(count, ir.IntType(32)), ir.Constant(INT, 0))
    whole = b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * code.lanes))
    return b.icmp_signed("<", ir.Constant(kind, list(range(code.lanes))), whole)


def _memory(code: Code, dtype: str) -> tuple[ir.Type, str]:
    """Vectors of integers as wide as ``dtype``, and what LLVM calls them."""
    bits = 8 * SIZES[dtype]
    return ir.VectorType(ir.IntType(bits), code.lanes), f"v{code.lanes}i{bits}"


def _read(code: Code, address: ir.Value, dtype: str, mask: ir.Value) -> ir.Value:
    """Those of the mask as fp32; zeros elsewhere, of which nothing is read."""
    kind, name = _memory(code, dtype)
    pointer, size = kind.as_pointer(), SIZES[dtype]
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(kind, [pointer, ir.IntType(32), mask.type, kind]),
        f"llvm.masked.load.{name}.p0",
    )  # fmt: skip
    align = ir.Constant(ir.IntType(32), size)
    zeros = ir.Constant(kind, [0] * code.lanes)
    return code.wide(code.builder.call(function, [code.builder.inttoptr(address, pointer), align, mask, zeros]), dtype)


def _write(code: Code, value: ir.Value, address: ir.Value, dtype: str, mask: ir.Value) -> None:
    """Those of the mask as ``dtype``; nothing else is written."""
    kind, name = _memory(code, dtype)
    pointer, size = kind.as_pointer(), SIZES[dtype]
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(ir.VoidType(), [kind, pointer, ir.IntType(32), mask.type]),
        f"llvm.masked.store.{name}.p0",
    )  # fmt: skip
    align = ir.Constant(ir.IntType(32), size)
    code.builder.call(function, [code.rounded(value, dtype), code.builder.inttoptr(address, pointer), align, mask])


def _masks(code: Code, valid: ir.Value, columns: ir.Value) -> list[ir.Value]:
    """Of each channel's neighbours: the first ``columns``, of channels from ``valid`` on none."""
    b, mask = code.builder, _short(code, columns)
    none = ir.Constant(mask.type, [0] * code.lanes)
    return [b.select(b.icmp_signed("<", ir.Constant(INT, i), valid), mask, none) for i in range(code.lanes)]


@functools.cache
def _square_in(lanes: int, dtype: str) -> Callable[..., None]:
    """``(source, channel, valid, columns, target)``: :func:`vectors.square_in` of fewer columns than lanes.

    All ``lanes`` vectors are written, zero from ``columns`` on and in lanes from ``valid`` on.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, columns, target = arguments
        masks = _masks(code, valid, columns)
        rows = [_read(code, code.at(source, i, channel), dtype, mask) for i, mask in enumerate(masks)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i * NUMBER * lanes))

    return intrinsic_of(5, lanes, emit)


@functools.cache
def _square_out(lanes: int, dtype: str) -> Callable[..., None]:
    """``(target, channel, valid, columns, source)``: the way back, of any number of columns up to lanes."""

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, columns, source = arguments
        rows = [code.load(code.at(source, i * NUMBER * lanes)) for i in range(lanes)]
        masks = _masks(code, valid, columns)
        for i, (row, mask) in enumerate(zip(transposed(code, rows), masks, strict=True)):
            _write(code, row, code.at(target, i, channel), dtype, mask)

    return intrinsic_of(5, lanes, emit)


@functools.cache
def _short_in(lanes: int, dtype: str) -> Callable[..., None]:
    """``(source, valid, target)``: a vector of neighbouring channels, zero from ``valid`` on."""

    def emit(code: Code, arguments: Values) -> None:
        source, valid, target = arguments
        code.store(_read(code, source, dtype, _short(code, valid)), target)

    return intrinsic_of(3, lanes, emit)


@functools.cache
def _short_out(lanes: int, dtype: str) -> Callable[..., None]:
    """``(target, valid, source)``: the way back."""

    def emit(code: Code, arguments: Values) -> None:
        target, valid, source = arguments
        _write(code, code.load(source), target, dtype, _short(code, valid))

    return intrinsic_of(3, lanes, emit)


@functools.cache
def _row_in(lanes: int, dtype: str) -> Callable[..., None]:
    square, part = vectors.square_in(lanes, dtype), _square_in(lanes, dtype)
    whole, short = vectors.vector_in(lanes, dtype), _short_in(lanes, dtype)
    element, zero = vectors.vector_in(1, dtype), vectors.zero(lanes)
    size, vector = SIZES[dtype], NUMBER * lanes

    @compiled(lanes, dtype)
    def run(there, step, channel, valid, count, here):
        if channel == size and valid == lanes:
            for i in range(count):
                whole(there + i * step, here + i * vector)
        elif channel == size:
            for i in range(count):
                short(there + i * step, valid, here + i * vector)
        elif step == size and count >= lanes:
            for i in range(0, count, lanes):
                # The last square overlaps the one before where they do not fit evenly.
                at = min(i, count - lanes)
                square(there + at * size, channel, valid, here + at * vector, vector)
        elif step == size:
            part(there, channel, valid, count, here)
        else:
            for i in range(count):
                zero(here + i * vector)
                for lane in range(valid):
                    element(there + i * step + lane * channel, here + i * vector + lane * NUMBER)

    return run


@functools.cache
def _row_out(lanes: int, dtype: str) -> Callable[..., None]:
    part, whole, short = _square_out(lanes, dtype), vectors.vector_out(lanes, dtype), _short_out(lanes, dtype)
    element = vectors.vector_out(1, dtype)
    size, vector = SIZES[dtype], NUMBER * lanes

    @compiled(lanes, dtype)
    def run(there, step, channel, valid, count, here):
        if channel == size and valid == lanes:
            for i in range(count):
                whole(there + i * step, here + i * vector)
        elif channel == size:
            for i in range(count):
                short(there + i * step, valid, here + i * vector)
        elif step == size:
            for i in range(0, count, lanes):
                part(there + i * size, channel, valid, count - i, here + i * vector)
        else:
            for i in range(count):
                for lane in range(valid):
                    element(there + i * step + lane * channel, here + i * vector + lane * NUMBER)

    return run


@functools.cache
def added(lanes: int) -> Callable[..., None]:
    """``(target, source)``: one vector added to another."""

    def emit(code: Code, arguments: Values) -> None:
        target, source = arguments
        code.store(code.builder.fadd(code.load(target), code.load(source)), target)

    return intrinsic_of(2, lanes, emit)


def rows(lanes: int) -> Callable[..., None]:
    """``(kind, there, step, channel, valid, count, here, line)``: numbers of each channel to vectors, or back.

    ``kind`` is the number of the dtype in :data:`~tilewise.kernels.cpu.moves.DTYPES`, on the way back :data:`BACK`
    more. The ``count`` numbers lie ``step`` bytes apart, channels ``channel`` bytes. On the way in, lanes from
    ``valid`` on get numbers of another channel or zeros, and up to ``lanes`` vectors are written even where ``count``
    is less; so many are read on the way back. There, where ``line`` is not 0, what is in memory is added; it is scratch
    for as many.
    """
    in32, in_b16, in16 = (_row_in(lanes, dtype) for dtype in DTYPES)
    out32, out_b16, out16 = (_row_out(lanes, dtype) for dtype in DTYPES)
    add, vector = added(lanes), NUMBER * lanes

    def run(kind, there, step, channel, valid, count, here, line):
        dtype, taken = kind % BACK, here if kind < BACK else line
        if taken != 0:
            if dtype == 0:
                in32(there, step, channel, valid, count, taken)
            elif dtype == 1:
                in_b16(there, step, channel, valid, count, taken)
            else:
                in16(there, step, channel, valid, count, taken)
        if kind >= BACK:
            if line != 0:
                for i in range(count):
                    add(here + i * vector, line + i * vector)
            if dtype == 0:
                out32(there, step, channel, valid, count, here)
            elif dtype == 1:
                out_b16(there, step, channel, valid, count, here)
            else:
                out16(there, step, channel, valid, count, here)

    return named(run, lanes)


@functools.cache
def _awaited() -> Callable[..., None]:
    """``(address)``: has a line of memory fetched to be written, without waiting for it."""

    def emit(code: Code, arguments: Values) -> None:
        b, kind = code.builder, ir.IntType(32)
        pointer = b.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(ir.VoidType(), [pointer.type, kind, kind, kind]), "llvm.prefetch.p0"
        )
        b.call(function, [pointer, ir.Constant(kind, 1), ir.Constant(kind, 3), ir.Constant(kind, 1)])

    return intrinsic_of(1, 1, emit)


@functools.cache
def row_awaited(lanes: int) -> Callable[..., None]:
    """``(size, there, step, channel, valid, count)``: has a row fetched that is to be written soon.

    Stores of lines that are in no cache wait for each other. ``size``: bytes of a number.
    """
    line = _awaited()

    @compiled(lanes)
    def run(size, there, step, channel, valid, count):
        if channel == size:
            for i in range(count):
                line(there + i * step)
        elif step == size:
            for lane in range(valid):
                for i in range(0, count * size + LINE - 1, LINE):
                    line(there + lane * channel + min(i, count * size - 1))

    return run


@functools.cache
def zeros(lanes: int) -> Callable[..., None]:
    """``(address, count)``: zeros in ``count`` vectors."""
    zero, vector = vectors.zero(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(count):
            zero(address + i * vector)

    return run


@functools.cache
def region_in(lanes: int) -> Callable[..., None]:
    """``(call, dtype, there, strides, channel, valid, sizes, starts, extents, shape, target, line)``: a box, its rim.

    The box of ``extents`` from ``starts`` on goes to ``target``, zero where it leaves the tensor, of whose elements
    those before ``sizes`` are read; each of the three is by axis, ``strides`` in bytes. ``shape`` is ``(modulus, part,
    row, plane)``: vectors of columns that are equal by the modulus are neighbours, in parts of ``part`` bytes; rows are
    ``row`` and planes ``plane`` bytes apart. ``line`` is scratch for one row. Up to ``lanes`` vectors behind the box
    are written too. ``call`` is the address of :func:`rows`, compiled.
    """
    to, zero, copied, vector = vectors.pointer_call(), zeros(lanes), vectors.vector_in(lanes, "fp32"), NUMBER * lanes

    @compiled(lanes)
    def run(call, dtype, there, strides, channel, valid, sizes, starts, extents, shape, target, line):
        modulus, part, row, plane = shape
        first, last = max(0, -starts[2]), min(extents[2], sizes[2] - starts[2])
        for i in range(extents[0]):
            for j in range(extents[1]):
                here, d, h = target + i * plane + j * row, starts[0] + i, starts[1] + j
                if d < 0 or d >= sizes[0] or h < 0 or h >= sizes[1] or first >= last:
                    zero(here, row // vector)
                    continue
                source = there + d * strides[0] + h * strides[1] + (starts[2] + first) * strides[2]
                if modulus == 1:
                    zero(here, first)
                    to(call, dtype, source, strides[2], channel, valid, last - first, here + first * vector, 0)
                    zero(here + last * vector, extents[2] - last)
                    continue
                zero(here, row // vector)
                to(call, dtype, source, strides[2], channel, valid, last - first, line, 0)
                for k in range(first, last):
                    copied(line + (k - first) * vector, here + k % modulus * part + k // modulus * vector)

    return run
