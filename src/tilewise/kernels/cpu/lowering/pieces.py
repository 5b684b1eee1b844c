"""Copies pieces of planes with any strides to lines of neighbours, back, or transposed.

Numbers next to a piece are neither read nor written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import Move, activation_words, moved
from tilewise.kernels.cpu.channels_last.loops import constant, either
from tilewise.kernels.cpu.rows import added
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, compiled, intrinsic_of, named, transposed

__all__ = ["ADDED", "FILLED", "IN", "OUT", "TURNED", "ZERO", "finished_pieces", "pieces"]

IN, OUT, TURNED, ZERO, ADDED, FILLED = range(6)
"""The kinds of :func:`pieces`."""
STEPS = (2, 4)
"""The distances, in numbers, at which it is faster to load whole vectors than one number at a time."""


def pieces(lanes: int) -> Callable[..., None]:
    """Makes ``(kind, source, apart, step, rows, columns, left, right, target, to_apart, to_step)``.

    It moves a piece of a plane. In the source rows are ``apart`` bytes apart and numbers of a row ``step`` bytes; in
    the target it is ``to_apart`` and ``to_step``. The kinds are:

    * ``IN``: copy to a target whose numbers are neighbours. Numbers before ``left`` and from ``right`` on are not in
      memory, and become zero.
    * ``OUT``: copy from a source whose numbers are neighbours.
    * ``TURNED``: transpose. Numbers of a row are neighbours in the source, and numbers of a column in the target, whose
      columns are ``to_apart`` bytes apart.
    * ``ZERO``: set neighbours in the target to zero.
    * ``ADDED``: add whole vectors of neighbours to those of the target.
    * ``FILLED``: set whole vectors of neighbours in a row of the target to the first number of the source's row.
    """
    window, spread, zero, square = _window_in(lanes), _line_out(lanes), _zero(lanes), _square(lanes)
    plus, fill = added(lanes), _fill(lanes)

    def run(kind, source, apart, step, rows, columns, left, right, target, to_apart, to_step):
        if kind == IN:
            for i in range(rows):
                window(source + i * apart, step, left, right, columns, target + i * to_apart)
        elif kind == OUT:
            for i in range(rows):
                spread(target + i * to_apart, to_step, columns, source + i * apart)
        elif kind == TURNED:
            for i in range(0, rows, lanes):
                for j in range(0, columns, lanes):
                    square(
                        source + i * apart + j * NUMBER, apart, rows - i, columns - j,
                        target + j * to_apart + i * NUMBER, to_apart,
                    )  # fmt: skip
        elif kind == ADDED:
            for i in range(rows):
                for j in range(0, columns, lanes):
                    plus(target + i * to_apart + j * NUMBER, source + i * apart + j * NUMBER)
        elif kind == FILLED:
            for i in range(rows):
                for j in range(0, columns, lanes):
                    fill(target + i * to_apart + j * NUMBER, source + i * apart)
        else:
            for i in range(rows):
                for j in range(0, columns, lanes):
                    zero(target + i * to_apart + j * NUMBER, columns - j)

    return named(run, lanes)


def finished_pieces(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(kind, source, apart, rows, columns, target, to_apart, to_step, adds, behind)``.

    It moves as :func:`pieces` does, for the kinds ``OUT`` and ``TURNED``, and finishes what it moves. Where ``adds`` is
    not 0, it adds numbers that lie ``behind`` bytes behind those of the target, and then applies the activation.
    """
    line, square = _line_finished(lanes, activation), _square(lanes, activation)

    def run(kind, source, apart, rows, columns, target, to_apart, to_step, adds, behind):
        if kind == OUT:
            for i in range(rows):
                line(target + i * to_apart, to_step, columns, source + i * apart, adds, behind)
        else:
            for i in range(0, rows, lanes):
                for j in range(0, columns, lanes):
                    here, there = source + i * apart + j * NUMBER, target + j * to_apart + i * NUMBER
                    square(here, apart, rows - i, columns - j, there, to_apart, adds, behind)

    return named(run, lanes, *activation_words(activation))


