"""Linear layers while planning is enabled: their sites, and what stands in for torch's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.nn.layers.call import why_torchs as watched_by
from tilewise.nn.layers.linear.call import why_torchs
from tilewise.nn.layers.linear.layer import Entry, LinearLayer
from tilewise.nn.layers.linear.run import BY_TORCH
from tilewise.nn.layers.linear.traced import trace
from tilewise.nn.script import current
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.sites import FEW, OneWeight

__all__ = ["BY_TORCH", "FUNCTION", "LinearSite"]

ARGUMENTS: tuple[Any, ...] = ("linear",)


class LinearSite(OneWeight, LinearLayer):
    """A linear layer as used with one weight, with inner layers of its own."""

    plan_table: Recorder
    function = "linear"
    by_torch = staticmethod(BY_TORCH)

    def __init__(self, layer: LinearLayer, arguments: tuple[Any, ...], note: Callable[..., Any]) -> None:
        super().__init__(layer.plan_table, layer.known)
        self._runs, self._entries = layer._runs, layer._entries
        self.begin(arguments, note)

    def find(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """As :meth:`LinearLayer.find`, and count the miss; ``None`` where the site is closed."""
        self.misses += 1
        return None if self.closed else super().find(x, w, b)

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Note for the report why the call is left to torch."""
        reason = watched_by((x, w, b)) or why_torchs(x, w, b)
        if reason:
            self.plan_table.leave(self.function, reason)


def _site(session: current.Session, weight: object) -> LinearSite | None:
    """Make the site for ``weight``; ``None`` where torch must judge it.

    Under a memory limit all its calls are torch's: what cuBLAS keeps for itself is over most limits.
    """
    if not isinstance(weight, torch.Tensor):
        return None
    site = LinearSite(session.table.linear, ARGUMENTS, session.note)
    site.close_under_limit()
    session.add(weight, site)
    return site


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    session = current.session
    if session is None:
        return BY_TORCH(input, weight, bias)
    if torch.compiler.is_dynamo_compiling():
        current.note_compiled()
        traced = trace(session.table.linear, input, weight, bias)
        return BY_TORCH(input, weight, bias) if traced is None else traced
    site = session.sites.get(id(weight))
    if site is None or site.arguments is not ARGUMENTS:
        site = _site(session, weight)
    if site is not None and site.misses > FEW:
        site = site.at(input)
    if site is None:
        return BY_TORCH(input, weight, bias)
    if session.watched:
        return session.between(site, input, weight, bias)
    y = site(input, weight, bias)
    if y is NotImplemented and session.waiting:
        y = session.note(site, input, weight, bias)
    return BY_TORCH(input, weight, bias) if y is NotImplemented else y


FUNCTION: Callable[..., Any] = linear
"""What stands in for ``torch.nn.functional.linear``."""
