"""Convolutions while planning is enabled: their sites, and what stands in for torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.nn.functional import Planned, convolution, traced_by, transposed_convolution
from tilewise.nn.layers.call import kernel_of, why_torchs
from tilewise.nn.layers.layer import Entry, Layer, Tensors
from tilewise.nn.layers.overrides import BY_TORCH, function_name
from tilewise.nn.script import current
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.sites import FEW, OneWeight

__all__ = ["FUNCTIONS", "ConvolutionSite"]


class ConvolutionSite(OneWeight, Layer):
    """A convolution as used with one weight, with inner layers of its own."""

    plan_table: Recorder

    def __init__(self, layer: Layer, arguments: tuple[Any, ...], note: Callable[..., Any]) -> None:
        super().__init__(layer.geometry, layer.plan_table, layer.known, weights=layer.weights)
        self.runners, self._entries = layer.runners, layer._entries
        self.begin(arguments, note)

    @property
    def function(self) -> str:
        """The name of torch's function."""
        return function_name(self.geometry.dims, self.geometry.transposed)

    def by_torch(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result of torch's own function."""
        _, stride, padding, dilation, groups, transposed, extra = self.arguments
        if type(padding) is tuple and padding and type(padding[0]) is str:
            padding = padding[0]
        others = (extra, groups, dilation) if transposed else (dilation, groups)
        return BY_TORCH[self.function](x, w, *rest, stride, padding, *others)

    def computed(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """As :meth:`Layer.computed`, and record the call where it has no plan yet."""
        y = self(x, w, b)
        return self.note(self, x, w, b) if y is NotImplemented and self.plan_table.waiting else y

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Note for the report why the call is left to torch."""
        reason = why_torchs((x, w, b))
        if reason:
            self.plan_table.leave(self.function, reason)

    def entry(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Entry | None:
        """As :meth:`Layer.entry`, and count the miss."""
        self.misses += 1
        return super().entry(x, w, b)

    def _enter(self, call: Any, tensors: Tensors) -> Entry | None:
        """As :meth:`Layer._enter`; ``None`` where the site is closed."""
        return None if self.closed else super()._enter(call, tensors)


def _site(session: current.Session, arguments: tuple[Any, ...], weight: object) -> ConvolutionSite | None:
    """Make the site for ``weight`` and these arguments; ``None`` where torch must judge them."""
    if not isinstance(weight, torch.Tensor):
        return None
    dims, stride, padding, dilation, groups, transposed, extra = arguments
    if type(padding) is tuple and padding and type(padding[0]) is str:
        padding = padding[0]
    kernel = tuple(kernel_of(weight))
    layer = session.table.layer(dims, stride, padding, dilation, groups, kernel, transposed, extra)
    if layer is None:
        return None
    site = ConvolutionSite(layer, arguments, session.note)
    session.add(weight, site)
    return site


def _entrance(dims: int, transposed: bool) -> Planned:
    """What a replaced function calls first.

    A site is found by the ``id`` of the weight, which may belong to another weight by now; the layer checks the call.
    """
    compiling = torch.compiler.is_dynamo_compiling

    def planned(x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: Any, extra: Any = 0) -> Any:
        """The planned result; ``NotImplemented`` where torch must compute it."""
        session = current.session
        if session is None:
            return NotImplemented
        if compiling():
            current.note_compiled()
            traced = (dims, stride, padding, dilation, groups, w.shape[2:], transposed, extra)
            return traced_by(session.table, traced, x, w, b)
        if type(padding) is str and isinstance(w, torch.Tensor):  # what it stands for depends on the kernel
            padding = (padding, kernel_of(w))
        arguments = (dims, stride, padding, dilation, groups, transposed, extra)
        site = session.sites.get(id(w))
        if site is None or site.arguments != arguments:
            site = _site(session, arguments, w)
            if site is None:
                return NotImplemented
        if site.misses > FEW:
            site = site.at(x)
            if site is None:
                return NotImplemented
        if session.watched:
            return session.between(site, x, w, b)
        y = site(x, w, b)
        if y is NotImplemented and session.waiting:
            return session.note(site, x, w, b)
        return y

    return planned


FUNCTIONS = {
    **{f"conv{dims}d": convolution(dims, _entrance(dims, False)) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": transposed_convolution(dims, _entrance(dims, True)) for dims in (1, 2, 3)},
}
"""What stands in for functions of ``torch.nn.functional``, by their names."""
