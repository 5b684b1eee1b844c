"""What halos add to a rank's part of a convolution, two boxes a launch, where those kernels serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.distributed.layout import Box, meet
from tilewise.distributed.share import Share, Term

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch, Program

__all__ = ["BLOCKS", "Blocks", "HaloTerms", "Kernels", "nearest", "why_not"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {"ieee": "tf32x3", "tf32": "tf32"}
"""Products of fp32 operands on matrix units, by torch's precision. Of others all are alike."""
CHANNELS, LEAST = 64, 16
"""Sides of blocks of a filter's gradient along channels at most, and of all at least."""
SHARE = 128
"""Rows that a block adds up at least of a filter's gradient."""
ENOUGH = 264
"""Blocks that fill a GPU twice: rows are in no more shares than that."""
ADD_BLOCK, ADD_AT_ONCE = 128, 16
STAGES = 3
"""Blocks of operands on their way at a time: a product's next one comes while it computes."""
WORD, FAR = 16, 1 << 31
"""Bytes of the widest word that is moved at once; elements that offsets of 32 bits do not reach."""


def why_not(groups: int, *tensors: torch.Tensor) -> str:
    """Why these kernels do not compute terms over ``tensors``; empty where they do."""
    if groups != 1:
        return f"{groups} groups"
    if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        return f"types {', '.join(str(t.dtype) for t in tensors)}"
    if not all(t.numel() for t in tensors):
        return "an empty tensor"
    return ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What blocks take at once: rows, channels and source channels of results, and rows of a filter's gradient.

    What is best for results and for gradients differs, most where channels lie far apart in memory.
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
"""To choose from by measuring."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Blocks of each kernel: of what adds to results, of boxes' gradients (``home``), and of the filter's."""

    add: Blocks
    home: Blocks
    sums: Blocks

    @staticmethod
    def alike(blocks: Blocks) -> Kernels:
        """The same ``blocks`` for all."""
        return Kernels(blocks, blocks, blocks)


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a tensor, with three spatial axes: strides of (n, c, d, h, w), and where they begin, in elements."""

    strides: tuple[int, ...]
    start: int

    @staticmethod
    def of(tensor: torch.Tensor, box: Box | None = None) -> View:
        """All of ``tensor``, or its elements from the starts of ``box`` on."""
        own = tensor.stride()
        start = 0 if box is None else sum(b * s for (b, _), s in zip(box, own[2:], strict=True))
        return View((*own[:2], *(0,) * (5 - len(own)), *own[2:]), start)

    @property
    def by_rows(self) -> bool:
        """Whether positions along the last axis are nearer to each other than channels."""
        return self.strides[4] < self.strides[1]

    def near(self, size: int, channels: int = 1) -> int:
        """How many elements of ``size`` bytes, along the axis ``channels``, lie in one word; 0: none beside another."""
        if self.strides[channels] != 1:
            return 0
        return math.gcd(WORD // size, *(s for axis, s in enumerate(self.strides) if axis != channels))


@dataclass(frozen=True, slots=True)
class Moves:
    """How results of a term read its source along each axis: see :mod:`tilewise.kernels.triton.halo`."""

    results: tuple[int, ...]
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    base: tuple[int, ...]
    up: tuple[int, ...]
    step: tuple[int, ...]
    down: tuple[int, ...]

    @staticmethod
    def of(term: Term, back: bool) -> Moves:
        """Those of a convolution over the term's axes, or with ``back`` of its gradient of the input."""
        per_axis = [(1, 1, 1, 0, 1, 1, 1)] * (3 - len(term.axes))
        for a in term.axes:
            forth = (a.out, a.size, a.kernel, -a.before, a.stride, a.dilation, 1)
            per_axis.append((a.size, a.out, a.kernel, a.before, 1, -a.dilation, a.stride) if back else forth)
        return Moves(*(tuple(column) for column in zip(*per_axis, strict=True)))

    def scalars(self, images: int, source: View, out: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the kernels take of one box, and of its strides."""
        rows = images * math.prod(self.results)
        return (rows, *self.results, *self.sizes, *self.taps, *self.base), (*source.strides, *out.strides)


class HaloTerms:
    """The terms of ``share.boxes``. ``precision`` is torch's of fp32 products, ``ieee`` or ``tf32``; ``kernels`` their
    blocks. A filter's gradient is in as many shares as ``limit`` bytes hold, one at least.

    Methods are those of :class:`~tilewise.distributed.terms.Terms`. Boxes are added in their order, so that the same
    bits come every time.
    """

    def __init__(self, share: Share, precision: str, kernels: Kernels, limit: int | None = None) -> None:
        self.share, self.product, self.kernels, self._limit = share, PRODUCTS[precision], kernels, limit
        terms = [(index, term) for index, term in enumerate(share.boxes) if term is not None]
        self._pairs = {overlap: _pairs(terms, overlap) for overlap in (False, True)}
        self._programs: dict[Any, list[Program]] = {}
        self._sizes: dict[Any, list[int]] = {}

    def filters(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """``w`` with those channels next to each other over which products are summed, so that words hold several."""
        return nearest(w, int(back == self.share.transposed)) if self._pairs[True] else w

    def results(self, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> Sequence[torch.Tensor]:
        """The boxes themselves, channels next to each other: their products go straight into the results."""
        return [nearest(box, 1) for box in boxes]

    def add(self, y: torch.Tensor, boxes: Sequence[torch.Tensor], w: torch.Tensor) -> None:
        """Add to this rank's results ``y`` what ``boxes`` bring."""
        key = ("add", _layout(y), _layout(w), *map(_layout, boxes))

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            back, wide = self.share.transposed, _wide(*boxes)
            views = [(View.of(boxes[i]), View.of(y, term.target)) for i, term in terms]
            pointers = [2 + i for i, _ in terms], [0] * len(terms)
            return self._gather(terms, back, y.shape[0], views, pointers, w, accumulate=True, wide=wide)

        tensors = [y, w, *boxes]
        for program in self._made(key, pair, tensors, overlap=False):
            program(tensors)

    def home(self, dy: torch.Tensor, w: torch.Tensor, boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of ``boxes``."""
        key = ("home", _layout(dy), _layout(w), *map(_layout, boxes))
        near = dy.stride(1) == 1
        found = [_like(box, near, empty=term is not None) for term, box in zip(self.share.boxes, boxes, strict=True)]

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            back = not self.share.transposed
            views = [(View.of(dy, term.target), View.of(found[i])) for i, term in terms]
            pointers = [0] * len(terms), [2 + i for i, _ in terms]
            return self._gather(terms, back, dy.shape[0], views, pointers, w, accumulate=False, wide=_wide(dy))

        tensors = [dy, w, *found]
        for program in self._made(key, pair, tensors, overlap=True):
            program(tensors)
        return found

    def sums(self, boxes: Sequence[torch.Tensor], w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        """What ``boxes`` add to the filter's gradient, in shares of the rows."""
        key = ("sums", _layout(w), _layout(dy), *map(_layout, boxes))

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            return self._weight_shares(terms, w, boxes, dy)

        if key not in self._sizes:
            self._sizes[key] = [self._shares(terms, w, dy)[2] for terms in self._pairs[True]]
        found = [torch.empty(size, dtype=torch.float32, device=dy.device) for size in self._sizes[key]]
        if found:
            programs = self._made(key, pair, [found[0], dy, *boxes], overlap=True)
            for shares, program in zip(found, programs, strict=True):
                program([shares, dy, *boxes])
        return found

    def add_sums(self, dw: torch.Tensor, found: Sequence[torch.Tensor]) -> None:
        """Add :meth:`sums` to ``dw``."""
        key = ("add sums", _layout(dw), *(shares.numel() for shares in found))
        sizes = iter(found)

        def pair(terms: list[tuple[int, Term]]) -> Launch:
            return self._add_shares(terms, dw, next(sizes).numel())

        if found:
            programs = self._made(key, pair, [found[0], dw], overlap=True)
            for shares, program in zip(found, programs, strict=True):
                program([shares, dw])

    def scratch(self, w: torch.Tensor, dy: torch.Tensor) -> int:
        """Bytes that :meth:`filters` or :meth:`sums` takes, one after the other."""
        return max(w.nbytes, 4 * sum(self._shares(terms, w, dy)[2] for terms in self._pairs[True]))

    def _made(
        self, key: Any, pair: Callable[[list[tuple[int, Term]]], Launch], tensors: list[torch.Tensor], overlap: bool
    ) -> list[Program]:
        from tilewise.kernels.triton.launch import Program

        if key not in self._programs:
            alignment = [math.gcd(t.data_ptr(), WORD) for t in tensors]
            self._programs[key] = [
                Program([pair(terms)], alignment, tensors[0].device) for terms in self._pairs[overlap]
            ]
        return self._programs[key]

    def _gather(
        self, terms: list[tuple[int, Term]], back: bool, images: int, views: list[tuple[View, View]],
        sources: tuple[list[int], list[int]], w: torch.Tensor, *, accumulate: bool, wide: bool,
    ) -> Launch:  # fmt: skip
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
        own = [moves[n].scalars(images, *views[n]) for n in two]
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
            *own[0][0], *own[0][1], *own[1][0], *own[1][1],
        )  # fmt: skip
        grid = (sum(tiles), -(-outputs // block), 1)
        return Launch(halo.gather, grid, tuple(pointers), scalars, constants, blocks.warps)

    def _shares(self, terms: list[tuple[int, Term]], w: torch.Tensor, dy: torch.Tensor) -> tuple[int, int, int]:
        """Rows of one share, how many shares there are, and the elements that all take."""
        moves = [Moves.of(term, False) for _, term in terms]
        rows = max(dy.shape[0] * math.prod(m.results) for m in moves)
        taps = sum(math.prod(m.taps) for m in moves)
        tiles = -(-w.shape[0] // CHANNELS) * -(-w.shape[1] // CHANNELS)
        splits = min(-(-rows // SHARE), -(-ENOUGH // (tiles * taps)))
        if self._limit is not None:
            each = 4 * taps * w.shape[0] * w.shape[1] * len(self._pairs[True])
            splits = max(1, min(splits, self._limit // each))
        at_once = self.kernels.sums.sum_rows
        share = -(-rows // (splits * at_once)) * at_once
        splits = -(-rows // share)
        return share, splits, splits * taps * w.shape[0] * w.shape[1]

    def _weight_shares(
        self, terms: list[tuple[int, Term]], w: torch.Tensor, boxes: Sequence[torch.Tensor], dy: torch.Tensor
    ) -> Launch:
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
        own = [moves[n].scalars(dy.shape[0], *views[n]) for n in two]
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
            *own[0][0], *own[0][1], *own[1][0], *own[1][1],
        )  # fmt: skip
        grid = (-(-outputs // block_o) * -(-inputs // block_i), splits, sum(taps))
        return Launch(halo.weight_shares, grid, tuple(pointers), scalars, constants, self.kernels.sums.warps)

    def _add_shares(self, terms: list[tuple[int, Term]], dw: torch.Tensor, elements: int) -> Launch:
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
    """Terms by twos. Without ``overlap`` none that share a result, which two blocks would add to at once."""
    left, found = list(terms), []
    while left:
        first = left.pop(0)
        fits = (n for n, (_, term) in enumerate(left) if overlap or meet(first[1].target, term.target) is None)
        second = next(fits, None)
        found.append([first] if second is None else [first, left.pop(second)])
    return found


def _twice(numbers: Sequence[int]) -> tuple[int, int]:
    """Two of them; one alone stands for both, and the second does nothing."""
    return numbers[0], numbers[-1]


def _power(n: int) -> int:
    return max(LEAST, 1 << (n - 1).bit_length())


def _unit(moves: list[Moves]) -> bool:
    """Whether a result reads every position that it meets."""
    return all(m.down == (1, 1, 1) for m in moves)


def _in_lines(moves: list[Moves], rows: int) -> bool:
    """Whether blocks of so many rows lie within one line."""
    return all(m.results[-1] % rows == 0 for m in moves)


def _wide(*tensors: torch.Tensor) -> bool:
    """Whether an element of one is further from its first than 32 bits tell."""
    return any(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) >= FAR for t in tensors)


def nearest(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor`` with neighbours along ``dim`` next to each other in memory; itself where they are."""
    if tensor.stride(dim) == 1 or tensor.shape[dim] == 1:
        return tensor
    return tensor.movedim(dim, -1).contiguous().movedim(-1, dim)


def _like(box: torch.Tensor, near: bool, empty: bool) -> torch.Tensor:
    """Memory for a box's gradient, with channels next to each other where ``near``."""
    make = box.new_empty if empty else box.new_zeros
    n, c, *sizes = box.shape
    return make((n, *sizes, c)).movedim(-1, 1) if near else make(box.shape)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), tensor.data_ptr() % WORD