@functools.cache
def _window_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, step, left, right, count, target)``, which copies one row for ``IN``."""
    (whole, all_whole), (twos, all_twos), (fours, all_fours) = (
        (_window(lanes, step), _inside(lanes, step)) for step in (1, *STEPS)
    )
    apart = _window(lanes, 0)

    @compiled(lanes)
    def run(source, step, left, right, count, target):
        for i in range(0, count, lanes):
            # Whole vectors may be loaded where the next number is in memory too, as all numbers between are.
            inside = left <= i and i + lanes < right
            there, here = source + i * step, target + i * NUMBER
            if step == NUMBER:
                if inside:
                    all_whole(there, here)
                else:
                    whole(there, step, left - i, right - i, count - i, here)
            elif step == 2 * NUMBER:
                if inside:
                    all_twos(there, here)
                else:
                    twos(there, step, left - i, right - i, count - i, here)
            elif step == 4 * NUMBER:
                if inside:
                    all_fours(there, here)
                else:
                    fours(there, step, left - i, right - i, count - i, here)
            else:
                apart(there, step, left - i, right - i, count - i, here)

    return run


@functools.cache
def _line_out(lanes: int) -> Callable[..., None]:
    """Makes ``(target, step, count, source)``, which copies one row for ``OUT``."""
    whole, twos, fours, apart = (_spread(lanes, step) for step in (1, *STEPS, 0))
    all_whole = _inside(lanes, 1)

    @compiled(lanes)
    def run(target, step, count, source):
        if step == NUMBER:
            full = count // lanes * lanes
            for i in range(0, full, lanes):
                all_whole(source + i * NUMBER, target + i * NUMBER)
            if full < count:
                i = full
                whole(target + i * step, step, count - i, source + i * NUMBER)
        elif step == 2 * NUMBER:
            for i in range(0, count, lanes):
                twos(target + i * step, step, count - i, source + i * NUMBER)
        elif step == 4 * NUMBER:
            for i in range(0, count, lanes):
                fours(target + i * step, step, count - i, source + i * NUMBER)
        else:
            for i in range(0, count, lanes):
                apart(target + i * step, step, count - i, source + i * NUMBER)

    return run


@functools.cache
def _line_finished(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(target, step, count, source, adds, behind)``, which copies one row for ``OUT`` and finishes it."""
    dense, apart = _dense_finished(lanes, activation), _apart_finished(lanes, activation)

    @compiled(lanes, *activation_words(activation))
    def run(target, step, count, source, adds, behind):
        for i in range(0, count, lanes):
            if step == NUMBER:
                dense(target + i * step, count - i, source + i * NUMBER, adds, behind)
            else:
                apart(target + i * step, step, count - i, source + i * NUMBER, adds, behind)

    return run


@functools.cache
def _dense_finished(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(target, count, source, adds, behind)``, which copies one vector to neighbours and finishes it."""

    def emit(code: Code, arguments: Values) -> None:
        target, count, source, *added = arguments

        def written(full: bool) -> None:
            if full:
                moved(code, activation, added, [Move(code.load(source), target, code.load, code.store)])
            else:
                mask = masks.below(code, count)
                value = masks.load(code, source, mask)
                moved(code, activation, added, [Move.side_by_side(code, value, target, mask)])

        either(code, code.builder.icmp_signed(">=", count, constant(lanes)), written)

    return intrinsic_of(lanes, emit)


@functools.cache
def _apart_finished(lanes: int, activation: str) -> Callable[..., None]:
    """Makes ``(target, step, count, source, adds, behind)``, which does so for numbers ``step`` bytes apart."""

    def emit(code: Code, arguments: Values) -> None:
        target, step, count, source, *added = arguments
        mask = masks.below(code, count)
        value = masks.load(code, source, mask)
        moved(code, activation, added, [Move.apart(code, value, target, step, mask)])

    return intrinsic_of(lanes, emit)


@functools.cache
def _window(lanes: int, step: int) -> Callable[..., None]:
    """Makes ``(source, step, left, right, count, target)``, which copies one vector for ``IN``.

    ``step`` is the distance of numbers, 0 for a maker of any distance.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, apart, left, right, count, target = arguments
        if step == 0:
            numbers = masks.gather(code, source, apart, masks.between(code, left, right))
        else:
            parts = [
                masks.load(code, code.at(source, i * NUMBER * lanes), masks.between(code, left, right, i, step))
                for i in range(step)
            ]
            numbers = _first_of_each(code, parts)
        masks.store(code, numbers, target, masks.below(code, count))

    return intrinsic_of(lanes, emit)


@functools.cache
def _inside(lanes: int, step: int) -> Callable[..., None]:
    """Makes ``(source, target)``, which copies one vector for ``IN`` whose numbers are all in memory."""

    def emit(code: Code, arguments: Values) -> None:
        source, target = arguments
        parts = [code.load(code.at(source, i * NUMBER * lanes)) for i in range(step)]
        code.store(_first_of_each(code, parts), target)

    return intrinsic_of(lanes, emit)


def _first_of_each(code: Code, parts: list[ir.Value]) -> ir.Value:
    """Each ``len(parts)``-th number of the vectors ``parts``, whose count is a power of two."""
    order = [2 * i for i in range(code.lanes)]
    while len(parts) > 1:
        parts = [_shuffled(code, parts[i], parts[i + 1], order) for i in range(0, len(parts), 2)]
    return parts[0]


def _shuffled(code: Code, a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
    """The numbers of vectors ``a`` and ``b`` at the indices ``order``."""
    return code.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), order))


