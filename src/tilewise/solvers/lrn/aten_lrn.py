"""Torch's own local response normalization: the baseline that every plan of one is measured against."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.lrn._lrn import LrnSolver


def _alone() -> Any:
    """torch's own function, which calls torch's own pooling whatever stands in the place of that."""
    own = {f"avg_pool{n}d": getattr(torch._C._nn, f"avg_pool{n}d") for n in (2, 3)}
    found = F.local_response_norm
    return types.FunctionType(found.__code__, {**vars(F), **own}, found.__name__, found.__defaults__)


FUNCTION = _alone()
"""torch's own function, as it is when this file is imported."""
TEMPORARIES = {"inference": 3, "training": 7}
"""Tensors of the input's size that torch holds at a time beside operands and results."""
PASSES = {"inference": 14, "training": 50}
"""How often torch moves a tensor of the input's size through memory, roughly."""


class AtenLrn(LrnSolver):
    """``F.local_response_norm``: squares, padding, average pooling, power and division; autograd for training."""

    name, version = "aten_lrn", 1
    own_output = True
    baseline = True

    def unsupported(self, p: LrnProblem) -> list[str]:
        """A reason for types in which torch has no three-dimensional pooling on a CPU."""
        if p.device_type == "cpu" and p.dtype != "fp32" and len(p.space) > 1:
            return [f"torch pools channels of images on a CPU in fp32 alone, not {p.dtype}"]
        return []

    def hidden_workspace(self, p: LrnProblem, c: Config) -> int:
        """Bytes of the tensors between the steps."""
        return TEMPORARIES[p.task] * p.nbytes("x")

    def cost(self, p: LrnProblem, c: Config) -> Cost:
        """Each step moves its tensors through memory."""
        return Cost(p.flops, p.bytes, PASSES[p.task] // 2, apart=PASSES[p.task] * p.nbytes("x"))

    def bind(self, p: LrnProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A run of torch's function into new tensors."""
        arguments = p.size, p.alpha, p.beta, p.k

        def inference(x: Tensor, *rest: Any) -> Tensor:
            with torch.no_grad():
                y: Tensor = FUNCTION(x, *arguments)
            return y

        def training(x: Tensor, dy: Tensor, *rest: Any) -> Any:
            with torch.inference_mode(False), torch.enable_grad():
                leaf = x.detach().requires_grad_()
                y = FUNCTION(leaf, *arguments)
            return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

        return inference if p.task == "inference" else training
