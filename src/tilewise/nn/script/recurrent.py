"""Recurrent layers while planning is enabled: their sites, and what stands in for torch's functions.

``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` look these functions up in ``torch._VF`` at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from tilewise.nn.layers.call import disturbed
from tilewise.nn.layers.call import why_torchs as watched_by
from tilewise.nn.layers.recurrent.autocast import OPERATORS
from tilewise.nn.layers.recurrent.call import Arguments, RecurrentCall, describe, given_of
from tilewise.nn.layers.recurrent.layer import RecurrentLayer
from tilewise.nn.script import current
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.script.sites import FEW, OneWeight

__all__ = ["FUNCTIONS", "RecurrentSite"]


class RecurrentSite(OneWeight):
    """Recurrent layers as used with one first weight.

    ``arguments`` are the cell, whether there are biases, the number of layers, whether there are two directions, and
    whether batches are packed. Operands of a call are the input, the first weight, the first states, all weights, and
    torch's further arguments; of a packed batch the last of them are the sizes of its steps.
    """

    plan_table: Recorder

    def __init__(self, layer: RecurrentLayer | RecurrentSite, arguments: tuple[Any, ...], note: Any) -> None:
        self.layer: RecurrentLayer = layer.layer if isinstance(layer, RecurrentSite) else layer
        self.plan_table = self.layer.plan_table  # type: ignore[assignment]
        self.latest: RecurrentCall | None = None
        self.begin(arguments, note)

    @property
    def function(self) -> str:
        """The name of torch's function."""
        cell: str = self.arguments[0]
        return cell

    def by_torch(self, x: Any, w: Any, hx: Any, weights: Any, *rest: Any) -> Any:
        """The result of torch's own function."""
        if self.packed:
            *rest, sizes = rest  # type: ignore[assignment]
            return OPERATORS[self.function](x, sizes, hx, weights, *rest)
        return OPERATORS[self.function](x, hx, weights, *rest)

    @property
    def packed(self) -> bool:
        """Whether batches are packed."""
        packed: bool = self.arguments[-1]
        return packed

    def __call__(self, x: Any, w: Any, hx: Any, weights: Any, *rest: Any) -> Any:
        """The result by plan; ``NotImplemented`` where torch must compute it."""
        if disturbed():
            self._leave(watched_by((x, w)))
            return NotImplemented
        if self.packed:
            *rest, sizes = rest  # type: ignore[assignment]
            x, rest = PackedSequence(x, sizes), (*rest, False)
        arguments = Arguments.of(self.function, weights, *rest)
        given = arguments if isinstance(arguments, str) else given_of(arguments, x, hx)
        if isinstance(given, str) or not given.batched:
            self._leave(given if isinstance(given, str) else "")
            return NotImplemented
        call = describe(given)
        if call != self.latest:
            self.misses += 1
            if self.closed and not self.layer.knows(call):
                return NotImplemented
        run = self.layer.resolve(call)
        if run is None:
            return NotImplemented
        self.latest = call
        if not run.planned:
            return NotImplemented
        y, last = run(given)
        y = y.data if self.packed else y
        return (y, *last) if isinstance(last, tuple) else (y, last)

    def forget(self) -> None:
        """Look plans up anew."""
        self.layer.forget()
        self.latest = None

    def _leave(self, reason: str) -> None:
        """Note for the report why a call is left to torch."""
        if reason:
            self.plan_table.leave(self.function, reason)


def _site(session: current.Session, weight: torch.Tensor, arguments: tuple[Any, ...]) -> RecurrentSite:
    """Make the site for ``weight``. Under a memory limit all its calls are torch's."""
    site = RecurrentSite(session.table.recurrent, arguments, session.note)
    site.close_under_limit()
    session.add(weight, site)
    return site


def _planned(cell: str, x: Any, hx: Any, weights: Any, rest: tuple[Any, ...]) -> Any:
    """The result by plan or as a session computes it; ``NotImplemented`` where torch must compute it."""
    session = current.session
    if session is None:
        return NotImplemented
    if torch.compiler.is_dynamo_compiling():
        current.note_compiled()
        return NotImplemented
    packed = bool(rest) and isinstance(rest[0], list | tuple)  # after a packed batch, its sizes and its first states
    if packed:
        if type(hx) is not torch.Tensor or hx.device.type != "cpu":
            return NotImplemented  # no sizes
        hx, weights, rest = weights, rest[0], (*rest[1:], hx)
    if not _are_tensors(weights) or len(rest) != 6:
        return NotImplemented
    biases, layers, _, _, both, _ = rest
    weight, arguments = weights[0], (cell, biases, layers, both, packed)
    site = session.sites.get(id(weight))
    if site is None or site.arguments != arguments:
        site = _site(session, weight, arguments)
    if site.misses > FEW:
        site = site.at(x)
        if site is None:
            return NotImplemented
    if session.watched:
        return session.between(site, x, weight, hx, weights, *rest)
    y = site(x, weight, hx, weights, *rest)
    if y is NotImplemented and session.waiting:
        y = session.note(site, x, weight, hx, weights, *rest)
    return y


def _are_tensors(weights: object) -> bool:
    """Whether these are weights, of which there is one at the least."""
    return isinstance(weights, list | tuple) and bool(weights) and all(isinstance(w, torch.Tensor) for w in weights)


def _function(cell: str) -> Callable[..., Any]:
    """What stands in for ``torch._VF.<cell>``, which has another list of arguments for packed sequences."""
    by_torch = OPERATORS[cell]

    def function(input: Any, hx: Any, params: Any, *rest: Any, **named: Any) -> Any:
        y = NotImplemented if named else _planned(cell, input, hx, params, rest)
        return by_torch(input, hx, params, *rest, **named) if y is NotImplemented else y

    function.__name__ = function.__qualname__ = cell
    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {cell: _function(cell) for cell in OPERATORS}
"""What stands in for torch's functions of these names in ``torch._VF``."""
