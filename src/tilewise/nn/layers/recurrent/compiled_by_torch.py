"""torch's own recurrent layers inside ``torch.compile`` as one operator each, of any sizes.

Dynamo takes no recurrent module. Where it is told to, AOTAutograd unrolls a GRU step by step, and fails on the LSTM of
oneDNN. So where a planned module meets a call without a plan, this operator runs torch's.

torch's operators do not say what they keep for their backward. So the graph that autograd makes within the forward is
an attribute of one of its results, an empty tensor that the compiled graph saves like any other: it lives as long, and
the backward finds it there. Where it is lost (a hook on saved tensors that copies, a CUDA graph), the backward computes
the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.machine import random_states
from tilewise.machine.device import is_capturing
from tilewise.machine.torch_state import recording_gradients, undisturbed
from tilewise.nn.layers.recurrent.by_torch import ByTorch, Dropped, gradients_in
from tilewise.nn.layers.recurrent.saved import apart_in_memory

__all__: list[str] = []

GRAPH = "_tilewise_graph"
"""The attribute of a kept tensor that has a forward's leaves, None where there is none, and its results."""

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "rnn_by_torch(Tensor x, Tensor h0, Tensor? c0, Tensor[] weights, str cell, bool biases, int layers, "
    "int directions, float dropout, bool keep) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_library.define(
    "rnn_by_torch_backward(Tensor?[] gradients, Tensor x, Tensor h0, Tensor? c0, Tensor[] weights, Tensor[] kept, "
    "str cell, bool biases, int layers, int directions, float dropout, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    biases: bool,
    layers: int,
    directions: int,
    dropout: float,
    keep: bool,
) -> list[Tensor]:
    """y, hn, cn of an LSTM, and where ``keep`` what the backward takes.

    That is an empty tensor, and with dropout the state of the generator before.
    """
    layer, tensors = ByTorch(cell, biases, layers, directions), [x, h0, c0, *weights]
    with torch._C._DisableAutocast():
        if not keep:
            with torch.no_grad():
                return apart_in_memory(layer.results(tensors, dropout))
        kept = [torch.empty((0,), dtype=torch.uint8, device=x.device)]
        if dropout:
            kept.append(random_states.state_of(x.device))
        with recording_gradients():
            leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
            results = layer.results(leaves, dropout)
    if not is_capturing(x.device):  # a replay would not make the graph anew
        setattr(kept[0], GRAPH, (leaves, results))
    return [*apart_in_memory([t.detach() for t in results]), *kept]


def _backward(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    cell: str,
    biases: bool,
    layers: int,
    directions: int,
    dropout: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that ``needs`` asks for, of x, h0, c0 and the weights."""
    tensors, graph = [x, h0, c0, *weights], getattr(kept[0], GRAPH, None)
    with torch._C._DisableAutocast(), recording_gradients():
        if graph is not None and not is_capturing(x.device):
            leaves, results = graph
            found = gradients_in(leaves, results, gradients, needs, retain_graph=True)
        else:
            layer, state = ByTorch(cell, biases, layers, directions), kept[1] if dropout else None
            with torch.no_grad():
                found = layer.gradients(tensors, gradients, needs, Dropped(dropout, x.device, state))
    made = [
        torch.zeros_like(t) if gradient is None else gradient
        for t, gradient, needed in zip(tensors, found, needs, strict=True)
        if needed and t is not None
    ]
    return apart_in_memory(made)


def _fake(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    biases: bool,
    layers: int,
    directions: int,
    dropout: float,
    keep: bool,
) -> list[Tensor]:
    """Empty results, for tracing."""
    results = [x.new_empty((x.shape[0], x.shape[1], directions * h0.shape[2])), h0.new_empty(h0.shape)]
    if c0 is not None:
        results.append(c0.new_empty(c0.shape))
    if keep:
        results.append(torch.empty((0,), dtype=torch.uint8, device=x.device))
    if keep and dropout:
        with undisturbed():
            size = random_states.state_of(x.device).numel()
        results.append(torch.empty((size,), dtype=torch.uint8, device="cpu"))
    return results


def _backward_fake(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    cell: str,
    biases: bool,
    layers: int,
    directions: int,
    dropout: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Empty gradients, for tracing."""
    operands = [x, h0, c0, *weights]
    return [t.new_empty(t.shape) for t, needed in zip(operands, needs, strict=True) if needed and t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save for backward what the gradients need."""
    x, h0, c0, weights, *ctx.layer, ctx.dropout, _ = inputs
    kept = output[2 if c0 is None else 3 :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.count = len(weights)
    ctx.save_for_backward(x, h0, c0, *weights, *kept)


def _differentiated(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients by the operator, or by torch's own where they must be differentiable themselves."""
    x, h0, c0, *rest = ctx.saved_tensors
    weights, kept = rest[: ctx.count], rest[ctx.count :]
    of_x, of_h0, of_c0, of_weights, *_ = ctx.needs_input_grad
    needs = [of_x, of_h0, bool(of_c0), *of_weights]
    given = list(gradients[: 2 if c0 is None else 3])
    if all(gradient is None for gradient in given):
        found: list[Tensor | None] = [None] * len(needs)
    elif torch.is_grad_enabled():
        dropped = Dropped(ctx.dropout, x.device, kept[1] if ctx.dropout else None)
        found = [*ByTorch(*ctx.layer).gradients([x, h0, c0, *weights], given, needs, dropped)]
    else:
        run = torch.ops.tilewise.rnn_by_torch_backward
        made = iter(run(given, x, h0, c0, weights, kept, *ctx.layer, ctx.dropout, needs))
        found = [next(made) if needed else None for needed in needs]
    return found[0], found[1], found[2], found[3:], *[None] * 6


_library.impl("rnn_by_torch", _forward, "CompositeExplicitAutograd")
_library.impl("rnn_by_torch_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::rnn_by_torch", _fake, lib=_library)
torch.library.register_fake("tilewise::rnn_by_torch_backward", _backward_fake, lib=_library)
torch.library.register_autograd("tilewise::rnn_by_torch", _differentiated, setup_context=_setup, lib=_library)
