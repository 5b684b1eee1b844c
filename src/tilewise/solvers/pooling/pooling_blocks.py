"""Pooling in parts of the batch."""

from __future__ import annotations

from typing import ClassVar

from tilewise.problems.base import Problem
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.common.batch_blocks import BatchBlocks


class PoolingBlocks(BatchBlocks):
    """Divides the images of a batch, which do not depend on each other (Oyama et al. 2018, mu-cuDNN, section III-B).

    It keeps what is held of each maximum between forward and backward, torch's 8 bytes, within a memory limit.
    """

    name, version = "pooling_blocks", 1
    solves: ClassVar[type[Problem]] = PoolingProblem
    exact_memory = True
