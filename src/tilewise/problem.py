"""Problems, as users import them: one class for each kind, what problems are made of and what they are cut into.

>>> from tilewise.problem import DTYPES
>>> DTYPES["bf16"]
torch.bfloat16
"""

from __future__ import annotations

from tilewise.problems.base import DTYPES, Part, Problem, Range, Write, layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.problems.separable.problem import SeparableProblem

__all__ = [
    "DTYPES",
    "Axis",
    "ConvProblem",
    "GemmProblem",
    "Part",
    "Pass",
    "Problem",
    "Range",
    "RecurrentProblem",
    "SeparableProblem",
    "Write",
    "layout_of",
]