@functools.cache
def _spread(lanes: int, step: int) -> Callable[..., None]:
    """Makes ``(target, step, count, source)``, which copies one vector for ``OUT``; ``step`` is as in ``_window``."""

    def emit(code: Code, arguments: Values) -> None:
        target, apart, count, source = arguments
        value = masks.load(code, source, masks.below(code, count))
        if step == 0:
            masks.scatter(code, value, target, apart, masks.below(code, count))
            return
        for i in range(step):
            order = [(i * lanes + j) // step for j in range(lanes)]
            part = value if step == 1 else _shuffled(code, value, value, order)
            mask = masks.between(code, ir.Constant(INT, 0), count, i, step)
            masks.store(code, part, code.at(target, i * NUMBER * lanes), mask)

    return intrinsic_of(lanes, emit)


@functools.cache
def _zero(lanes: int) -> Callable[..., None]:
    """Makes ``(target, count)``, which sets the first ``count`` numbers of one vector to zero."""

    def emit(code: Code, arguments: Values) -> None:
        target, count = arguments
        masks.store(code, code.splat(0.0), target, masks.below(code, count))

    return intrinsic_of(lanes, emit)


@functools.cache
def _fill(lanes: int) -> Callable[..., None]:
    """Makes ``(target, source)``, which sets one vector to the number at ``source``."""

    def emit(code: Code, arguments: Values) -> None:
        target, source = arguments
        code.store(code.broadcast(source), target)

    return intrinsic_of(lanes, emit)


@functools.cache
def _square(lanes: int, activation: str | None = None) -> Callable[..., None]:
    """Makes ``(source, apart, rows, columns, target, to_apart)``, which transposes up to ``lanes`` rows and columns.

    With an ``activation`` it takes ``adds`` and ``behind`` too, as :func:`finished_pieces` does.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, apart, rows, columns, target, to_apart, *added = arguments
        lines = [masks.load(code, code.at(source, i, apart), mask) for i, mask in enumerate(_each(code, rows, columns))]
        turned = zip(transposed(code, lines), _each(code, columns, rows), strict=True)
        places = ((line, code.at(target, i, to_apart), mask) for i, (line, mask) in enumerate(turned))
        moved(code, activation, added, [Move.side_by_side(code, *place) for place in places])

    return intrinsic_of(lanes, emit)


def _each(code: Code, rows: ir.Value, columns: ir.Value) -> list[ir.Value]:
    """The mask of the first ``columns`` lanes for each row, and of no lane for rows from ``rows`` on."""
    b, mask = code.builder, masks.below(code, columns)
    return [b.select(b.icmp_signed("<", ir.Constant(INT, i), rows), mask, masks.none(code)) for i in range(code.lanes)]
