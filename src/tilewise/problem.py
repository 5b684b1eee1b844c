"""Problems, as users import them: :class:`ConvProblem` and what it is made of and cut into."""

from __future__ import annotations

from tilewise.problems.base import DTYPES, Part, Problem, Range, Write, layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

__all__ = ["DTYPES", "Axis", "ConvProblem", "Part", "Pass", "Problem", "Range", "Write", "layout_of"]
