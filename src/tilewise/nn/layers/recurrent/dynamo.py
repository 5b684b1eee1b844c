"""Planned recurrent modules for Dynamo, which breaks the graph at every ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``.

Dynamo has a flag that lets it trace all of them. Then those of other models would be unrolled step by step, so the flag
is set while a planned one is looked at, and only then. A module that ``optimize`` left to torch runs by its layers from
then on where the graph must be whole; otherwise torch's own layer behind a break is as good.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from tilewise.nn.layers.kinds import is_planned, take_offer

__all__ = ["let_dynamo_trace_planned"]

BUILDER = "torch._dynamo.variables.builder"
"""The module of torch that turns a program's objects into what Dynamo traces."""


@functools.cache
def let_dynamo_trace_planned() -> None:
    """Let Dynamo trace recurrent modules that run by plans, now or once it is imported, which takes seconds."""
    if BUILDER in sys.modules:
        _let_through(sys.modules[BUILDER])
    else:
        sys.meta_path.insert(0, _OnceImported(BUILDER, _let_through))


class _OnceImported(importlib.abc.MetaPathFinder):
    """Calls ``then(module)`` once the module ``name`` is imported, which others find and load."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """As the other finders find it, with ``then`` behind its execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


def _let_through(builder: Any) -> None:
    """Have Dynamo's builder wrap planned modules with its flag for recurrent modules on.

    A version of torch that has neither goes on to break graphs.
    """
    kind: Any = getattr(builder, "VariableBuilder", None)
    wrap = getattr(kind, "wrap_module", None)
    if wrap is None or not hasattr(builder.config, "allow_rnn"):
        return

    @functools.wraps(wrap)
    def wrap_module(self: Any, value: nn.Module) -> Any:
        if isinstance(value, nn.RNNBase) and (is_planned(value) or (_is_whole(self.tx) and take_offer(value))):
            with builder.config.patch(allow_rnn=True):
                return wrap(self, value)
        return wrap(self, value)

    kind.wrap_module = wrap_module


def _is_whole(tx: Any) -> bool:
    """Whether the graph that Dynamo traces may have no break."""
    return bool(getattr(tx, "one_graph", False) or getattr(tx, "error_on_graph_break", False))
