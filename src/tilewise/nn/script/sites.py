"""What sites of every kind of function have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch

from tilewise.nn.script.recorder import MOST_KINDS, Recorder

__all__ = ["FEW", "OneWeight"]

FEW = 8
"""Calls of other kinds than the last before a weight is taken to meet several in turns."""


class OneWeight:
    """A layer as used with one weight: it shares the layer's calls, but has a last call of its own.

    A class derives from this and from its kind of layer, and is made of ``(layer, arguments, note)``. With ``closed``,
    calls that were not seen before are left to torch. ``misses`` counts calls of another kind than the one before.
    ``note(site, *operands)`` records a call that has no plan yet; it returns the call's result where that completes a
    step and all is planned, else ``NotImplemented``.
    """

    plan_table: Recorder
    latest: Any

    if TYPE_CHECKING:

        @property
        def function(self) -> str:
            """The name of torch's function."""

    def begin(self, arguments: tuple[Any, ...], note: Callable[..., Any]) -> None:
        """Set the attributes of a site without any call."""
        self.arguments, self.closed, self.note = arguments, False, note
        self.misses = 0
        self.whole: Any = self
        self.shapes: dict[tuple[int, ...], Self] = {}

    def at(self, x: object) -> Self | None:
        """The site for inputs shaped as ``x``, with its own last call; ``None`` where such a call is left to torch."""
        if type(x) is not torch.Tensor:
            return self
        site = self.shapes.get(x.shape)
        if site is None:
            if self.closed:
                return None
            if len(self.shapes) >= MOST_KINDS:
                return self
            site = self.shapes[x.shape] = type(self)(self, self.arguments, self.note)  # type: ignore[call-arg]
            site.whole = self
        return site

    def close_under_limit(self) -> None:
        """Leave all calls to torch under a memory limit, and say so."""
        if self.plan_table.options.workspace is not None:
            self.close()
            self.plan_table.leave(self.function, "is planned without memory limits alone")

    def close(self) -> None:
        """Leave to torch every kind of call that has not been seen by now."""
        self.closed = self.whole.closed = True
        self.whole.shapes = {shape: site for shape, site in self.whole.shapes.items() if site.latest is not None}
