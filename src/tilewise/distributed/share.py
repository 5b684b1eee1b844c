"""A rank's share of a convolution: which boxes of the input it needs, and the small convolutions that make it up.

Convolution is linear in its input, so a rank's outputs are the sum of one small convolution for each box of input that
they read: its own, and one for each rank that holds some of the rest. None of them needs the others' elements: where a
window leaves a box it meets zeros, which a signed padding says. Nothing is concatenated, and the convolution of a
rank's own box, nearly all of the work, does not wait for the others'.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewise.axis import Axis
from tilewise.distributed.layout import Box, Interval, Layout, Transfer, input_cuts, output_cuts, transfer

__all__ = ["Share", "Term", "share_of"]


@dataclass(frozen=True, slots=True)
class Term:
    """One small convolution: ``axes``, one a spatial dimension, by ``taps`` of the filter.

    ``target`` is the part of this rank's result into which it is added. Its input is the whole box, of which signed
    padding crops what is not read.
    """

    target: Box
    taps: Box
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a convolution, or of a transposed one.

    ``own`` is the term of this rank's own part, ``boxes`` those of the boxes received, in the order of ``transfer``
    (``None``: no output reads it). ``out`` is the result's layout and ``sizes`` are those of its part here.
    ``assembled`` has the axes of the one convolution of all boxes put together, where that is cheaper.
    """

    transposed: bool
    transfer: Transfer
    out: Layout
    sizes: tuple[int, ...]
    own: Term | None
    boxes: tuple[Term | None, ...]
    assembled: tuple[Axis, ...] | None


@functools.lru_cache(maxsize=4096)
def share_of(layout: Layout, axes: tuple[Axis, ...], transposed: bool, form: str = "auto") -> Share:
    """This rank's share of a convolution over ``axes``, whose input is cut as ``layout`` says.

    ``axes`` are those of the whole convolution, one a spatial dimension; for a ``transposed`` one, of the convolution
    whose gradient it is. ``form`` is ``"terms"``, ``"assembled"`` or ``"auto"``, which decides by what is to be moved.
    """
    dims = len(axes)
    cut = [layout.cut_of(i - dims) for i in range(dims)]
    derive = input_cuts if transposed else output_cuts
    whole_out = [a.size if transposed else a.out for a in axes]
    whole_in = [a.out if transposed else a.size for a in axes]
    out_cuts = {i - dims: derive(cuts, axes[i]) for i, cuts in enumerate(cut) if cuts is not None}
    out = layout.with_cuts(out_cuts)
    mine: list[Interval] = [(0, size) for size in whole_out]
    needs = []
    for dim, coord in zip(layout.grid.dims, layout.grid.coords, strict=True):
        axis, cuts = axes[dim], out_cuts[dim]
        mine[dim] = (cuts[coord], cuts[coord + 1])
        needs.append(tuple(_need(axis, cuts[c], cuts[c + 1], transposed) for c in range(len(cuts) - 1)))
    moves = transfer(layout, tuple(needs))
    sizes = tuple(stop - start for start, stop in mine)

    def term(box: Box | None) -> Term | None:
        if box is None or not all(sizes):
            return None
        whole: list[Interval] = [(0, size) for size in whole_in]
        for dim, interval in zip(layout.grid.dims, box, strict=True):
            whole[dim] = interval
        return _term(axes, whole, mine, transposed)

    own = term(layout.own if moves.own is not None else None)
    boxes = tuple(term(box) for _, box in moves.receives)
    assembled = None
    if all(sizes) and _assembles(form, own, boxes, sizes):
        assembled = _assembled(axes, layout, mine, transposed)
    return Share(transposed, moves, out, sizes, own, boxes, assembled)


def _need(axis: Axis, start: int, stop: int, transposed: bool) -> Interval:
    """Inputs that the outputs ``[start, stop)`` read."""
    if start == stop:
        return (0, 0)
    found = axis.writing(start, stop) if transposed else axis.reading(start, stop)
    return (0, 0) if found is None else found[:2]


def _term(axes: tuple[Axis, ...], box: list[Interval], mine: list[Interval], transposed: bool) -> Term | None:
    """The term that ``box`` adds to the results ``mine``, ``None`` where none of them reads it."""
    targets, taps, smaller = [], [], []
    for axis, (u, v), (first, last) in zip(axes, box, mine, strict=True):
        sizes = (axis.out, axis.size) if transposed else (axis.size, axis.out)
        if (u, v, first, last) == (0, sizes[0], 0, sizes[1]):
            targets.append((first, last))
            taps.append((0, axis.kernel))
            smaller.append(axis)
            continue
        outer = axis.writing(first, last) if transposed else axis.reading(first, last)
        if outer is None:
            return None
        start, _, inner = outer
        found = inner.reading(u - start, v - start) if transposed else inner.writing(u - start, v - start)
        trimmed = None if found is None else found[2].trimmed()
        if found is None or trimmed is None:
            return None
        targets.append(found[:2])
        taps.append(trimmed[:2])
        smaller.append(trimmed[2])
    return Term(tuple(targets), tuple(taps), tuple(smaller))


def _assembles(form: str, own: Term | None, boxes: tuple[Term | None, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all boxes are to be put together before one convolution.

    Each term reads and writes again the results that it is added to; putting the boxes together copies the input once.
    Terms are cheaper as long as boxes meet less than half of the results, and their small convolutions then are too.
    """
    if form != "auto":
        return form == "assembled"
    met = sum(math.prod(stop - start for start, stop in term.target) for term in boxes if term is not None)
    return 2 * met > math.prod(sizes) or (own is None and any(boxes))


def _assembled(
    axes: tuple[Axis, ...], layout: Layout, mine: list[Interval], transposed: bool
) -> tuple[Axis, ...] | None:
    """Axes of the one convolution over all that is needed; ``None`` where nothing is."""
    found = list(axes)
    for dim in layout.grid.dims:
        axis, (first, last) = axes[dim], mine[dim]
        one = axis.writing(first, last) if transposed else axis.reading(first, last)
        if one is None:
            return None
        found[dim] = one[2]
    return tuple(found)
