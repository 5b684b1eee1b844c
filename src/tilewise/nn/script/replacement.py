"""Putting a function in the place of one of torch's, and torch's back."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._jit_internal import boolean_dispatched
from torch.jit._builtins import _register_builtin

from tilewise.nn.layers.overrides import stand_in

__all__ = ["Replacement"]

MOST_ARGUMENTS = 64
"""More arguments than any function of torch has."""


@dataclass(frozen=True)
class Replacement:
    """A ``function`` that may stand in for torch's own, ``by_torch``, as ``owner.name``."""

    owner: types.ModuleType
    name: str
    by_torch: Callable[..., Any]
    function: Callable[..., Any]

    def prepare(self) -> None:
        """Let the function look as torch's own: its text, its place, and what ``torch.jit.script`` makes of it."""
        self.function.__doc__ = self.by_torch.__doc__
        self.function.__module__ = self.owner.__name__  # pickled by name, it loads as torch's
        stand_in(self.name, self.function)
        if isinstance(self.by_torch, types.FunctionType):
            # In place of the function that it finds, torch.jit.script takes one that such an entry names.
            entry: dict[str, Any] = dict.fromkeys(("if_true", "if_false"), self.by_torch)
            entry |= {"index": MOST_ARGUMENTS, "default": False, "arg_name": "tilewise"}
            boolean_dispatched[self.function] = boolean_dispatched.get(self.by_torch, entry)
        else:
            _register_builtin(self.function, f"aten::{self.name}")

    def install(self, wanted: bool) -> None:
        """Put the function into its place, or torch's where it is not ``wanted``.

        A function that something else has put there meanwhile is left alone.
        """
        expected, put = (self.by_torch, self.function) if wanted else (self.function, self.by_torch)
        found = getattr(self.owner, self.name)
        if found is expected:
            setattr(self.owner, self.name, put)
        elif found is not put and wanted:
            place = f"{self.owner.__name__}.{self.name}"
            warnings.warn(f"tilewise: {place} is not torch's own ({found!r}): it stays", stacklevel=5)
