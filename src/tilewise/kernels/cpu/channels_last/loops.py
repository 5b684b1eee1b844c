"""Loops and numbers in memory for kernels that are written as LLVM's instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of

__all__ = [
    "PLACE", "advanced", "constant", "copied", "either", "interleaved", "looped", "number", "put",
    "variable",
]  # fmt: skip

PLACE = 8
"""Bytes of an address or another integer in memory."""


def constant(value: int) -> ir.Value:
    """A 64-bit integer."""
    return ir.Constant(INT, value)


def number(code: Code, address: ir.Value, index: int = 0) -> ir.Value:
    """The int64 number ``index`` at ``address``."""
    return code.builder.load(code.builder.inttoptr(code.at(address, index * PLACE), INT.as_pointer()))


def variable(code: Code, first: ir.Value) -> ir.Value:
    """A place on the stack that holds ``first``. LLVM keeps such places in registers."""
    place = cgutils.alloca_once(code.builder, first.type)
    code.builder.store(first, place)
    return place


def advanced(code: Code, place: ir.Value, step: int) -> None:
    """Add ``step`` to the integer at ``place``."""
    code.builder.store(code.at(code.builder.load(place), step), place)


@contextmanager
def looped(code: Code, count: ir.Value) -> Iterator[None]:
    """Write instructions that run ``count`` times, which may be 0."""
    b = code.builder
    left = variable(code, count)
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    b.cbranch(b.icmp_signed(">", b.load(left), constant(0)), body, after)
    b.position_at_end(body)
    yield
    advanced(code, left, -1)
    b.branch(head)
    b.position_at_end(after)


def either(code: Code, test: ir.Value, write: Callable[[bool], None]) -> None:
    """Write two branches, ``write(True)`` where ``test`` holds and ``write(False)`` where it does not."""
    b = code.builder
    true, false, after = (b.append_basic_block(name) for name in ("true", "false", "after"))
    b.cbranch(test, true, false)
    for block, value in ((true, True), (false, False)):
        b.position_at_end(block)
        write(value)
        b.branch(after)
    b.position_at_end(after)


@functools.cache
def put() -> Callable[..., None]:
    """Makes ``(address, value)``, which writes an int64."""

    def emit(code: Code, arguments: Values) -> None:
        address, value = arguments
        code.builder.store(value, code.builder.inttoptr(address, INT.as_pointer()))

    return intrinsic_of(1, emit)


@functools.cache
def copied(lanes: int) -> Callable[..., None]:
    """Makes ``(source, target, count)``, which copies ``count`` fp32 numbers; those of no source, 0, are zeros."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, count = arguments
        b, size = code.builder, NUMBER * lanes
        given = b.icmp_signed("!=", source, constant(0))
        whole = b.udiv(count, constant(lanes))
        place = variable(code, constant(0))
        mask = masks.below(code, b.sub(count, b.mul(whole, constant(lanes))))

        def write(reads: bool) -> None:
            with looped(code, whole):
                at = b.load(place)
                code.store(code.load(b.add(source, at)) if reads else None, b.add(target, at))
                advanced(code, place, size)
            at = b.load(place)
            value = masks.load(code, b.add(source, at), mask) if reads else code.splat(0.0)
            masks.store(code, value, b.add(target, at), mask)

        either(code, given, write)

    return intrinsic_of(lanes, emit)


COLOURS = 3
"""The channels of images whose planes are interleaved by vectors."""


@functools.cache
def interleaved(lanes: int) -> Callable[..., None]:
    """Makes ``(source, apart, target, channels, count)``, which makes neighbours of the channels of ``count`` pixels.

    The fp32 numbers of a channel are neighbours at ``source``, and those of the next channel ``apart`` bytes further.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, apart, target, channels, count = arguments
        b, size = code.builder, NUMBER * lanes
        of_colours = b.icmp_signed("==", channels, constant(COLOURS))
        whole = b.select(of_colours, b.udiv(count, constant(lanes)), constant(0))
        read, written = variable(code, source), variable(code, target)
        with looped(code, whole):
            planes = [code.load(code.at(b.load(read), i, apart)) for i in range(COLOURS)]
            for j, vector in enumerate(_of_three(code, planes)):
                code.store(vector, code.at(b.load(written), j * size))
            advanced(code, read, size)
            advanced(code, written, COLOURS * size)
        single = Code(b, 1)
        with looped(code, b.sub(count, b.mul(whole, constant(lanes)))):
            place = variable(code, b.load(read))
            with looped(code, channels):
                single.store(single.load(b.load(place)), b.load(written))
                b.store(b.add(b.load(place), apart), place)
                advanced(code, written, NUMBER)
            advanced(code, read, NUMBER)

    return intrinsic_of(lanes, emit)


def _of_three(code: Code, planes: list[ir.Value]) -> Iterator[ir.Value]:
    """The vectors of three that follow each other when their lanes are taken in turns."""
    b, lanes = code.builder, code.lanes

    def mask(indices: list[int]) -> ir.Value:
        kind = ir.IntType(32)
        return ir.Constant(ir.VectorType(kind, lanes), [ir.Constant(kind, index) for index in indices])

    for j in range(COLOURS):
        places = [divmod(j * lanes + i, COLOURS) for i in range(lanes)]
        # Of two planes first; where the third one goes any lane will do.
        pair = [lane + lanes * plane if plane < COLOURS - 1 else 0 for lane, plane in places]
        both = b.shuffle_vector(planes[0], planes[1], mask(pair))
        last = [i if plane < COLOURS - 1 else lanes + lane for i, (lane, plane) in enumerate(places)]
        yield b.shuffle_vector(both, planes[2], mask(last))
