"""A rank's share of a convolution: the boxes of the input that it needs, and the small convolutions of these.

Convolution is linear in its input. So a rank's outputs are the sum of one small convolution, called a term, for each
box of input that they read: the rank's own part, and a box from each rank that holds some of the rest. A term needs the
elements of its box alone: where a window reaches beyond the box it reads zeros, which is expressed by signed padding
(negative padding crops). Nothing is concatenated, and the term of the rank's own part, nearly all of the work, does not
wait for the others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewise.distributed.parts.layout import Box, Interval, Layout, Transfer, input_cuts, output_cuts, transfer
from tilewise.problems.conv.axis import Axis

__all__ = ["Share", "Term", "share_of"]


@dataclass(frozen=True, slots=True)
class Term:
    """One small convolution over ``axes``, one for each spatial dimension, with the ``taps`` of the filter it uses.

    ``target`` is the range of this rank's result to which the term is added. Its input is a whole box. Negative padding
    crops the elements that are not read.
    """

    target: Box
    taps: Box
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a convolution, or of a transposed one.

    ``own`` is the term of this rank's own part. ``boxes`` has the terms of the boxes received, in the order of
    ``transfer``; they are ``None`` where no output reads the box. ``out`` is the layout of the result, and ``sizes``
    are the spatial sizes of its part here. Where it is cheaper to put all boxes together and convolve them at once,
    ``assembled`` has the axes of that convolution.
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

    ``axes`` are those of the whole convolution, one for each spatial dimension; for a ``transposed`` one, those of the
    convolution whose gradient it is. ``form`` is ``"terms"``, ``"assembled"``, or ``"auto"`` for the one that moves
    fewer elements.
    """
    dims = len(axes)
    cut = [layout.cut_of(i - dims) for i in range(dims)]
    derive = input_cuts if transposed else output_cuts
    whole_out = [a.size if transposed else a.out for a in axes]
    whole_in = [a.out if transposed else a.size for a in axes]
    out_cuts = {i - dims: derive(cuts, axes[i]) for i, cuts in enumerate(cut) if cuts is not None}
    out = layout.with_cuts(out_cuts)
    result_ranges: list[Interval] = [(0, size) for size in whole_out]
    needs = []
    for dim, coord in zip(layout.grid.dims, layout.grid.coords, strict=True):
        axis, cuts = axes[dim], out_cuts[dim]
        result_ranges[dim] = (cuts[coord], cuts[coord + 1])
        needs.append(tuple(_need(axis, cuts[c], cuts[c + 1], transposed) for c in range(len(cuts) - 1)))
    moves = transfer(layout, tuple(needs))
    sizes = tuple(stop - start for start, stop in result_ranges)

    def term(box: Box | None) -> Term | None:
        if box is None or not all(sizes):
            return None
        whole: list[Interval] = [(0, size) for size in whole_in]
        for dim, interval in zip(layout.grid.dims, box, strict=True):
            whole[dim] = interval
        return _term(axes, whole, result_ranges, transposed)

    own = term(layout.own if moves.own is not None else None)
    boxes = tuple(term(box) for _, box in moves.receives)
    assembled = None
    if all(sizes) and _assembles(form, own, boxes, sizes):
        assembled = _assembled(axes, layout, result_ranges, transposed)
    return Share(transposed, moves, out, sizes, own, boxes, assembled)


def _need(axis: Axis, start: int, stop: int, transposed: bool) -> Interval:
    """The range of inputs that the outputs ``[start, stop)`` read."""
    if start == stop:
        return (0, 0)
    read = axis.writing(start, stop) if transposed else axis.reading(start, stop)
    return (0, 0) if read is None else read[:2]


def _term(axes: tuple[Axis, ...], box: list[Interval], result_ranges: list[Interval], transposed: bool) -> Term | None:
    """The term that ``box`` adds to this rank's results; ``None`` where none of them reads the box.

    ``result_ranges`` has the range of this rank's results along each axis.
    """
    targets, taps, smaller = [], [], []
    for axis, (box_start, box_stop), (first, last) in zip(axes, box, result_ranges, strict=True):
        sizes = (axis.out, axis.size) if transposed else (axis.size, axis.out)
        if (box_start, box_stop, first, last) == (0, sizes[0], 0, sizes[1]):
            targets.append((first, last))
            taps.append((0, axis.kernel))
            smaller.append(axis)
            continue
        outer = axis.writing(first, last) if transposed else axis.reading(first, last)
        if outer is None:
            return None
        origin, _, inner = outer
        start, stop = box_start - origin, box_stop - origin
        part = inner.reading(start, stop) if transposed else inner.writing(start, stop)
        trimmed = None if part is None else part[2].trimmed()
        if part is None or trimmed is None:
            return None
        targets.append(part[:2])
        taps.append(trimmed[:2])
        smaller.append(trimmed[2])
    return Term(tuple(targets), tuple(taps), tuple(smaller))


def _assembles(form: str, own: Term | None, boxes: tuple[Term | None, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all boxes are to be put together before one convolution.

    A term reads and writes again the results that it is added to, while putting the boxes together copies the input
    once. Terms are cheaper as long as they are added to less than half of the results.
    """
    if form != "auto":
        return form == "assembled"
    met = sum(math.prod(stop - start for start, stop in term.target) for term in boxes if term is not None)
    return 2 * met > math.prod(sizes) or (own is None and any(boxes))


def _assembled(
    axes: tuple[Axis, ...], layout: Layout, result_ranges: list[Interval], transposed: bool
) -> tuple[Axis, ...] | None:
    """The axes of the convolution of all boxes put together; ``None`` where the results read no input."""
    assembled = list(axes)
    for dim in layout.grid.dims:
        axis, (first, last) = axes[dim], result_ranges[dim]
        part = axis.writing(first, last) if transposed else axis.reading(first, last)
        if part is None:
            return None
        assembled[dim] = part[2]
    return tuple(assembled)
