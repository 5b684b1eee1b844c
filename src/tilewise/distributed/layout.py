"""Who holds which part of an image, and what parts of it go from whom to whom: plain arithmetic, no communication.

A tensor is cut along some of its last three dimensions, which are named ``d``, ``h``, ``w`` from the third last on,
whatever comes before them. The ranks form a grid with one dimension for each of those. Ranks have an index: the
row-major position in the grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.axis import Axis

__all__ = [
    "NAMES",
    "Box",
    "Grid",
    "Interval",
    "Layout",
    "Transfer",
    "even_cuts",
    "input_cuts",
    "meet",
    "output_cuts",
    "transfer",
]

NAMES = {"d": -3, "h": -2, "w": -1}
"""Dimensions of a tensor by name, counted from its end."""

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""Elements ``[start, stop)`` along each dimension that is cut, counted in the whole tensor."""
Cuts = tuple[int, ...]
"""Where a dimension is cut: 0, ..., its size; one more than there are ranks. Equal ones bound an empty part."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks as they share a tensor: ``dims`` are the tensor's dimensions that are cut, counted from its end.

    ``shape`` is how many ranks share each, ``coords`` where among them this rank is.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def index(self) -> int:
        """This rank's."""
        return self.index_of(self.coords)

    def index_of(self, coords: Sequence[int]) -> int:
        """Index of the rank at ``coords``."""
        index = 0
        for n, c in zip(self.shape, coords, strict=True):
            index = index * n + c
        return index

    def all_coords(self) -> list[tuple[int, ...]]:
        """Coordinates of every rank, by index."""
        return list(itertools.product(*(range(n) for n in self.shape)))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor is cut: ``cuts`` has the cut points of each of the grid's dimensions.

    Raises ``ValueError`` for cut points that do not go from 0 up to a size, one more than there are ranks.
    """

    grid: Grid
    cuts: tuple[Cuts, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.grid.dims):
            raise ValueError(f"cuts={self.cuts}: {len(self.grid.dims)} dimensions are cut")
        for cuts, ranks in zip(self.cuts, self.grid.shape, strict=True):
            if len(cuts) != ranks + 1 or cuts[0] != 0 or any(a > b for a, b in itertools.pairwise(cuts)):
                raise ValueError(f"cuts={cuts}: {ranks + 1} ascending numbers from 0 would do")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The whole tensor's size along each dimension that is cut."""
        return tuple(cuts[-1] for cuts in self.cuts)

    @property
    def own(self) -> Box:
        """The part that this rank holds."""
        return self.box(self.grid.coords)

    def box(self, coords: Sequence[int]) -> Box:
        """The part that the rank at ``coords`` holds."""
        return tuple((cuts[c], cuts[c + 1]) for cuts, c in zip(self.cuts, coords, strict=True))

    def whole(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor for the ``local`` shape of a part."""
        shape = list(local)
        for dim, size in zip(self.grid.dims, self.sizes, strict=True):
            shape[dim] = size
        return tuple(shape)

    def part(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's part of a tensor of shape ``whole``."""
        shape = list(whole)
        for dim, (start, stop) in zip(self.grid.dims, self.own, strict=True):
            shape[dim] = stop - start
        return tuple(shape)

    def cut_of(self, dim: int) -> Cuts | None:
        """Cut points of tensor dimension ``dim``, counted from the end; ``None`` where it is whole."""
        return self.cuts[self.grid.dims.index(dim)] if dim in self.grid.dims else None

    def with_cuts(self, changed: dict[int, Cuts]) -> Layout:
        """The layout with other cut points for some dimensions, counted from the end."""
        return replace(
            self,
            cuts=tuple(changed.get(dim, cuts) for dim, cuts in zip(self.grid.dims, self.cuts, strict=True)),
        )


def even_cuts(size: int, ranks: int, multiple: int = 1) -> Cuts:
    """Cut points of ``size`` elements in parts as equal as can be, all but the last at multiples of ``multiple``.

    A network that halves its image k times keeps parts equal, and halos thin, with ``multiple=2**k``.
    Raises ``ValueError`` where ``multiple`` is not positive.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: a positive number would do")
    units = -(-size // multiple)
    return (*(min(size, multiple * (units * rank // ranks)) for rank in range(ranks)), size)


def output_cuts(cuts: Cuts, axis: Axis) -> Cuts:
    """Cut points of the outputs along ``axis``, whose inputs are cut at ``cuts``.

    An output belongs to the rank that holds the input under the centre of its window, so that halos are as thin as
    can be: half a window each way.
    """
    shift = axis.before - (axis.reach - 1) // 2
    inner = (min(max(-(-(cut + shift) // axis.stride), 0), axis.out) for cut in cuts[1:-1])
    return (0, *inner, axis.out)


def input_cuts(cuts: Cuts, axis: Axis) -> Cuts:
    """Cut points of the inputs along ``axis`` of which the outputs are cut at ``cuts``: for a transposed convolution.

    With ``output_cuts`` there and back are the same cut points, where strides divide them.
    """
    shift = axis.before - (axis.reach - 1) // 2
    inner = (min(max(cut * axis.stride - shift, 0), axis.size) for cut in cuts[1:-1])
    return (0, *inner, axis.size)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What this rank needs of a tensor, and what the others need of it.

    ``own`` is what it needs of its own part; ``receives`` and ``sends`` are the boxes that come from and go to other
    ranks, by their index: at most one each. A box may come from any rank. ``shape`` says how large what it needs is.
    """

    own: Box | None
    receives: tuple[tuple[int, Box], ...]
    sends: tuple[tuple[int, Box], ...]
    need: Box


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes share, ``None`` for nothing."""
    both = tuple((max(s, u), min(t, v)) for (s, t), (u, v) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


@functools.lru_cache(maxsize=4096)
def transfer(layout: Layout, needs: tuple[tuple[Interval, ...], ...]) -> Transfer:
    """The transfer by which every rank gets what it needs.

    ``needs`` has, for each dimension that is cut, the interval that each rank along it needs.
    """
    grid = layout.grid
    boxes = [tuple(need[c] for need, c in zip(needs, coords, strict=True)) for coords in grid.all_coords()]
    parts = [layout.box(coords) for coords in grid.all_coords()]
    me = grid.index
    receives, sends = [], []
    for other in range(grid.size):
        if other == me:
            continue
        if (box := meet(boxes[me], parts[other])) is not None:
            receives.append((other, box))
        if (box := meet(boxes[other], parts[me])) is not None:
            sends.append((other, box))
    return Transfer(meet(boxes[me], parts[me]), tuple(receives), tuple(sends), boxes[me])
