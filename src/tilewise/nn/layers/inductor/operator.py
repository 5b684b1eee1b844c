"""The operator for a convolution with bias, residual and activation in a frozen graph; it finds its plan by name."""

from __future__ import annotations

import hashlib
import json

import torch

from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.problems.base import dense_strides

__all__ = ["MOST_PUBLISHED", "publish"]

MOST_PUBLISHED = 8192
"""Plans that compiled graphs may name. A graph names its plans for as long as it is there, so none is ever dropped."""
_published: dict[str, BoundPass] = {}

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "fused_conv(Tensor x, Tensor w, Tensor? b, Tensor? residual, str plan) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


def publish(bound: BoundPass) -> str | None:
    """The name by which the operator finds ``bound``; ``None`` where :data:`MOST_PUBLISHED` are in use."""
    text = json.dumps([bound.problem.key, bound.plan.to_json()], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if name not in _published and len(_published) >= MOST_PUBLISHED:
        return None
    _published.setdefault(name, bound)
    return name


def _find(
    plan: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor | None
) -> BoundPass:
    """The bound plan that is published as ``plan``.

    Raises ``RuntimeError`` where there is none, or where the tensors have other shapes: kernels read addresses without
    checking.
    """
    bound = _published.get(plan)
    if bound is None:
        raise RuntimeError(f"plan={plan!r} is not known in this process: compile the graph in this process")
    p = bound.problem
    wanted = [p.shape("x"), p.shape("w"), p.shape("y")[1:2] if p.bias else None, p.shape("y") if p.residual else None]
    given = [None if t is None else tuple(t.shape) for t in (x, w, b, residual)]
    if given != wanted:
        raise RuntimeError(f"plan={plan!r} is for operands, bias and residual of {wanted}, not of {given}")
    return bound


def _fused_conv(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor | None, plan: str
) -> torch.Tensor:
    """The convolution by its plan."""
    bound = _find(plan, x, w, b, residual)
    first, second = bound.slots
    added = {} if residual is None else {"residual": residual}
    return bound.bound(first.take(x), second.take(w), b, **added)  # type: ignore[no-any-return]


def _fused_conv_fake(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor | None, plan: str
) -> torch.Tensor:
    """An empty result with the shape and strides of the plan's, for tracing."""
    p = _find(plan, x, w, b, residual).problem
    shape = p.shape("y")
    return x.new_empty_strided(shape, dense_strides(shape, p.layout("y")))


_library.impl("fused_conv", _fused_conv, "CPU")
torch.library.register_fake("tilewise::fused_conv", _fused_conv_fake, lib=_library)
