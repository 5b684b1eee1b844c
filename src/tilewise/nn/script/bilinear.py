"""Bilinear layers while planning is enabled: their sites, and what stands in for torch's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.nn.layers.bilinear import BY_TORCH, BilinearLayer, Latest, why_torchs
from tilewise.nn.layers.call import why_torchs as watched_by
from tilewise.nn.script import current
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.sites import FEW, OneWeight

__all__ = ["BY_TORCH", "FUNCTION", "BilinearSite"]

ARGUMENTS: tuple[Any, ...] = ("bilinear",)


class BilinearSite(OneWeight, BilinearLayer):
    """A bilinear layer as used with one weight, which sites take behind the first input."""

    plan_table: Recorder
    function = "bilinear"

    def __init__(self, layer: BilinearLayer, arguments: tuple[Any, ...], note: Callable[..., Any]) -> None:
        super().__init__(layer.plan_table)
        self._linear, self._runs = layer._linear, layer._runs
        self.begin(arguments, note)

    def __call__(self, x: Any, w: Any, *rest: Any) -> Any:  # type: ignore[override]
        x2, b = rest
        return super().__call__(x, x2, w, b)

    def by_torch(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result of torch's own function."""
        x2, b = rest
        return BY_TORCH(x, x2, w, b)

    def find(self, x1: torch.Tensor, x2: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Latest | None:
        """As :meth:`BilinearLayer.find`, and count the miss; ``None`` where the site is closed."""
        self.misses += 1
        if self.closed:
            return None
        found = super().find(x1, x2, w, b)
        reason = "" if found is not None else watched_by((x1, x2, w, b)) or why_torchs(x1, x2, w, b)
        if reason:
            self.plan_table.leave(self.function, reason)
        return found


def _site(session: current.Session, weight: object) -> BilinearSite | None:
    """Make the site for ``weight``; ``None`` where torch must judge it.

    Under a memory limit all its calls are torch's: the product's result is larger than anything that torch keeps.
    """
    if not isinstance(weight, torch.Tensor):
        return None
    site = BilinearSite(session.table.bilinear, ARGUMENTS, session.note)
    site.close_under_limit()
    session.add(weight, site)
    return site


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    session = current.session
    if session is None:
        return BY_TORCH(input1, input2, weight, bias)
    if torch.compiler.is_dynamo_compiling():
        current.note_compiled()
        return BY_TORCH(input1, input2, weight, bias)
    site = session.sites.get(id(weight))
    if site is None or site.arguments is not ARGUMENTS:
        site = _site(session, weight)
    if site is not None and site.misses > FEW:
        site = site.at(input1)
    if site is None:
        return BY_TORCH(input1, input2, weight, bias)
    if session.watched:
        return session.between(site, input1, weight, input2, bias)
    y = site(input1, weight, input2, bias)
    if y is NotImplemented and session.waiting:
        y = session.note(site, input1, weight, input2, bias)
    return BY_TORCH(input1, input2, weight, bias) if y is NotImplemented else y


FUNCTION: Callable[..., Any] = bilinear
"""What stands in for ``torch.nn.functional.bilinear``."""
