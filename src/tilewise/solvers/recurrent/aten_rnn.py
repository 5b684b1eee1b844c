"""Torch's own recurrent layers: the baseline that every plan of one is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.recurrent.one_piece import in_one_piece
from tilewise.problems.recurrent.packing import Packing
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.recurrent._layers import Layer, Outputs
from tilewise.solvers.recurrent._recurrent import RecurrentSolver, recurrent_cost


class AtenRnn(RecurrentSolver):
    """``aten::lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, with torch's flags as they are, and autograd for training.

    On a GPU cuDNN computes them and takes the weights in one piece of memory, as ``nn.LSTM`` keeps them. Weights that
    do not lie so are copied in every call.
    """

    name, version = "aten_rnn", 1
    baseline = projects = True

    def cost(self, p: RecurrentProblem, c: Config) -> Cost:
        """The products, and a few launches a step."""
        launches = p.time * p.layers * p.directions * (1 if p.task == "inference" else 2)
        return recurrent_cost(p, c, launches if p.device_type == "cpu" else launches // 2 + 10)

    def is_deterministic(self, p: RecurrentProblem, c: Config) -> bool:
        """cuDNN's backward may use atomics unless torch is told otherwise."""
        return p.device_type == "cpu" or p.task == "inference" or torch.are_deterministic_algorithms_enabled()

    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """Torch's operator, and autograd's gradients of it."""
        return _TorchLayer(p, getattr(torch._C._VariableFunctions, p.cell))


@dataclass(frozen=True)
class _TorchLayer:
    """A layer by torch's ``operator``."""

    p: RecurrentProblem
    operator: Any

    def forward(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        dropout: float = 0.0,
        packing: Packing | None = None,
        keep: bool,
    ) -> Outputs:
        """As :meth:`Layer.forward`. Saved are the results with their graph, and the leaves that lead to them."""
        sizes = None if packing is None else packing.sizes
        if not keep:
            return (*self._call(x, h0, c0, in_one_piece(self.p, weights), dropout, sizes), None)
        given = [x, h0, *([] if c0 is None else [c0]), *in_one_piece(self.p, weights)]
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in given]
            first = 2 if c0 is None else 3
            cell = None if c0 is None else leaves[2]
            results = self._call(leaves[0], leaves[1], cell, leaves[first:], dropout, sizes)
        y, hn, cn = results
        detached = y.detach(), hn.detach(), None if cn is None else cn.detach()
        return (*detached, (leaves, [each for each in results if each is not None]))

    def backward(
        self,
        saved: Any,
        weights: Sequence[Tensor],
        dy: Tensor | None,
        dhn: Tensor | None,
        dcn: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """As :meth:`Layer.backward`."""
        leaves, results = saved
        if self.p.cell != "lstm":
            needs = (*needs[:2], *needs[3:])
        wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
        given = [(result, d) for result, d in zip(results, (dy, dhn, dcn), strict=False) if d is not None]
        found: tuple[Tensor | None, ...] = ()
        if wanted and given:
            ends, starts = zip(*given, strict=True)
            found = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        rest = iter(found)
        gradients = [next(rest, None) if needed else None for needed in needs]
        zeroed = [
            torch.zeros_like(leaf) if needed and gradient is None else gradient
            for leaf, needed, gradient in zip(leaves, needs, gradients, strict=True)
        ]
        return tuple(zeroed) if self.p.cell == "lstm" else (*zeroed[:2], None, *zeroed[2:])

    def _call(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        dropout: float,
        sizes: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Call the operator: y, hn and cn. ``sizes`` are the numbers of rows of a packed batch's steps."""
        p = self.p
        state = h0 if c0 is None else (h0, c0)
        train = dropout > 0 or x.requires_grad
        options = (list(weights), p.biases, p.layers, dropout, train, p.directions == 2)
        if sizes is None:
            y, hn, *cn = self.operator(x, state, *options, False)
        else:
            y, hn, *cn = self.operator(x, sizes, state, *options)
        return y, hn, cn[0] if cn else None
