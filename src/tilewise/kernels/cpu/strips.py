"""Pieces of images as vectors of ``lanes`` channels, and back, whatever their strides and however few there are."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, compiled, intrinsic_of, transposed

__all__ = ["strip_in", "strip_out"]


@functools.cache
def strip_in(lanes: int) -> Callable[..., None]:
    """``(source, step, channel, valid, count, target)``: ``count`` neighbours of ``lanes`` channels, to vectors.

    Neighbours lie ``step`` bytes apart, channels ``channel``; from ``valid`` on they are zero.
    """
    square, whole, apart = _square_in(lanes), _whole_in(lanes), _apart_in(lanes)
    size = NUMBER * lanes

    @compiled(lanes)
    def run(source, step, channel, valid, count, target):
        if step == NUMBER:
            for i in range(0, count, lanes):
                square(source + i * step, channel, valid, count - i, target + i * size)
        elif channel == NUMBER:
            for i in range(count):
                whole(source + i * step, valid, target + i * size)
        else:
            for i in range(count):
                apart(source + i * step, channel, valid, target + i * size)

    return run


@functools.cache
def strip_out(lanes: int) -> Callable[..., None]:
    """``(target, step, channel, valid, count, source)``: the way back, of ``valid`` channels alone.

    Vectors up to the next multiple of ``lanes`` are read.
    """
    square, whole, apart = _square_out(lanes), _whole_out(lanes), _apart_out(lanes)
    size = NUMBER * lanes

    @compiled(lanes)
    def run(target, step, channel, valid, count, source):
        if step == NUMBER:
            for i in range(0, count, lanes):
                square(target + i * step, channel, valid, count - i, source + i * size)
        elif channel == NUMBER:
            for i in range(count):
                whole(target + i * step, valid, source + i * size)
        else:
            for i in range(count):
                apart(target + i * step, channel, valid, source + i * size)

    return run


def _below(code: Code, count: ir.Value) -> ir.Value:
    """The lanes below ``count``."""
    kind = ir.VectorType(INT, code.lanes)
    one = code.builder.insert_element(ir.Constant(kind, ir.Undefined), count, ir.Constant(INT, 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), [0] * code.lanes)
    every = code.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)
    return code.builder.icmp_signed("<", ir.Constant(kind, list(range(code.lanes))), every)


def _none(code: Code) -> ir.Value:
    return ir.Constant(ir.VectorType(ir.IntType(1), code.lanes), [0] * code.lanes)


def _called(code: Code, name: str, result: ir.Type, arguments: Values) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.masked.{name}")
    return code.builder.call(function, arguments)


ALIGN = ir.Constant(ir.IntType(32), NUMBER)


def _load(code: Code, address: ir.Value, mask: ir.Value) -> ir.Value:
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    return _called(code, f"load.v{code.lanes}f32.p0", code.vector, [place, ALIGN, mask, code.splat(0.0)])


def _store(code: Code, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
    place = code.builder.inttoptr(address, code.vector.as_pointer())
    _called(code, f"store.v{code.lanes}f32.p0", ir.VoidType(), [value, place, ALIGN, mask])


def _rows(
    code: Code, base: ir.Value, channel: ir.Value, valid: ir.Value, count: ir.Value
) -> list[tuple[ir.Value, ir.Value]]:
    """Every channel's address, and which of its numbers are there."""
    b, mask, found = code.builder, _below(code, count), []
    for i in range(code.lanes):
        is_one = b.icmp_signed("<", ir.Constant(INT, i), valid)
        found.append((code.at(base, i, channel), b.select(is_one, mask, _none(code))))
    return found


@functools.cache
def _square_in(lanes: int) -> Callable[..., None]:
    """``(source, channel, valid, count, target)``."""

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, count, target = arguments
        rows = [_load(code, place, mask) for place, mask in _rows(code, source, channel, valid, count)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i * NUMBER * lanes))

    return intrinsic_of(5, lanes, emit)


@functools.cache
def _square_out(lanes: int) -> Callable[..., None]:
    """``(target, channel, valid, count, source)``."""

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, count, source = arguments
        rows = transposed(code, [code.load(code.at(source, i * NUMBER * lanes)) for i in range(lanes)])
        for row, (place, mask) in zip(rows, _rows(code, target, channel, valid, count), strict=True):
            _store(code, row, place, mask)

    return intrinsic_of(5, lanes, emit)


@functools.cache
def _whole_in(lanes: int) -> Callable[..., None]:
    """``(source, valid, target)``."""

    def emit(code: Code, arguments: Values) -> None:
        source, valid, target = arguments
        code.store(_load(code, source, _below(code, valid)), target)

    return intrinsic_of(3, lanes, emit)


@functools.cache
def _whole_out(lanes: int) -> Callable[..., None]:
    """``(target, valid, source)``."""

    def emit(code: Code, arguments: Values) -> None:
        target, valid, source = arguments
        _store(code, code.load(source), target, _below(code, valid))

    return intrinsic_of(3, lanes, emit)


def _places(code: Code, base: ir.Value, channel: ir.Value) -> ir.Value:
    """Pointers to one number of every channel."""
    found = ir.Constant(ir.VectorType(INT, code.lanes), ir.Undefined)
    for i in range(code.lanes):
        found = code.builder.insert_element(found, code.at(base, i, channel), ir.Constant(INT, i))
    return code.builder.inttoptr(found, ir.VectorType(vectors.FLOAT.as_pointer(), code.lanes))


@functools.cache
def _apart_in(lanes: int) -> Callable[..., None]:
    """``(source, channel, valid, target)``."""

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, target = arguments
        places, mask = _places(code, source, channel), _below(code, valid)
        name = f"gather.v{lanes}f32.v{lanes}p0"
        code.store(_called(code, name, code.vector, [places, ALIGN, mask, code.splat(0.0)]), target)

    return intrinsic_of(4, lanes, emit)


@functools.cache
def _apart_out(lanes: int) -> Callable[..., None]:
    """``(target, channel, valid, source)``."""

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, source = arguments
        places, mask = _places(code, target, channel), _below(code, valid)
        _called(code, f"scatter.v{lanes}f32.v{lanes}p0", ir.VoidType(), [code.load(source), places, ALIGN, mask])

    return intrinsic_of(4, lanes, emit)
