"""Local response normalization in parts of the batch."""

from __future__ import annotations

from typing import ClassVar

from tilewise.problems.base import Problem
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.common.batch_blocks import BatchBlocks


class ImageBlocks(BatchBlocks):
    """Divides the images of a batch, which do not depend on each other (Oyama et al. 2018, mu-cuDNN, section III-B).

    It keeps torch's function, which holds several tensors of the input's size, within a memory limit.
    """

    name, version = "image_blocks", 1
    solves: ClassVar[type[Problem]] = LrnProblem
    exact_memory = True
