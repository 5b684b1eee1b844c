"""Problems, as users import them: :class:`ConvProblem`, :class:`GemmProblem`, what they are made of and cut into."""

from __future__ import annotations

from tilewise.problems.base import DTYPES, Part, Problem, Range, Write, layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["DTYPES", "Axis", "ConvProblem", "GemmProblem", "Part", "Pass", "Problem", "Range", "Write", "layout_of"]
