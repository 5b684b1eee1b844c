"""Tiles of an image, a volume or a signal with their halo (Jin et al. 2018, section 2, on one device).

What an algorithm keeps of one image shrinks with the tile, which no batch size changes; and a tile of an image past
2^31 elements can be counted in 32 bits, which several libraries and kernels do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT, Part, dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost
from tilewise.solvers.conv import ConvSplit

MOST_ELEMENTS = 2**31 - 2**20
"""Most elements of one image that 32 bits count; some libraries round up before they count."""
IMAGES = ("x", "y")
MOST_TILES = 1024
"""Most tiles of one image: smaller ones would be many calls of little work."""


class SpaceTile(ConvSplit):
    """Divides the outermost spatial axis into tiles of whole rows.

    A tile reads its halo where it lies, so nothing is copied or concatenated. In FPROP and DGRAD each tile gathers its
    halo and writes its own rows. WGRAD adds its tiles in order, in fp32. Rows that meet padding are tiles of their own,
    so that all inner tiles are the same problem, with equal padding before and after wherever the stride allows it.
    """

    name, version = "space_tile", 1
    axis, level, alike = "space", 3, False

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A reason where the axis has only one place."""
        axis = self.axis_of(p)
        return [] if p.extent(axis) > 1 else [f"one place along {axis} cannot be divided"]

    def axis_of(self, p: ConvProblem) -> str:
        """``d`` of volumes, ``h`` of images, ``w`` of signals."""
        return p.space[0]

    def idle(self, p: ConvProblem) -> str:
        """A reason not to divide images whose elements 32 bits can count."""
        if _elements(p) > MOST_ELEMENTS:
            return ""
        return f"{super().idle(p)}, and one image has less than 2^31 elements"

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """A half of the axis, a quarter and so on, rounded so that inner tiles start alike; few enough to count in 32
        bits.
        """
        if policy == "undivided":
            return ()
        whole = p.extent(self.axis_of(p))
        halvings = (_rounded(p, -(-whole // 2**n)) for n in range(1, MOST_TILES.bit_length()))
        most = MOST_ELEMENTS * whole // _elements(p)
        return [size for size in dict.fromkeys(halvings) if size < whole and size <= most]

    def cut(self, p: ConvProblem, size: int) -> tuple[int, ...]:
        """Rows that meet leading padding, then tiles of ``size`` and a rest, then rows that meet trailing padding."""
        whole = p.extent(self.axis_of(p))
        before, after = _borders(p.axes[0], gathers=p.pass_ is Pass.DGRAD)
        before = min(before, whole)
        after = min(after, whole - before)
        stretches = (before, whole - before - after, after)
        return tuple(part for length in stretches for part in _tiles(length, size))

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem that most tiles of ``size`` have."""
        parts = self.children(p, Config(sizes=self.cut(p, size)))
        counts = Counter(part.problem for part in parts if part.problem is not None)
        axis = self.axis_of(p)
        return max(counts, key=lambda kind: counts[kind] * kind.extent(axis))

    def children(self, p: ConvProblem, c: Config) -> tuple[Part[ConvProblem], ...]:
        """The tiles in order. Tiles that differ only in alignment declare the alignment that all of them have."""
        parts = super().children(p, c)
        common: dict[object, tuple[int, ...]] = {}
        for part in parts:
            if part.problem is not None:
                kind, alignment = (part.problem.axes, part.problem.layouts), part.problem.alignment
                common[kind] = tuple(map(math.gcd, common.get(kind, alignment), alignment))
        return tuple(_promising(part, common) for part in parts)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)


def _promising(part: Part[ConvProblem], common: dict[object, tuple[int, ...]]) -> Part[ConvProblem]:
    """``part`` with the alignment common to all parts of its kind."""
    child = part.problem
    if child is None:
        return part
    ax, aw, ay = common[child.axes, child.layouts]
    if child.alignment == (ax, aw, ay):
        return part
    return replace(part, problem=replace(child, alignment=(ax, aw, ay)))


def _elements(p: ConvProblem) -> int:
    """Elements of one image, before or after the convolution, whichever has more."""
    return max(math.prod(p.shape(role)[1:]) for role in IMAGES)


def _tiles(length: int, size: int) -> list[int]:
    """Sizes of tiles that cover ``length``: as many of ``size`` as fit, and a rest."""
    full, rest = divmod(length, size)
    return [size] * full + [rest] * (rest > 0)


def _borders(axis: Axis, *, gathers: bool) -> tuple[int, int]:
    """How many places of the result meet padding at each end.

    In a data gradient (``gathers``) it is those that read beyond the ends of the output gradient. It is counted as
    :meth:`Axis.reading` and :meth:`Axis.writing` clip: the places between all read equally much.
    """
    if gathers:
        return max(0, axis.reach - 1 - axis.before), max(0, axis.size + axis.before - axis.out * axis.stride)
    last = (axis.size + axis.before - axis.reach) // axis.stride
    return max(0, -(-axis.before // axis.stride)), max(0, axis.out - 1 - last)


def _rounded(p: ConvProblem, size: int) -> int:
    """``size`` or a little more, so that tiles start at multiples of the stride.

    Where there is room they also start at aligned addresses.
    """
    phase = p.axes[0].stride if p.pass_ is Pass.DGRAD else 1
    steps = [phase]
    for role in IMAGES:
        layout = p.layout(role)
        row = 1 if layout == "view" else dense_strides(p.shape(role), layout)[2]
        steps.append(ALIGNMENT // math.gcd(ALIGNMENT, row * p.torch_dtype(role).itemsize))
    unit = next(unit for unit in (math.lcm(*steps), phase, 1) if unit <= size)
    return -(-size // unit) * unit
