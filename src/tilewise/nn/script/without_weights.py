"""Pooling and local response normalization while planning is enabled: their sites, and what stands in for torch's.

These functions have no weight by which a layer is known. So a site is for one function with its arguments, whoever
calls it, and a call that comes again ends no step: a network may call the same pooling several times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.nn.layers.one_input.base import OneInputCall, OneInputLayer
from tilewise.nn.layers.one_input.local_response_norm import BY_TORCH as NORM
from tilewise.nn.layers.one_input.local_response_norm import AskedNorm
from tilewise.nn.layers.one_input.pooling import BY_TORCH as POOLINGS
from tilewise.nn.layers.one_input.pooling import Asked
from tilewise.nn.script import current
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.sites import FEW, OneWeight
from tilewise.solvers.lrn.aten_lrn import FUNCTION as NORM_ALONE

__all__ = ["BY_TORCH", "FUNCTIONS", "OneInputSite"]

BY_TORCH: dict[str, Any] = {**POOLINGS, "local_response_norm": NORM}
"""torch's own functions by their names."""
CALLED: dict[str, Any] = {**POOLINGS, "local_response_norm": NORM_ALONE}
"""What is called where torch computes: the normalization by torch's pooling, whatever stands in for that."""


class OneInputSite(OneWeight):
    """Calls of one function with the same arguments, which are what its layer is asked for.

    Operands of a call are the input, ``None`` in the place of a weight, and the call's own arguments for torch.
    """

    plan_table: Recorder

    def __init__(self, layer: OneInputLayer | OneInputSite, arguments: tuple[Any, ...], note: Any) -> None:
        self.layer: OneInputLayer = layer.layer if isinstance(layer, OneInputSite) else layer
        self.plan_table = self.layer.plan_table  # type: ignore[assignment]
        self.latest: OneInputCall | None = None
        self.begin(arguments, note)

    @property
    def function(self) -> str:
        """The name of torch's function."""
        name: str = self.arguments[0]
        return name

    def by_torch(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result of torch's own function."""
        args, named = rest
        return CALLED[self.function](*args, **named)

    def __call__(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result by plan; ``NotImplemented`` where torch must compute it."""
        call = self.layer.seen(self.arguments[1], x)
        if isinstance(call, str):
            if call:
                self.plan_table.leave(self.function, call)
            return NotImplemented
        if call != self.latest:
            self.misses += 1
            if self.closed and not self.layer.knows(call):
                return NotImplemented
        run = self.layer.resolve(call)
        if run is None:
            return NotImplemented
        self.latest = call
        return run(x) if run.planned else NotImplemented

    def forget(self) -> None:
        """Look plans up anew."""
        self.layer.forget()
        self.latest = None


def _site(session: current.Session, name: str, asked: Any) -> OneInputSite:
    """Make the site of a function with these arguments. Under a memory limit all its calls are torch's."""
    layer = session.table.lrn if name == "local_response_norm" else session.table.pooling
    site = OneInputSite(layer, (name, asked), session.note)
    site.close_under_limit()
    session.keep((name, asked), site)
    return site


def _planned(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The result by plan or as a session computes it; ``NotImplemented`` where torch must compute it."""
    session = current.session
    if session is None:
        return NotImplemented
    if torch.compiler.is_dynamo_compiling():
        current.note_compiled()
        return NotImplemented
    try:
        x, asked = READ[name](*args, **named)
        site = session.sites.get((name, asked))
    except TypeError:  # arguments that torch does not take, or that are no numbers: torch says so
        return NotImplemented
    if site is None:
        site = _site(session, name, asked)
    if site.misses > FEW:
        site = site.at(x)
        if site is None:
            return NotImplemented
    if session.watched:
        return session.between(site, x, None, args, named)
    y = site(x, None, args, named)
    if y is NotImplemented and session.waiting:
        y = session.note(site, x, None, args, named)
    return y


def _numbers(value: Any) -> Any:
    """One number, or a tuple of them."""
    return tuple(value) if isinstance(value, list) else value


def _reader(name: str) -> Callable[..., tuple[Any, Asked]]:
    """What reads the arguments of torch's pooling function of this name: the input, and what is asked for."""
    op, dims = name[:3], int(name[-2])

    def maximum(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> tuple[Any, Asked]:  # fmt: skip
        kernel, step, pad, apart = (_numbers(n) for n in (kernel_size, stride or kernel_size, padding, dilation))
        return input, Asked(op, dims, kernel, step, pad, apart, bool(ceil_mode), True, None, bool(return_indices))

    def average(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: Any = None,
    ) -> tuple[Any, Asked]:  # fmt: skip
        kernel, step, pad = (_numbers(n) for n in (kernel_size, stride or kernel_size, padding))
        return input, Asked(op, dims, kernel, step, pad, 1, bool(ceil_mode), bool(count_include_pad), divisor_override)

    return maximum if op == "max" else average


def _norm(input: Any, size: Any, alpha: Any = 1e-4, beta: Any = 0.75, k: Any = 1.0) -> tuple[Any, AskedNorm]:
    """The arguments of torch's local response normalization: the input, and what is asked for."""
    return input, AskedNorm(size, alpha, beta, k)


READ: dict[str, Callable[..., tuple[Any, Any]]] = {name: _reader(name) for name in POOLINGS}
READ["local_response_norm"] = _norm
"""What reads the arguments of each function. Raises ``TypeError`` for a list of arguments that torch does not take."""


def _function(name: str) -> Callable[..., Any]:
    """What stands in for torch's function of this name, and takes what that takes."""
    by_torch = CALLED[name]

    def function(*args: Any, **named: Any) -> Any:
        y = _planned(name, args, named)
        return by_torch(*args, **named) if y is NotImplemented else y

    function.__name__ = function.__qualname__ = name
    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {name: _function(name) for name in BY_TORCH}
"""What stands in for functions of ``torch.nn.functional``, by their names."""
