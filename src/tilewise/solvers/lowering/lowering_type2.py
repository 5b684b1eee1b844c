"""Lowering type 2 of Caffe con Troll: windows along one axis are copied out, the other axes are lifted."""

from __future__ import annotations

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.lowering._lowering import Lowering, pointwise_is_lowered


class LoweringType2(Lowering):
    """Balanced lowering (Hadjis et al. 2015, section 2.1, type 2).

    The operand grows by the taps of the last axis, the product by those of the others.
    """

    name, version = "lowering_type2", 1
    dims = frozenset({2, 3})

    def lowered(self, p: ConvProblem) -> tuple[bool, ...]:
        """The last axis with more than one tap."""
        wide = [i for i, axis in enumerate(p.axes) if axis.kernel > 1]
        return tuple(i == wide[-1] if axis.kernel > 1 else pointwise_is_lowered(p) for i, axis in enumerate(p.axes))

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Kernels that are wider than one tap along fewer than two axes: there it is type 1."""
        if sum(axis.kernel > 1 for axis in p.axes) < 2:
            return ["needs a kernel of more than one tap along two axes; else it is lowering_type1"]
        return super().unsupported(p)
