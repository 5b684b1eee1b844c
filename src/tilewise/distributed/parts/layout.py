"""Which rank holds which part of a tensor, and which parts go from which rank to which. Nothing communicates here.

A tensor is cut along some of its last three dimensions, which are named ``d``, ``h`` and ``w`` in this order. The ranks
form a grid with one dimension for each dimension that is cut. The index of a rank is its row-major position in the
grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.problems.conv.axis import Axis

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
"""The dimensions of a tensor by name, counted from its end."""

Interval = tuple[int, int]
"""The elements ``[start, stop)`` along one dimension, counted in the whole tensor."""
Box = tuple[Interval, ...]
"""An interval along each dimension that is cut."""
Cuts = tuple[int, ...]
"""The cut points of a dimension, from 0 to its size: one more than there are ranks. Equal ones bound an empty part."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of the ranks that share a tensor.

    ``dims`` are the tensor's dimensions that are cut, counted from its end. ``shape`` is the number of ranks along
    each, and ``coords`` is the position of this rank in the grid.

    >>> grid = Grid(dims=(-2,), shape=(4,), coords=(1,))  # rank 1 of 4 along the height
    >>> grid.size, grid.index
    (4, 1)
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def index(self) -> int:
        """The index of this rank."""
        return self.index_of(self.coords)

    def index_of(self, coords: Sequence[int]) -> int:
        """The index of the rank at ``coords``."""
        index = 0
        for ranks, coord in zip(self.shape, coords, strict=True):
            index = index * ranks + coord
        return index

    def all_coords(self) -> list[tuple[int, ...]]:
        """The coordinates of every rank, in the order of their indices."""
        return list(itertools.product(*(range(n) for n in self.shape)))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor is cut: ``cuts`` has the cut points of each of the grid's dimensions.

    Raises ``ValueError`` where a dimension has not one cut point more than ranks, or they do not ascend from 0.

    >>> from tilewise.distributed import Grid, Layout
    >>> layout = Layout(Grid(dims=(-2,), shape=(2,), coords=(1,)), cuts=((0, 120, 224),))
    >>> layout.own, layout.part((1, 3, 224, 224))
    (((120, 224),), (1, 3, 104, 224))
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
        """The shape of the whole tensor, from the shape ``local`` of a part."""
        shape = list(local)
        for dim, size in zip(self.grid.dims, self.sizes, strict=True):
            shape[dim] = size
        return tuple(shape)

    def part(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor of shape ``whole``."""
        shape = list(whole)
        for dim, (start, stop) in zip(self.grid.dims, self.own, strict=True):
            shape[dim] = stop - start
        return tuple(shape)

    def cut_of(self, dim: int) -> Cuts | None:
        """The cut points of tensor dimension ``dim``, counted from the end; ``None`` where it is not cut."""
        return self.cuts[self.grid.dims.index(dim)] if dim in self.grid.dims else None

    def with_cuts(self, changed: dict[int, Cuts]) -> Layout:
        """This layout with other cut points for some dimensions, which are counted from the end."""
        return replace(
            self,
            cuts=tuple(changed.get(dim, cuts) for dim, cuts in zip(self.grid.dims, self.cuts, strict=True)),
        )


def even_cuts(size: int, ranks: int, multiple: int = 1) -> Cuts:
    """Cut points of ``size`` elements at multiples of ``multiple``, for parts of sizes as equal as possible.

    A network that halves its image k times keeps parts equal, and halos thin, with ``multiple=2**k``. Raises
    ``ValueError`` where ``multiple`` is not positive.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: a positive number would do")
    units = -(-size // multiple)
    return (*(min(size, multiple * (units * rank // ranks)) for rank in range(ranks)), size)


def output_cuts(cuts: Cuts, axis: Axis) -> Cuts:
    """The cut points of the outputs along ``axis``, whose inputs are cut at ``cuts``.

    An output belongs to the rank that holds the input under the centre of its window. So halos are as thin as
    possible: half a window each way.
    """
    shift = axis.before - (axis.reach - 1) // 2
    inner = (min(max(-(-(cut + shift) // axis.stride), 0), axis.out) for cut in cuts[1:-1])
    return (0, *inner, axis.out)


def input_cuts(cuts: Cuts, axis: Axis) -> Cuts:
    """The cut points of the inputs along ``axis``, whose outputs are cut at ``cuts``.

    Transposed convolutions need it. It is the inverse of :func:`output_cuts` where the stride divides the cut points.
    """
    shift = axis.before - (axis.reach - 1) // 2
    inner = (min(max(cut * axis.stride - shift, 0), axis.size) for cut in cuts[1:-1])
    return (0, *inner, axis.size)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What this rank needs of a tensor, and what other ranks need of this rank's part.

    ``need`` is the box of all that this rank needs, and ``own`` the box of it that lies in its own part. ``receives``
    has the boxes that come from other ranks, and ``sends`` those that go to them, each with the index of that rank: at
    most one for each rank.
    """

    own: Box | None
    receives: tuple[tuple[int, Box], ...]
    sends: tuple[tuple[int, Box], ...]
    need: Box


def meet(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; ``None`` where it is empty."""
    intersection = tuple(
        (max(first[0], second[0]), min(first[1], second[1])) for first, second in zip(a, b, strict=True)
    )
    return intersection if all(start < stop for start, stop in intersection) else None


@functools.lru_cache(maxsize=4096)
def transfer(layout: Layout, needs: tuple[tuple[Interval, ...], ...]) -> Transfer:
    """The transfer by which every rank gets what it needs.

    ``needs`` has, for each dimension that is cut, the interval that each rank along it needs.
    """
    grid = layout.grid
    boxes = [
        tuple(intervals[coord] for intervals, coord in zip(needs, coords, strict=True)) for coords in grid.all_coords()
    ]
    parts = [layout.box(coords) for coords in grid.all_coords()]
    here = grid.index
    receives, sends = [], []
    for other in range(grid.size):
        if other == here:
            continue
        if (box := meet(boxes[here], parts[other])) is not None:
            receives.append((other, box))
        if (box := meet(boxes[other], parts[here])) is not None:
            sends.append((other, box))
    return Transfer(meet(boxes[here], parts[here]), tuple(receives), tuple(sends), boxes[here])
