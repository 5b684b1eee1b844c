"""What fp32 matrix products made of fp16 parts share: their tiles, how long sums may get, and what they do not take."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["ADD_BLOCK", "LONGEST", "MOST_GROUPS", "UNIT", "Tile", "refused"]

UNIT = Axis(1, 1)
"""An axis of one element, for spatial axes that a problem does not have."""

LONGEST = 1024
"""Products that matrix units sum before the sum is added in fp32 outside of them, which keeps fp32's accuracy."""

ADD_BLOCK = 256
"""Elements that one program adds up of partial sums."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the result that one program computes: ``channels`` by ``columns``, ``depth`` products at a time.

    Columns are pixels, or in a weight gradient pairs of a tap and an input channel. ``warps`` and ``stages`` are
    Triton's.
    """

    channels: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def halves(self) -> tuple[int, int]:
        """``channels`` as a power of two and the rest (0 or more), as Triton's blocks are powers of two."""
        first = 1 << (self.channels.bit_length() - 1)
        return first, self.channels - first


MOST_GROUPS = 8
"""Groups of a convolution, each of which is a launch of its own."""


def refused(p: ConvProblem) -> list[str]:
    """Why products of fp16 parts, launched group by group, do not suit ``p``. Empty where they do."""
    reasons = []
    if p.groups > MOST_GROUPS:
        reasons.append(f"launches each group by itself: at most {MOST_GROUPS} groups, not {p.groups}")
    if p.precision == "tf32":
        reasons.append("multiplies in fp32 accuracy, three products for one, not with precision tf32")
    if p.out_dtype != "fp32":
        reasons.append(f"gives fp32, not {p.out_dtype}")
    return reasons
