"""Fused GPU kernels for the terms that halos add to a rank's part of a convolution; one launch computes two boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.distributed.parts.layout import Box, meet
from tilewise.distributed.passes.share import Share, Term

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch, Program

__all__ = ["BLOCKS", "Blocks", "HaloTerms", "Kernels", "nearest", "why_not"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {"ieee": "tf32x3", "tf32": "tf32"}
"""How matrix units multiply fp32 operands, for each of torch's precisions. Other types have one way."""
CHANNELS, LEAST = 64, 16
"""The largest block of a filter's gradient along channels, and the smallest of any block along any side."""
SHARE = 128
"""The fewest rows that a block sums for a filter's gradient."""
ENOUGH = 264
"""The number of blocks that fills a GPU twice: rows are divided into no more shares than that."""
ADD_BLOCK, ADD_AT_ONCE = 128, 16
"""Elements of a filter's gradient that a block adds up, and shares that it loads at once."""
STAGES = 3
"""Blocks of operands that are being loaded at a time, so that the next ones arrive while a product is computed."""
WORD, FAR = 16, 1 << 31
"""Bytes of the widest word that is moved at once, and the first distance in elements beyond offsets of 32 bits."""


def why_not(groups: int, *tensors: torch.Tensor) -> str:
    """Why these kernels cannot compute terms of a layer with ``tensors`` as operands; empty where they can."""
    if groups != 1:
        return f"{groups} groups"
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        return f"types {', '.join(str(tensor.dtype) for tensor in tensors)}"
    if not all(tensor.numel() for tensor in tensors):
        return "an empty tensor"
    return ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of the blocks of a kernel.

    A block computes ``rows`` positions by ``columns`` channels of results from ``depth`` channels of the source at a
    time, or sums ``sum_rows`` rows of a filter's gradient at a time, with ``warps`` warps. The best sizes differ for
    results and gradients, most where channels lie far apart in memory.
    """

    rows: int
    columns: int
    depth: int
    sum_rows: int
    warps: int


BLOCKS = (
    Blocks(32, 64, 64, 16, 8), Blocks(32, 64, 32, 16, 4), Blocks(64, 64, 32, 64, 4), Blocks(128, 16, 32, 16, 4),
    Blocks(128, 64, 16, 16, 8),
)  # fmt: skip
"""The candidates, from which :mod:`tilewise.distributed.passes.halo_choice` chooses by measuring."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The blocks of each kernel.

    ``add`` is for the kernel that adds to results, ``home`` for that of the boxes' gradients, and ``sums`` for that of
    the filter's gradient.
    """

    add: Blocks
    home: Blocks
    sums: Blocks

    @staticmethod
    def alike(blocks: Blocks) -> Kernels:
        """The same ``blocks`` for all kernels."""
        return Kernels(blocks, blocks, blocks)


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a tensor as one with three spatial axes: the strides of (n, c, d, h, w) and the first element."""

    strides: tuple[int, ...]
    start: int

    @staticmethod
    def of(tensor: torch.Tensor, box: Box | None = None) -> View:
        """The view of all of ``tensor``, or of its elements from the starts of ``box`` on."""
        strides = tensor.stride()
        start = 0 if box is None else sum(first * stride for (first, _), stride in zip(box, strides[2:], strict=True))
        return View((*strides[:2], *(0,) * (5 - len(strides)), *strides[2:]), start)

    @property
    def by_rows(self) -> bool:
        """Whether positions along the last axis lie nearer to each other in memory than channels."""
        return self.strides[4] < self.strides[1]

    def near(self, size: int, channels: int = 1) -> int:
        """How many elements of ``size`` bytes along the axis ``channels`` one word can hold; 0 where they lie apart."""
        if self.strides[channels] != 1:
            return 0
        return math.gcd(WORD // size, *(s for axis, s in enumerate(self.strides) if axis != channels))


@dataclass(frozen=True, slots=True)
class Moves:
    """How the results of a term read its source along each axis, as :mod:`tilewise.kernels.triton.halo` explains."""

    results: tuple[int, ...]
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    base: tuple[int, ...]
    up: tuple[int, ...]
    step: tuple[int, ...]
    down: tuple[int, ...]

    @staticmethod
    def of(term: Term, back: bool) -> Moves:
        """The moves of a convolution over the term's axes, or with ``back`` of the gradient of its input."""
        per_axis = [(1, 1, 1, 0, 1, 1, 1)] * (3 - len(term.axes))
        for a in term.axes:
            forward = (a.out, a.size, a.kernel, -a.before, a.stride, a.dilation, 1)
            per_axis.append((a.size, a.out, a.kernel, a.before, 1, -a.dilation, a.stride) if back else forward)
        return Moves(*(tuple(column) for column in zip(*per_axis, strict=True)))

    def scalars(self, images: int, source: View, out: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The arguments of the kernels for one box: its sizes, and the strides of ``source`` and ``out``."""
        rows = images * math.prod(self.results)
        return (rows, *self.results, *self.sizes, *self.taps, *self.base), (*source.strides, *out.strides)


class HaloTerms:
    """Computes the terms of ``share.boxes``, as :class:`~tilewise.distributed.passes.contracts.Terms` declares.

    ``precision`` is torch's precision of fp32 products, ``ieee`` or ``tf32``, and ``kernels`` has the blocks of the
    kernels. A filter's gradient is computed in as many shares of its rows as ``limit`` bytes hold, but at least one.
    Boxes are added in their order, so that results have the same bits every time.
    """

    def __init__(self, share: Share, precision: str, kernels: Kernels, limit: int | None = None) -> None:
        self.share, self.product, self.kernels, self._limit = share, PRODUCTS[precision], kernels, limit
        terms = [(index, term) for index, term in enumerate(share.boxes) if term is not None]
        self._pairs = {overlap: _pairs(terms, overlap) for overlap in (False, True)}
        self._programs: dict[Any, list[Program]] = {}
        self._sizes: dict[Any, list[int]] = {}

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` with the channels that products sum over next to each other in memory, so that a word holds several."""
        return nearest(w, int(back == self.share.transposed)) if self._pairs[True] else w

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> Sequence[torch.Tensor]:
        """The boxes with channels next to each other in memory; :meth:`add` multiplies them into the results."""
        return [nearest(box, 1) for box in boxes]

    def add(self, y: torch.Tensor, results: Sequence[torch.Tensor], w: torch.Tensor) -> None:
        """Add the terms of the boxes ``results``, which :meth:`results` returned, to this rank's results ``y``."""
        key = ("add", _layout(y), _layout(w), *map(_layout, results))

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            back, wide = self.share.transposed, _wide(*results)
            views = [(View.of(results[i]), View.of(y, term.target)) for i, term in terms]
            pointers = [2 + i for i, _ in terms], [0] * len(terms)
            return self._gather(terms, back, y.shape[0], views, pointers, w, accumulate=True, wide=wide)

        tensors = [y, w, *results]
        for program in self._programs_of(key, pair, tensors, overlap=False):
            program(tensors)

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of ``boxes``."""
        key = ("home", _layout(dy), _layout(w), *map(_layout, boxes))
        near = dy.stride(1) == 1
        gradients = [
            _gradient_memory(box, near, empty=term is not None)
            for term, box in zip(self.share.boxes, boxes, strict=True)
        ]

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            back = not self.share.transposed
            views = [(View.of(dy, term.target), View.of(gradients[i])) for i, term in terms]
            pointers = [0] * len(terms), [2 + i for i, _ in terms]
            return self._gather(terms, back, dy.shape[0], views, pointers, w, accumulate=False, wide=_wide(dy))

        tensors = [dy, w, *gradients]
        for program in self._programs_of(key, pair, tensors, overlap=True):
            program(tensors)
        return gradients

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        """The terms of the filter's gradient that come from ``boxes``, in shares of the rows, one tensor a launch."""
        key = ("sums", _layout(w), _layout(dy), *map(_layout, boxes))

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            return self._weight_shares(terms, w, boxes, dy)

        if key not in self._sizes:
            self._sizes[key] = [self._shares(terms, w, dy)[2] for terms in self._pairs[True]]
        sums = [torch.empty(size, dtype=torch.float32, device=dy.device) for size in self._sizes[key]]
        if sums:
            programs = self._programs_of(key, pair, [sums[0], dy, *boxes], overlap=True)
            for shares, program in zip(sums, programs, strict=True):
                program([shares, dy, *boxes])
        return sums

    def add_sums(self, dw: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
        """Add ``sums``, which :meth:`sums` returned, to the filter's gradient ``dw``."""
        key = ("add sums", _layout(dw), *(shares.numel() for shares in sums))
        sizes = iter(sums)

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            return self._add_shares(terms, dw, next(sizes).numel())

        if sums:
            programs = self._programs_of(key, pair, [sums[0], dw], overlap=True)
            for shares, program in zip(sums, programs, strict=True):
                program([shares, dw])

    def scratch(self, w: torch.Tensor, dy: torch.Tensor) -> int:
        """The bytes that :meth:`filters` or :meth:`sums` allocates, the larger of the two."""
        return max(w.nbytes, 4 * sum(self._shares(terms, w, dy)[2] for terms in self._pairs[True]))

    def _programs_of(
        self, key: Any, pair: Callable[[list[tuple[int, Term]]], Launch], tensors: list[torch.Tensor], overlap: bool
    ) -> list[Program]:
        """The programs of the call ``key``, made where there are none; ``pair`` makes the launch of a pair of terms."""
        from tilewise.kernels.triton.launch import Program

        if key not in self._programs:
            alignment = [math.gcd(tensor.data_ptr(), WORD) for tensor in tensors]
            self._programs[key] = [
                Program([pair(terms)], alignment, tensors[0].device) for terms in self._pairs[overlap]
            ]
        return self._programs[key]

    def _gather(
        self, terms: list[tuple[int, Term]], back: bool, images: int, views: list[tuple[View, View]],
        sources: tuple[list[int], list[int]], w: torch.Tensor, *, accumulate: bool, wide: bool,
    ) -> Launch:  # fmt: skip
        """The launch that computes results or boxes' gradients of one or two terms.

        ``views`` has a term's source and result, and ``sources`` their places among the program's tensors. ``wide``
        says that offsets need 64 bits.
        """
        from tilewise.kernels.triton import halo
        from tilewise.kernels.triton.launch import Launch, Pointer

        size, blocks = w.element_size(), self.kernels.add if accumulate else self.kernels.home
        moves = [Moves.of(term, back) for _, term in terms]
        filters = [View.of(w, term.taps) for _, term in terms]
        two = _twice(range(len(terms)))
        pointers = [Pointer(sources[0][n], size * views[n][0].start, w.dtype) for n in two]
        pointers += [Pointer(1, size * filters[n].start, w.dtype) for n in two]
        pointers += [Pointer(sources[1][n], size * views[n][1].start, w.dtype) for n in two]
        w_o, w_i, *taps = filters[0].strides
        outputs, inputs = w.shape[:2]
        if back:
            (w_o, w_i), (outputs, inputs) = (w_i, w_o), (inputs, outputs)
        tiles = [-(-images * math.prod(m.results) // blocks.rows) for m in moves]
        of_box = [moves[n].scalars(images, *views[n]) for n in two]
        block, depth = min(blocks.columns, _power(outputs)), min(blocks.depth, _power(inputs))
        near = [min(pair[side].near(size) for pair in views) for side in (0, 1)]
        constants = {
            "ACCUMULATE": accumulate, "PRECISION": self.product, "UNIT": _unit(moves), "VOLUME": w.dim() > 4,
            "WIDE": wide, "LINES": _in_lines(moves, blocks.rows), "FULL": not (outputs % block or inputs % depth),
            "SOURCE_ROWS": views[0][0].by_rows, "SOURCE_NEAR": near[0], "W_INPUTS": w_i < w_o,
            "W_NEAR": filters[0].near(size, int(w_i < w_o) ^ back),
            "OUT_ROWS": views[0][1].by_rows, "OUT_NEAR": near[1],
            "BLOCK_R": blocks.rows, "BLOCK_O": block, "BLOCK_I": depth, "STAGES": STAGES,
        }  # fmt: skip
        scalars = (
            tiles[0], inputs, outputs, w_o, w_i, *taps, *moves[0].up, *moves[0].step, *moves[0].down,
            *of_box[0][0], *of_box[0][1], *of_box[1][0], *of_box[1][1],
        )  # fmt: skip
        grid = (sum(tiles), -(-outputs // block), 1)
        return Launch(halo.gather, grid, tuple(pointers), scalars, constants, blocks.warps)

    def _shares(self, terms: list[tuple[int, Term]], w: torch.Tensor, dy: torch.Tensor) -> tuple[int, int, int]:
        """The rows of one share of a filter's gradient, the number of shares, and the elements of all shares."""
        moves = [Moves.of(term, False) for _, term in terms]
        rows = max(dy.shape[0] * math.prod(m.results) for m in moves)
        taps = sum(math.prod(m.taps) for m in moves)
        tiles = -(-w.shape[0] // CHANNELS) * -(-w.shape[1] // CHANNELS)
        splits = min(-(-rows // SHARE), -(-ENOUGH // (tiles * taps)))
        if self._limit is not None:
            bytes_of_share = 4 * taps * w.shape[0] * w.shape[1] * len(self._pairs[True])
            splits = max(1, min(splits, self._limit // bytes_of_share))
        at_once = self.kernels.sums.sum_rows
        share = -(-rows // (splits * at_once)) * at_once
        splits = -(-rows // share)
        return share, splits, splits * taps * w.shape[0] * w.shape[1]

    def _weight_shares(
        self, terms: list[tuple[int, Term]], w: torch.Tensor, boxes: Sequence[torch.Tensor], dy: torch.Tensor
    ) -> Launch:
        """The launch that computes shares of the filter's gradient for one or two terms."""
        from tilewise.kernels.triton import halo
        from tilewise.kernels.triton.launch import Launch, Pointer

        size, outputs, inputs = dy.element_size(), w.shape[0], w.shape[1]
        moves = [Moves.of(term, False) for _, term in terms]
        share, splits, _ = self._shares(terms, w, dy)
        two = _twice(range(len(terms)))
        views = [(View.of(boxes[i]), View.of(dy, term.target)) for i, term in terms]
        places = [(2 + i, 1) for i, _ in terms]
        if self.share.transposed:
            views, places = [(y, x) for x, y in views], [(y, x) for x, y in places]
        pointers = [Pointer(places[n][side], size * views[n][side].start, dy.dtype) for side in (0, 1) for n in two]
        pointers.append(Pointer(0, 0, torch.float32))
        of_box = [moves[n].scalars(dy.shape[0], *views[n]) for n in two]
        taps = [math.prod(m.taps) for m in moves]
        block_o, block_i = min(CHANNELS, _power(outputs)), min(CHANNELS, _power(inputs))
        near = [min(pair[side].near(size) for pair in views) for side in (0, 1)]
        constants = {
            "PRECISION": self.product, "UNIT": _unit(moves), "VOLUME": w.dim() > 4, "WIDE": _wide(dy, *boxes),
            "LINES": _in_lines(moves, self.kernels.sums.sum_rows), "FULL": not (outputs % block_o or inputs % block_i),
            "X_ROWS": views[0][0].by_rows, "X_NEAR": near[0], "Y_ROWS": views[0][1].by_rows, "Y_NEAR": near[1],
            "BLOCK_R": self.kernels.sums.sum_rows, "BLOCK_O": block_o, "BLOCK_I": block_i, "STAGES": STAGES,
        }  # fmt: skip
        scalars = (
            taps[0], inputs, outputs, share, *moves[0].up, *moves[0].step, *moves[0].down,
            *of_box[0][0], *of_box[0][1], *of_box[1][0], *of_box[1][1],
        )  # fmt: skip
        grid = (-(-outputs // block_o) * -(-inputs // block_i), splits, sum(taps))
        return Launch(halo.weight_shares, grid, tuple(pointers), scalars, constants, self.kernels.sums.warps)

    def _add_shares(self, terms: list[tuple[int, Term]], dw: torch.Tensor, elements: int) -> Launch:
        """The launch that adds shares of ``elements`` elements for one or two terms to the filter's gradient ``dw``."""
        from tilewise.kernels.triton import halo
        from tilewise.kernels.triton.launch import Launch, Pointer

        outputs, inputs = dw.shape[0], dw.shape[1]
        counts = [Moves.of(term, False).taps for _, term in terms]
        taps = [math.prod(count) for count in counts]
        kernel = (*(1,) * (5 - dw.dim()), *dw.shape[2:])
        begins = [(*(0,) * (3 - len(term.taps)), *(start for start, _ in term.taps)) for _, term in terms]
        if len(terms) == 1:
            begins, counts = [*begins, (0, 0, 0)], [*counts, (0, 0, 0)]
        scalars = (
            elements // (sum(taps) * outputs * inputs), taps[0], sum(taps), inputs, outputs, *View.of(dw).strides,
            *kernel, *begins[0], *counts[0], *begins[1], *counts[1],
        )  # fmt: skip
        grid = (-(-inputs * outputs // ADD_BLOCK), math.prod(kernel), 1)
        pointers = (Pointer(0, 0, torch.float32), Pointer(1, 0, dw.dtype))
        constants = {"BLOCK": ADD_BLOCK, "AT_ONCE": ADD_AT_ONCE}
        return Launch(halo.add_shares, grid, pointers, scalars, constants)


def _pairs(terms: list[tuple[int, Term]], overlap: bool) -> list[list[tuple[int, Term]]]:
    """The terms in pairs, each with its index; some stay alone.

    Without ``overlap`` the terms of a pair have no result in common, to which two blocks would add at once.
    """
    left, pairs = list(terms), []
    while left:
        first = left.pop(0)
        fits = (n for n, (_, term) in enumerate(left) if overlap or meet(first[1].target, term.target) is None)
        second = next(fits, None)
        pairs.append([first] if second is None else [first, left.pop(second)])
    return pairs


def _twice(numbers: Sequence[int]) -> tuple[int, int]:
    """The first and last of one or two numbers: where a term is alone, the kernel leaves out the second."""
    return numbers[0], numbers[-1]


def _power(n: int) -> int:
    """The least power of two that is at least ``n`` and ``LEAST``."""
    return max(LEAST, 1 << (n - 1).bit_length())


def _unit(moves: list[Moves]) -> bool:
    """Whether a result reads every position in its window, so that the kernel need not divide by a stride."""
    return all(m.down == (1, 1, 1) for m in moves)


def _in_lines(moves: list[Moves], rows: int) -> bool:
    """Whether each block of ``rows`` results lies within one line along the last axis."""
    return all(m.results[-1] % rows == 0 for m in moves)


def _wide(*tensors: torch.Tensor) -> bool:
    """Whether one of ``tensors`` needs offsets of more than 32 bits."""
    return any(
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= FAR
        for tensor in tensors
    )


def nearest(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor``, copied where its elements along ``dim`` are not next to each other in memory."""
    if tensor.stride(dim) == 1 or tensor.shape[dim] == 1:
        return tensor
    return tensor.movedim(dim, -1).contiguous().movedim(-1, dim)


def _gradient_memory(box: torch.Tensor, near: bool, empty: bool) -> torch.Tensor:
    """A tensor for the gradient of ``box``, zeros unless ``empty``; with ``near`` channels are next to each other."""
    make = box.new_empty if empty else box.new_zeros
    n, c, *sizes = box.shape
    return make((n, *sizes, c)).movedim(-1, 1) if near else make(box.shape)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    """Shape, strides and alignment of ``tensor``, which a program depends on."""
    return tensor.shape, tensor.stride(), tensor.data_ptr() % WORD
