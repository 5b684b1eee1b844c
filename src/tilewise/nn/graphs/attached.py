"""Setting a ``forward`` on one module that copies, pickles and replicas of it do not have.

The attributes answer for the module by protocols of torch and Python, as those of :mod:`tilewise.nn.layers.swaps` do
for a layer. What a module had under the same names before is put back when they are taken off, and stands while the
module is copied: the copy is then what it would have been without them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Attached"]


class Attached:
    """The attributes that are set on ``module``; :meth:`remove` takes them off again."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        functions: dict[str, Callable[..., Any]] = {
            "forward": forward,
            "__getstate__": self._getstate,
            "__deepcopy__": self._deepcopy,
            "_replicate_for_data_parallel": self._replicate,
            "__prepare_scriptable__": self._scriptable,
        }
        self._ours = {name: types.MethodType(function, module) for name, function in functions.items()}
        self._before = {name: module.__dict__[name] for name in functions if name in module.__dict__}
        self._set(self._ours)

    @property
    def stands(self) -> bool:
        """Whether the ``forward`` is still the module's own attribute."""
        return self._module.__dict__.get("forward") is self._ours["forward"]

    def remove(self) -> None:
        """Take the attributes off, except those that others have set since, and put back what was there before."""
        attributes = self._module.__dict__
        for name, ours in self._ours.items():
            if attributes.get(name) is ours:
                del attributes[name]
                if name in self._before:
                    attributes[name] = self._before[name]

    def _set(self, values: dict[str, Any]) -> None:
        """Set attributes of the module, past its ``__setattr__``."""
        self._module.__dict__.update(values)

    @contextmanager
    def _off(self) -> Iterator[None]:
        """Meanwhile the module has none of the attributes."""
        now = {name: value for name, value in self._ours.items() if self._module.__dict__.get(name) is value}
        self.remove()
        try:
            yield
        finally:
            self._set(now)

    def _getstate(self, module: Any) -> Any:
        """The state of the module without the attributes."""
        with self._off():
            state = module.__getstate__()
            return dict(state) if isinstance(state, dict) else state

    def _deepcopy(self, module: Any, memo: dict[int, Any]) -> Any:
        """A copy as it would be without the attributes."""
        with self._off():
            return copy.deepcopy(module, memo)

    def _replicate(self, module: Any) -> Any:
        """A replica for :class:`torch.nn.DataParallel` as it would be without the attributes."""
        with self._off():
            return module._replicate_for_data_parallel()

    def _scriptable(self, module: Any) -> Any:
        """What ``torch.jit.script`` compiles: a copy without the attributes, with the same parameters and parts."""
        return copy.copy(module)
