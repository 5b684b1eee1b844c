"""Moves rows of numbers with any strides to vectors that have one number of each channel, and back."""

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
"""The number that is added to the index of a type for a move from vectors to memory."""
LINE = 64
"""Bytes of a cache line on most processors."""


def _short(code: Code, count: ir.Value) -> ir.Value:
    """The mask of the first ``count`` lanes, or of all where there are fewer."""
    b, kind = code.builder, ir.VectorType(ir.IntType(32), code.lanes)
    first_lane = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(count, ir.IntType(32)), ir.Constant(INT, 0))
    counts = b.shuffle_vector(first_lane, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * code.lanes))
    return b.icmp_signed("<", ir.Constant(kind, list(range(code.lanes))), counts)


def _memory(code: Code, dtype: str) -> tuple[ir.Type, str]:
    """The type of vectors of integers as wide as ``dtype``, and its name in LLVM's intrinsics."""
    bits = 8 * SIZES[dtype]
    return ir.VectorType(ir.IntType(bits), code.lanes), f"v{code.lanes}i{bits}"


def _read(code: Code, address: ir.Value, dtype: str, mask: ir.Value) -> ir.Value:
    """Load the lanes of ``mask`` as fp32; the others become zero without being read."""
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
    """Store the lanes of ``mask`` as ``dtype``."""
    kind, name = _memory(code, dtype)
    pointer, size = kind.as_pointer(), SIZES[dtype]
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(ir.VoidType(), [kind, pointer, ir.IntType(32), mask.type]),
        f"llvm.masked.store.{name}.p0",
    )  # fmt: skip
    align = ir.Constant(ir.IntType(32), size)
    code.builder.call(function, [code.rounded(value, dtype), code.builder.inttoptr(address, pointer), align, mask])


def _masks(code: Code, valid: ir.Value, columns: ir.Value) -> list[ir.Value]:
    """The mask of each channel's numbers: the first ``columns``, but none of channels from ``valid`` on."""
    b, mask = code.builder, _short(code, columns)
    none = ir.Constant(mask.type, [0] * code.lanes)
    return [b.select(b.icmp_signed("<", ir.Constant(INT, i), valid), mask, none) for i in range(code.lanes)]


@functools.cache
def _square_in(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(source, channel, valid, columns, target)``, as :func:`vectors.square_in` for fewer columns than lanes.

    All ``lanes`` vectors are written: those from ``columns`` on are zero, and so are lanes from ``valid`` on.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, columns, target = arguments
        masks = _masks(code, valid, columns)
        rows = [_read(code, code.at(source, i, channel), dtype, mask) for i, mask in enumerate(masks)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i * NUMBER * lanes))

    return intrinsic_of(lanes, emit)


@functools.cache
def _square_out(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(target, channel, valid, columns, source)``, the inverse, for any number of columns up to lanes."""

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, columns, source = arguments
        rows = [code.load(code.at(source, i * NUMBER * lanes)) for i in range(lanes)]
        masks = _masks(code, valid, columns)
        for i, (row, mask) in enumerate(zip(transposed(code, rows), masks, strict=True)):
            _write(code, row, code.at(target, i, channel), dtype, mask)

    return intrinsic_of(lanes, emit)


@functools.cache
def _short_in(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(source, valid, target)``, which loads a vector of neighbouring channels, zero from ``valid`` on."""

    def emit(code: Code, arguments: Values) -> None:
        source, valid, target = arguments
        code.store(_read(code, source, dtype, _short(code, valid)), target)

    return intrinsic_of(lanes, emit)


@functools.cache
def _short_out(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes ``(target, valid, source)``, the inverse, which stores the first ``valid`` channels."""

    def emit(code: Code, arguments: Values) -> None:
        target, valid, source = arguments
        _write(code, code.load(source), target, dtype, _short(code, valid))

    return intrinsic_of(lanes, emit)


@functools.cache
def _row_in(lanes: int, dtype: str) -> Callable[..., None]:
    """Makes the function of :func:`rows` that moves numbers of ``dtype`` to vectors."""
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
    """Makes the function of :func:`rows` that moves vectors to numbers of ``dtype``."""
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
    """Makes ``(target, source)``, which adds the vector at ``source`` to that at ``target``."""

    def emit(code: Code, arguments: Values) -> None:
        target, source = arguments
        code.store(code.builder.fadd(code.load(target), code.load(source)), target)

    return intrinsic_of(lanes, emit)


def rows(lanes: int) -> Callable[..., None]:
    """Makes ``(kind, there, step, channel, valid, count, here, line)``, which moves rows to vectors, or back.

    ``kind`` is the index of the type in :data:`~tilewise.kernels.cpu.moves.DTYPES`, plus :data:`BACK` for a move from
    vectors to memory. In memory, at ``there``, each channel has ``count`` numbers ``step`` bytes apart, and channels
    are ``channel`` bytes apart. ``here`` is the address of the vectors. On the way in, lanes from ``valid`` on get
    numbers of another channel or zeros, and up to ``lanes`` vectors are written even where ``count`` is less. As many
    are read on the way back. Where ``line`` is not 0, the way back adds to the numbers in memory; ``line`` is then the
    address of scratch for as many vectors.
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
    """Makes ``(address)``, which prefetches a line of memory to be written."""

    def emit(code: Code, arguments: Values) -> None:
        b, kind = code.builder, ir.IntType(32)
        pointer = b.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(ir.VoidType(), [pointer.type, kind, kind, kind]), "llvm.prefetch.p0"
        )
        b.call(function, [pointer, ir.Constant(kind, 1), ir.Constant(kind, 3), ir.Constant(kind, 1)])

    return intrinsic_of(1, emit)


@functools.cache
def row_awaited(lanes: int) -> Callable[..., None]:
    """Makes ``(size, there, step, channel, valid, count)``, which prefetches a row that is to be written soon.

    Stores to lines that are in no cache wait for each other. ``size`` is the number of bytes of a number.
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
    """Makes ``(address, count)``, which sets ``count`` vectors to zero."""
    zero, vector = vectors.zero(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(count):
            zero(address + i * vector)

    return run


@functools.cache
def region_in(lanes: int) -> Callable[..., None]:
    """Makes ``(call, dtype, there, strides, channel, valid, sizes, starts, extents, shape, target, line)``.

    It copies a box of a tensor to vectors at ``target``. The box begins at ``starts`` and has the sizes ``extents``;
    elements outside of the tensor, whose sizes are ``sizes``, become zero. All these have a number for each axis, and
    ``strides`` are in bytes. ``shape`` is ``(modulus, part, row, plane)`` and says where vectors lie: columns with the
    same remainder by ``modulus`` are neighbours, those of the next remainder begin ``part`` bytes later, and rows and
    planes are ``row`` and ``plane`` bytes apart. ``line`` is scratch for one row. Up to ``lanes`` vectors after the box
    are written too. ``call`` is the address of the compiled function of :func:`rows`.
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
