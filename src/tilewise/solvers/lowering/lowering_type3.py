"""Lowering type 3 of Caffe con Troll: the product is taken on the operand as it is, and its taps are summed after."""

from __future__ import annotations

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.lowering._lowering import Lowering, pointwise_is_lowered


class LoweringType3(Lowering):
    """Expensive lifting (Hadjis et al. 2015, section 2.1, type 3).

    Nothing is copied before the product, which grows by the number of taps. Best where the operand has more channels
    than the result. DGRAD is Caffe's own: product, then col2im. FPROP and WGRAD with a stride compute products that no
    output uses.
    """

    name, version = "lowering_type3", 1

    def lowered(self, p: ConvProblem) -> tuple[bool, ...]:
        """None, but for axes of one tap, which do not grow."""
        return tuple(axis.kernel == 1 and pointwise_is_lowered(p) for axis in p.axes)

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Kernels of one tap: there it is type 1."""
        if all(axis.kernel == 1 for axis in p.axes):
            return ["needs a kernel of more than one tap; else it is lowering_type1"]
        return super().unsupported(p)
