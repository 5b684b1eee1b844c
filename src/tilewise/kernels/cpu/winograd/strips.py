"""Copies pieces of images with any strides to vectors of ``lanes`` channels, and back, finished or as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import Move, activation_words, moved
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, compiled, intrinsic_of, named, transposed

__all__ = ["finished_out", "strip_in", "strip_out"]


@functools.cache
def strip_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, step, channel, valid, count, target)``, which copies ``count`` numbers of each lane to vectors.

    The lanes are channels, which are ``channel`` bytes apart; lanes from ``valid`` on become zero. Numbers of a channel
    are ``step`` bytes apart.
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
def strip_out(lanes: int, activation: str | None = None) -> Callable[..., None]:
    """Makes ``(target, step, channel, valid, count, source, added)``, the inverse, for the first ``valid`` channels.

    Vectors up to the next multiple of ``lanes`` are read. ``added`` is an empty tuple, or with an ``activation``
    ``(bias, adds, behind)``: the address of a vector that is added to all, whether a residual is added after it, and by
    how many bytes that lies behind the target.
    """
    square, whole, scattered = (kind(lanes, activation) for kind in (_square_out, _whole_out, _apart_out))
    size = NUMBER * lanes

    @compiled(lanes, *activation_words(activation))
    def run(target, step, channel, valid, count, source, added):
        if step == NUMBER:
            for i in range(0, count, lanes):
                square(target + i * step, channel, valid, count - i, source + i * size, *added)
        elif channel == NUMBER:
            for i in range(count):
                whole(target + i * step, valid, source + i * size, *added)
        else:
            for i in range(count):
                scattered(target + i * step, channel, valid, source + i * size, *added)

    return run


def finished_out(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(target, step, channel, valid, count, source, bias, adds, behind)``, :func:`strip_out` that finishes."""
    put = strip_out(lanes, activation)

    def run(target, step, channel, valid, count, source, bias, adds, behind):
        put(target, step, channel, valid, count, source, (bias, adds, behind))

    return named(run, lanes, *activation_words(activation))


def _with_bias(code: Code, values: list[ir.Value], added: Values) -> list[ir.Value]:
    """Vectors, with the bias where ``added`` has one."""
    if not added:
        return values
    bias = code.load(added[0])
    return [code.builder.fadd(value, bias) for value in values]


def _rows(
    code: Code, base: ir.Value, channel: ir.Value, valid: ir.Value, count: ir.Value
) -> list[tuple[ir.Value, ir.Value]]:
    """The address of every channel, and the mask of its first ``count`` numbers; no lane from ``valid`` on."""
    b, mask, addresses_and_masks = code.builder, masks.below(code, count), []
    for i in range(code.lanes):
        is_valid = b.icmp_signed("<", ir.Constant(INT, i), valid)
        addresses_and_masks.append((code.at(base, i, channel), b.select(is_valid, mask, masks.none(code))))
    return addresses_and_masks


@functools.cache
def _square_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, channel, valid, count, target)``, which transposes up to ``lanes`` neighbouring numbers."""

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, count, target = arguments
        rows = [masks.load(code, place, mask) for place, mask in _rows(code, source, channel, valid, count)]
        for i, row in enumerate(transposed(code, rows)):
            code.store(row, code.at(target, i * NUMBER * lanes))

    return intrinsic_of(lanes, emit)


@functools.cache
def _square_out(lanes: int, activation: str | None) -> Callable[..., None]:
    """Makes ``(target, channel, valid, count, source, ...)``, the inverse of :func:`_square_in`.

    What follows is what :func:`strip_out` adds.
    """

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, count, source, *added = arguments
        vectors = [code.load(code.at(source, i * NUMBER * lanes)) for i in range(lanes)]
        rows = transposed(code, _with_bias(code, vectors, added))
        places = zip(rows, _rows(code, target, channel, valid, count), strict=True)
        moves = [Move.side_by_side(code, row, place, mask) for row, (place, mask) in places]
        moved(code, activation, added[1:], moves)

    return intrinsic_of(lanes, emit)


@functools.cache
def _whole_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, valid, target)``, which loads a vector of neighbouring channels."""

    def emit(code: Code, arguments: Values) -> None:
        source, valid, target = arguments
        code.store(masks.load(code, source, masks.below(code, valid)), target)

    return intrinsic_of(lanes, emit)


@functools.cache
def _whole_out(lanes: int, activation: str | None) -> Callable[..., None]:
    """Makes ``(target, valid, source, ...)``, the inverse of :func:`_whole_in`."""

    def emit(code: Code, arguments: Values) -> None:
        target, valid, source, *added = arguments
        (value,) = _with_bias(code, [code.load(source)], added)
        moved(code, activation, added[1:], [Move.side_by_side(code, value, target, masks.below(code, valid))])

    return intrinsic_of(lanes, emit)


@functools.cache
def _apart_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, channel, valid, target)``, which loads a vector of channels that are ``channel`` bytes apart."""

    def emit(code: Code, arguments: Values) -> None:
        source, channel, valid, target = arguments
        code.store(masks.gather(code, source, channel, masks.below(code, valid)), target)

    return intrinsic_of(lanes, emit)


@functools.cache
def _apart_out(lanes: int, activation: str | None) -> Callable[..., None]:
    """Makes ``(target, channel, valid, source, ...)``, the inverse of :func:`_apart_in`."""

    def emit(code: Code, arguments: Values) -> None:
        target, channel, valid, source, *added = arguments
        (value,) = _with_bias(code, [code.load(source)], added)
        moved(code, activation, added[1:], [Move.apart(code, value, target, channel, masks.below(code, valid))])

    return intrinsic_of(lanes, emit)
