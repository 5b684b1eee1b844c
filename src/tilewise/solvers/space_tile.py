"""Tiles of an image, a volume or a signal with their halo (Jin et al. 2018, section 2, on one device).

What an algorithm keeps of one image shrinks with the tile, which no batch size changes; and a tile of an image past
2^31 elements can be counted in 32 bits, which several libraries and kernels do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilewise.axis import Axis
from tilewise.plan import Config
from tilewise.problem import ALIGNMENT, ConvProblem, Part, Pass, dense_strides
from tilewise.solvers.base import Cost, Split

MOST_ELEMENTS = 2**31 - 2**20
"""Of one image: more are counted in 64 bits, and some libraries round up before they count."""
IMAGES = ("x", "y")
MOST_TILES = 1024
"""Smaller tiles would be calls without number, each of little work."""


class SpaceTile(Split):
    """Cuts the outermost spatial axis, whose tiles are runs of whole rows.

    A tile reads its halo where it lies, so nothing is copied or concatenated. FPROP and DGRAD gather: each tile sets
    its own rows. WGRAD adds its tiles up in order, in fp32. Rows that meet padding are tiles of their own, so that all
    tiles inside are one problem, with as much padding before as after wherever the stride leaves it so.
    """

    name, version = "space_tile", 1
    axis, level, alike = "space", 3, False

    def unsupported(self, p: ConvProblem) -> list[str]:
        """One row has no parts."""
        axis = self.axis_of(p)
        return [] if p.extent(axis) > 1 else [f"one place along {axis} cannot be divided"]

    def axis_of(self, p: ConvProblem) -> str:
        """``d`` of volumes, ``h`` of images, ``w`` of signals."""
        return p.space[0]

    def idle(self, p: ConvProblem) -> str:
        """Nothing to gain for images that can be counted in 32 bits."""
        if _elements(p) > MOST_ELEMENTS:
            return ""
        return f"{super().idle(p)}, and one image has less than 2^31 elements"

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """A half of the axis, a quarter and so on, such that tiles inside start alike; none that is too large again."""
        if policy == "undivided":
            return ()
        whole = p.extent(self.axis_of(p))
        found = (_rounded(p, -(-whole // 2**n)) for n in range(1, MOST_TILES.bit_length()))
        most = MOST_ELEMENTS * whole // _elements(p)
        return [size for size in dict.fromkeys(found) if size < whole and size <= most]

    def cut(self, p: ConvProblem, size: int) -> tuple[int, ...]:
        """Rows that meet the leading padding, then tiles of ``size`` and a rest, then rows that meet the trailing."""
        whole = p.extent(self.axis_of(p))
        before, after = _borders(p.axes[0], gathers=p.pass_ is Pass.DGRAD)
        before = min(before, whole)
        after = min(after, whole - before)
        stretches = (before, whole - before - after, after)
        return tuple(part for length in stretches for part in _tiles(length, size))

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of most tiles of ``size``."""
        parts = self.children(p, Config(sizes=self.cut(p, size)))
        counts = Counter(part.problem for part in parts if part.problem is not None)
        axis = self.axis_of(p)
        return max(counts, key=lambda kind: counts[kind] * kind.extent(axis))

    def children(self, p: ConvProblem, c: Config) -> tuple[Part, ...]:
        """The tiles in order; those that differ in nothing else promise the alignment that all of them have."""
        parts = super().children(p, c)
        common: dict[object, tuple[int, ...]] = {}
        for part in parts:
            if part.problem is not None:
                kind, own = (part.problem.axes, part.problem.layouts), part.problem.alignment
                common[kind] = tuple(map(math.gcd, common.get(kind, own), own))
        return tuple(_promising(part, common) for part in parts)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Its children's; nothing of its own."""
        return Cost(0, 0, kernels=0)


def _promising(part: Part, common: dict[object, tuple[int, ...]]) -> Part:
    child = part.problem
    if child is None:
        return part
    ax, aw, ay = common[child.axes, child.layouts]
    if child.alignment == (ax, aw, ay):
        return part
    return replace(part, problem=replace(child, alignment=(ax, aw, ay)))


def _elements(p: ConvProblem) -> int:
    """Of one image, before or after the convolution, whichever is larger."""
    return max(math.prod(p.shape(role)[1:]) for role in IMAGES)


def _tiles(length: int, size: int) -> list[int]:
    full, rest = divmod(length, size)
    return [size] * full + [rest] * (rest > 0)


def _borders(axis: Axis, *, gathers: bool) -> tuple[int, int]:
    """How many places of the result meet padding at either end; of an input's gradient (``gathers``), the outputs' end.

    Counted as :meth:`Axis.reading` and :meth:`Axis.writing` clip: the places in between all use as much.
    """
    if gathers:
        return max(0, axis.reach - 1 - axis.before), max(0, axis.size + axis.before - axis.out * axis.stride)
    last = (axis.size + axis.before - axis.reach) // axis.stride
    return max(0, -(-axis.before // axis.stride)), max(0, axis.out - 1 - last)


def _rounded(p: ConvProblem, size: int) -> int:
    """``size`` or a little more: tiles start at equal places of the stride and, where there is room, of a vector."""
    phase = p.axes[0].stride if p.pass_ is Pass.DGRAD else 1
    steps = [phase]
    for role in IMAGES:
        layout = p.layout(role)
        row = 1 if layout == "view" else dense_strides(p.shape(role), layout)[2]
        steps.append(ALIGNMENT // math.gcd(ALIGNMENT, row * p.torch_dtype(role).itemsize))
    unit = next(unit for unit in (math.lcm(*steps), phase, 1) if unit <= size)
    return -(-size // unit) * unit
