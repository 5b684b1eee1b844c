"""Groups of few channels side by side: their numbers take turns in the lanes of a vector.

A group whose outputs do not fill a vector is computed beside its neighbours. Lane ``j * groups + g`` then has output j
of group g, so that what is read of an image is as many neighbouring numbers as there are groups, over and over: a load
that needs no shuffle. Images are brought into that order, and results out of it, by permutations of whole vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import advanced, constant, either, looped, variable
from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values, intrinsic_of, named

__all__ = ["WORDS", "apart", "interleave", "permuted", "repeated", "together"]

WORDS = 5
"""The number of integers that :func:`interleave` takes."""
Place = tuple[int, int]
"""A vector's number and a lane."""


def together(groups: int, channels: int) -> list[int]:
    """Where each number lies before channels of ``groups`` groups are interleaved."""
    return [g * channels + k for k in range(channels) for g in range(groups)]


def apart(groups: int, channels: int) -> list[int]:
    """The inverse of :func:`together`."""
    return together(channels, groups)


def repeated(code: Code, address: ir.Value, count: int) -> ir.Value:
    """A vector with the ``count`` numbers at ``address``, a power of two, over and over."""
    b = code.builder
    if count == 1:
        return code.broadcast(address)
    if count == code.lanes:
        return code.load(address)
    # As one number of more bits, which processors load into all lanes at once, where there is such a number.
    kind = ir.DoubleType() if count == 2 else ir.VectorType(FLOAT, count)
    value = b.load(b.inttoptr(address, kind.as_pointer()), align=NUMBER)
    if count == 2:
        pairs = ir.VectorType(kind, code.lanes // 2)
        first = b.insert_element(ir.Constant(pairs, ir.Undefined), value, ir.Constant(INT, 0))
        value = _shuffled(code, first, first, [0] * (code.lanes // 2))
        return b.bitcast(value, code.vector)
    return _shuffled(code, value, value, [i % count for i in range(code.lanes)])


def permuted(code: Code, vectors: Sequence[ir.Value], places: Sequence[int]) -> list[ir.Value]:
    """Vectors whose number i is number ``places[i]`` of ``vectors``. What fills up the last one is not defined."""
    wanted: list[list[Place | None]] = []
    for first in range(0, len(places), code.lanes):
        line: list[Place | None] = [divmod(place, code.lanes) for place in places[first : first + code.lanes]]
        wanted.append(line + [None] * (code.lanes - len(line)))
    return _permuted(code, vectors, wanted)


def _permuted(code: Code, vectors: Sequence[ir.Value], wanted: list[list[Place | None]]) -> list[ir.Value]:
    """Vectors with the lanes at the ``wanted`` places.

    A shuffle takes from two vectors. For results that are made of more, what they take of two is brought together
    first, for several results as much as fits in one vector.
    """
    found: dict[int, ir.Value] = {}
    wide = []
    for i, line in enumerate(wanted):
        used = sorted({place[0] for place in line if place})
        if len(used) > 2:
            wide.append(i)
            continue
        second = len(used) - 1
        lanes = [place[1] + code.lanes * (second and used.index(place[0])) if place else None for place in line]
        found[i] = _shuffled(code, vectors[used[0]], vectors[used[second]], lanes)
    if wide:
        closer, moved = _brought_together(code, vectors, [wanted[i] for i in wide])
        found |= dict(zip(wide, _permuted(code, closer, moved), strict=True))
    return [found[i] for i in range(len(wanted))]


def _brought_together(
    code: Code, vectors: Sequence[ir.Value], wanted: list[list[Place | None]]
) -> tuple[list[ir.Value], list[list[Place | None]]]:
    """Vectors of which each of the ``wanted`` lines takes from half as many, and the lines' places in them."""
    gathered: list[
        tuple[tuple[int, ...], list[Place]]
    ] = []  # vectors, and the places in them that are brought together
    open_for: dict[tuple[int, ...], int] = {}
    moved = [list(line) for line in wanted]
    for i, line in enumerate(wanted):
        used = sorted({place[0] for place in line if place})
        for pair in (tuple(used[k : k + 2]) for k in range(0, len(used), 2)):
            needed = list(dict.fromkeys(place for place in line if place and place[0] in pair))
            if pair not in open_for or len(gathered[open_for[pair]][1]) + len(needed) > code.lanes:
                open_for[pair] = len(gathered)
                gathered.append((pair, []))
            number = open_for[pair]
            places = gathered[number][1]
            places += needed
            for lane, place in enumerate(line):
                if place in needed:
                    moved[i][lane] = number, places.index(place)
    made = []
    for pair, places in gathered:
        lanes: list[int | None] = [lane + code.lanes * pair.index(number) for number, lane in places]
        lanes += [None] * (code.lanes - len(lanes))
        made.append(_shuffled(code, vectors[pair[0]], vectors[pair[-1]], lanes))
    return made, moved


def _shuffled(code: Code, first: ir.Value, second: ir.Value, lanes: Sequence[int | None]) -> ir.Value:
    """The vector of these lanes of two vectors; any lane will do for ``None``."""
    kind = ir.IntType(32)
    mask = [ir.Constant(kind, i if lane is None else lane) for i, lane in enumerate(lanes)]
    return code.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(kind, len(lanes)), mask))


@functools.cache
def _interleave(lanes: int, groups: int, channels: int) -> Callable[..., None]:
    """Makes the instructions of :func:`interleave`."""
    size, count = NUMBER * lanes, groups * channels
    vectors = -(-count // lanes)

    def emit(code: Code, arguments: Values) -> None:
        source, step, target, pixels, valid = arguments
        b = code.builder
        last = masks.below(code, constant(count - (vectors - 1) * lanes)) if count % lanes else None
        parts = [masks.below(code, b.sub(valid, constant(j * lanes))) for j in range(vectors)]

        def loaded(place: ir.Value, whole: bool) -> Iterator[ir.Value]:
            for j in range(vectors):
                mask = (last if j == vectors - 1 else None) if whole else parts[j]
                at = code.at(place, j * size)
                yield masks.read(code, at, mask)

        def write(whole: bool) -> None:
            read, written = variable(code, source), variable(code, target)
            with looped(code, pixels):
                line = list(loaded(b.load(read), whole))
                for j, vector in enumerate(permuted(code, line, together(groups, channels))):
                    at = code.at(b.load(written), j * size)
                    masks.write(code, vector, at, last if j == vectors - 1 else None)
                b.store(b.add(b.load(read), step), read)
                advanced(code, written, count * NUMBER)

        either(code, b.icmp_signed(">=", valid, constant(count)), write)

    return intrinsic_of(lanes, emit)


def interleave(lanes: int, groups: int, channels: int) -> Callable[..., None]:
    """Makes ``(source, step, target, pixels, valid)``, which interleaves the channels of ``groups`` groups of pixels.

    Pixels are ``step`` bytes apart at ``source``, and follow each other at ``target``: channel k of group g becomes
    number ``k * groups + g``. Only the first ``valid`` numbers of a pixel are read; in place of the others are zeros.
    """
    block = _interleave(lanes, groups, channels)

    def run(source, step, target, pixels, valid):
        block(source, step, target, pixels, valid)

    return named(run, lanes, groups, channels)
