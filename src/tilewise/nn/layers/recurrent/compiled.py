"""Planned recurrent layers inside ``torch.compile``: operators that refer to their plans by name.

As those of convolutions (:mod:`tilewise.nn.layers.compiled`) the name is a digest of what the plan computes and how.
The results of the forward operator are those of the layer and all that its backward needs, so that the compiler knows
what is saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.machine import random_states
from tilewise.machine.device import recurrent_precision
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.bound_pass import with_strides
from tilewise.nn.layers.recurrent.by_torch import ByTorch, Dropped
from tilewise.nn.layers.recurrent.call import RecurrentCall
from tilewise.nn.layers.recurrent.run import RecurrentRun
from tilewise.nn.layers.recurrent.saved import apart, apart_in_memory, together
from tilewise.plan import Plan

__all__ = ["Known", "publish"]

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "rnn(Tensor x, Tensor h0, Tensor? c0, Tensor[] weights, str plans, float dropout) -> Tensor[]",
    # What is dropped is drawn from torch's generator, so that equal calls have different results.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_library.define(
    "rnn_backward(Tensor?[] gradients, Tensor x, Tensor h0, Tensor? c0, Tensor[] weights, Tensor[] results, "
    "str plans, float dropout, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)

MOST_PUBLISHED = 8192
"""Plans that compiled graphs may name; none is ever dropped, as a graph names its plans for as long as it is there."""


@dataclass(frozen=True)
class Known:
    """A planned call as tracing recognises it; operators find what runs it by the name ``plans``."""

    plans: str
    cell: str
    shape: tuple[int, ...]
    hidden: int
    layers: int
    directions: int
    biases: bool
    dtype: torch.dtype
    device: torch.device
    needs: bool
    deterministic: bool
    precision: str
    projection: int


@dataclass(frozen=True)
class Form:
    """How what a forward keeps is made of an operator's tensors, and what of it the operator returns.

    ``kept`` has places in the list of the operands, the layer's results and ``saved``, of which shape, strides and type
    are here.
    """

    kept: Any
    saved: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Published:
    """What runs a call, under a name. ``forms`` has what it keeps without and with dropout, once that is known."""

    run: RecurrentRun
    call: RecurrentCall
    forms: dict[bool, Form] = field(default_factory=dict)

    def check_precision(self) -> None:
        """Raise ``RuntimeError`` where torch's precision is another one than the plan was made for.

        Dynamo compiles anew where other flags change, and does not look at this one.
        """
        call = self.call
        if call.device.type != "cuda" or call.dtype is not torch.float32 or call.precision == recurrent_precision():
            return
        raise RuntimeError(
            f"torch.backends.cudnn.rnn.fp32_precision is {recurrent_precision()!r}, and this graph was compiled for "
            f"{call.precision!r}: torch.compiler.reset() would have it compiled anew"
        )

    def form(self, dropped: bool) -> Form:
        """What is kept. The first time the forward runs once for it, on zeros."""
        if dropped not in self.forms:
            p, device = self.run.problem, self.call.device
            with undisturbed(), random_states.kept():
                roles = ("x", "h0", *(["c0"] if p.cell == "lstm" else []), *p.weights)
                x, h0, *rest = (torch.zeros(p.shape(role), dtype=p.torch_dtype(role), device=device) for role in roles)
                c0, weights = (rest[0], rest[1:]) if p.cell == "lstm" else (None, rest)
                _forward(self, x, h0, c0, weights, 0.5 if dropped else 0.0)
        return self.forms[dropped]


_published: dict[str, Published] = {}


def publish(run: RecurrentRun, call: RecurrentCall, plan: Plan) -> Known | None:
    """Give what runs ``call`` a name for the operators; ``None`` where :data:`MOST_PUBLISHED` names are in use."""
    text = json.dumps([repr(call), plan.to_json()], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if name not in _published and len(_published) >= MOST_PUBLISHED:
        return None
    _published.setdefault(name, Published(run, call))
    return Known(
        name, call.cell, call.shape, call.hidden, call.layers, call.directions, call.biases, call.dtype,
        call.device, any(call.needs), call.deterministic, call.precision,
        call.projection,
    )  # fmt: skip


def _find(plans: str, x: Tensor, h0: Tensor, weights: Sequence[Tensor]) -> Published:
    """What is published as ``plans``.

    Raises ``RuntimeError`` where there is nothing, or where operands have other shapes: kernels read addresses without
    checking.
    """
    published = _published.get(plans)
    if published is None:
        raise RuntimeError(f"plans={plans!r} are not known in this process: call tilewise.optimize before this graph")
    p = published.run.problem
    shapes = [tuple(t.shape) for t in (x, h0, *weights)]
    if shapes != [p.shape(role) for role in ("x", "h0", *p.weights)] or x.device != published.call.device:
        here = f"{p.key} on {published.call.device}"
        raise RuntimeError(f"plans={plans!r} are for {here}, not for tensors of {shapes} on {x.device}")
    return published


def _forward(
    published: Published, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], dropout: float
) -> list[Tensor]:
    """The results of the layer by its plan and, to train, what its backward needs; the form of that is noted."""
    run = published.run
    keep = run.problem.task == "training"
    operands: list[Any] = []
    for t in run.taken(x, h0, c0, weights):  # a tensor that stands in several places is told by its place
        operands.append(t.view_as(t) if t is not None and any(t is other for other in operands) else t)
    x, h0, c0, *weights = operands
    y, hn, cn, saved, _ = run.forward(dropout, x, h0, c0, weights, keep=keep)
    results = [y, hn] if cn is None else [y, hn, cn]
    if not keep:
        return results
    tensors: list[Tensor | None] = [*operands, *results]
    kept = apart(saved, tensors, views=True)
    new = [t for t in tensors[len(operands) + len(results) :] if t is not None]
    form = Form(kept, tuple((tuple(t.shape), t.stride(), t.dtype) for t in new))
    if published.forms.setdefault(dropout > 0, form) != form:
        raise RuntimeError(f"plans {run.problem.key}: kept other tensors than before, which no compiled graph can save")
    return [*results, *new]


def _rnn(
    x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], plans: str, dropout: float
) -> list[Tensor]:
    """The operator's forward: y, hn, cn of an LSTM, and what its backward needs."""
    published = _find(plans, x, h0, weights)
    published.check_precision()
    with torch.no_grad(), torch._C._DisableAutocast():
        return _forward(published, x, h0, c0, weights, dropout)


