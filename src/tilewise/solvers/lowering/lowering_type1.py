"""Lowering type 1 of Caffe con Troll: all windows are copied out, then one product gives the result."""

from __future__ import annotations

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.lowering._lowering import Lowering


class LoweringType1(Lowering):
    """Expensive lowering (Hadjis et al. 2015, section 2.1, type 1; Chellapilla's im2col).

    The operand grows by the number of taps, the product is the final result. Best where the result has more channels
    than the operand. DGRAD with a stride multiplies the zeros between the gradient's elements too.
    """

    name, version = "lowering_type1", 1

    def lowered(self, p: ConvProblem) -> tuple[bool, ...]:
        """Which axes are lowered: all of them."""
        return (True,) * p.dims