def _rnn_backward(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    results: Sequence[Tensor],
    plans: str,
    dropout: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that ``needs`` asks for, of x, h0, c0 and the weights, from those of y, hn and cn."""
    published = _find(plans, x, h0, weights)
    run, form = published.run, published.form(dropout > 0)
    with torch.no_grad():
        operands = run.taken(x, h0, c0, weights)
        lasting = len(results) - len(form.saved)
        saved = [with_strides(t, strides) for t, (_, strides, _) in zip(results[lasting:], form.saved, strict=True)]
        kept = together(form.kept, [*operands, *results[:lasting], *saved])
        found = run.backward(kept, [w for w in operands[3:] if w is not None], gradients, needs)
    return apart_in_memory([t for t, needed in zip(found, needs, strict=True) if needed and t is not None])


def _rnn_fake(
    x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], plans: str, dropout: float
) -> list[Tensor]:
    """Empty results, for tracing."""
    published = _find(plans, x, h0, weights)
    p = published.run.problem
    results = [x.new_empty(p.shape(role)) for role in ("y", "hn", "cn")[: 3 if p.cell == "lstm" else 2]]
    if p.task == "inference":
        return results
    saved = published.form(dropout > 0).saved
    return [*results, *(x.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in saved)]


def _rnn_backward_fake(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    results: Sequence[Tensor],
    plans: str,
    dropout: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Empty gradients, for tracing."""
    operands = [x, h0, c0, *weights]
    return [t.new_empty(t.shape) for t, needed in zip(operands, needs, strict=True) if needed and t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save for backward what the gradients need."""
    x, h0, c0, weights, ctx.plans, ctx.dropout = inputs
    lasting = 2 if c0 is None else 3
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[lasting:])
    ctx.count = len(weights)
    ctx.save_for_backward(x, h0, c0, *weights, *output)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients by the operator, or by torch's where they must be differentiable themselves."""
    x, h0, c0, *rest = ctx.saved_tensors
    weights, results = rest[: ctx.count], rest[ctx.count :]
    of_x, of_h0, of_c0, of_weights, *_ = ctx.needs_input_grad
    needs = [of_x, of_h0, bool(of_c0), *of_weights]
    given = list(gradients[: 2 if c0 is None else 3])
    if all(gradient is None for gradient in given):
        found: list[Tensor | None] = [None] * len(needs)
    elif torch.is_grad_enabled():
        p = _find(ctx.plans, x, h0, weights).run.problem
        layer = ByTorch(p.cell, p.biases, p.layers, p.directions)
        found = [*layer.gradients([x, h0, c0, *weights], given, needs, Dropped(ctx.dropout, x.device, None))]
    else:
        made = iter(torch.ops.tilewise.rnn_backward(given, x, h0, c0, weights, results, ctx.plans, ctx.dropout, needs))
        found = [next(made) if needed else None for needed in needs]
    return found[0], found[1], found[2], found[3:], None, None


_library.impl("rnn", _rnn, "CompositeExplicitAutograd")
_library.impl("rnn_backward", _rnn_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::rnn", _rnn_fake, lib=_library)
torch.library.register_fake("tilewise::rnn_backward", _rnn_backward_fake, lib=_library)
torch.library.register_autograd("tilewise::rnn", _backward, setup_context=_setup, lib=_library)
