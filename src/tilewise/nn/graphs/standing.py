"""What a recording takes for granted of its model, and a check of some tens of microseconds that it still holds.

A recording reads parameters and buffers at fixed addresses, and runs the operators that the model's Python code called
when it was made. So it is valid while every parameter and buffer lies where it lay, as it was, and while no attribute
of a module has been set to another value: its mode, its parts, its hooks, a dropout's ``p``, a ``forward`` of its own.
Attributes are not compared one by one. CPython counts the changes of a dictionary, and torch's own compiler reads that
count; only where one differs are the attributes themselves compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch.nn.modules import module as torch_module

from tilewise.kernels.native.programs import unchanged

__all__ = ["HOOKS", "Contents", "Standing", "hooks_of"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The dictionaries of a module's hooks."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_TABLES = ("_parameters", "_buffers", "_modules")
MARKS = frozenset({"_is_torch_compile"})
"""Attributes that ``torch.compile`` sets on a module that it is given. They change nothing of what it computes."""
_data_ptr = torch.Tensor.data_ptr
NO_COUNT = sys.version_info >= (3, 12)
"""Whether native code cannot read how often a dictionary has changed."""

Table = dict[str, Any]


def hooks_of(model: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every dictionary of hooks that run inside the model's forward or backward, and whose they are, as text.

    Those of the model itself are not among them: they run around its ``forward``.
    """
    for name, module in model.named_modules():
        if module is not model:
            for kind in HOOKS:
                yield f"{kind.strip('_').replace('_', ' ')} on {name}", getattr(module, kind)
    for kind in _GLOBAL_HOOKS:
        yield f"{kind.strip('_').replace('_', ' ')} on every module", getattr(torch_module, kind)


class Contents:
    """The attributes, parameters, buffers and parts of every module, and the hooks, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        tables: list[tuple[str, Table]] = []
        for name, module in model.named_modules():
            where = f" of {name}" if name else " of the model"
            tables.append((f"attribute {{}}{where}", module.__dict__))
            tables += [(f"{kind.strip('_')[:-1]} {{}}{where}", module.__dict__[kind]) for kind in _TABLES]
        self.tables = [*tables, *hooks_of(model)]
        # The values are kept, so that no other object can get the id of one that is gone.
        self._values = [dict(table) for _, table in self.tables]

    def difference(self) -> str:
        """What has changed, as text; empty where nothing has."""
        for (what, table), before in zip(self.tables, self._values, strict=True):
            if len(table) != len(before) or any(before.get(key, self) is not value for key, value in table.items()):
                changed = [key for key in {**before, **table} if before.get(key, self) is not table.get(key, self)]
                told = [key for key in changed if key not in MARKS]
                if told or not changed:
                    return f"{what.format(told[0])} has changed" if told else f"{what} have changed"
        return ""


class Standing:
    """What a recording takes for granted of ``model``, as it is now, under the autograd and autocast of this moment."""

    def __init__(self, model: nn.Module) -> None:
        self._contents = Contents(model)
        tensors = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._names = [name for name, _ in tensors.values()]
        self.tensors = [t for _, t in tensors.values()]
        self._addresses = [*map(_data_ptr, self.tensors)]
        self._facts = [*map(_facts, self.tensors)]
        tables = [table for _, table in self._contents.tables]
        self._empty = [table for table in tables if not table]
        self._tables = [table for table in tables if table]
        self._note()

    def _note(self) -> None:
        """Take the state, which is known to be right, as the one to compare with."""
        self._versions = [*map(dict_version, self._tables)]
        counted = [] if NO_COUNT else self._tables
        self._native = unchanged(self.tensors, [*self._empty, *counted])
        self._check = TensorGuards(
            *self.tensors,
            dynamic_dims_sizes=[list(t.shape) for t in self.tensors],  # type: ignore[misc]
            dynamic_dims_strides=[list(t.stride()) for t in self.tensors],  # type: ignore[misc]
        ).check

    def holds(self) -> bool:
        """Whether nothing has changed. May be false though nothing has: :meth:`difference` then finds nothing."""
        native = self._native
        if native is not None:
            counts = NO_COUNT and [*map(dict_version, self._tables)] != self._versions
            return not counts and bool(native.holds())
        return (
            [*map(dict_version, self._tables)] == self._versions
            and not any(self._empty)
            and [*map(_data_ptr, self.tensors)] == self._addresses
            and bool(self._check(*self.tensors))
        )

    def difference(self) -> str:
        """What has changed, as text; empty where nothing has."""
        reason = self._contents.difference() or self._moved()
        if not reason:
            for name, tensor, before in zip(self._names, self.tensors, self._facts, strict=True):
                if _facts(tensor) != before:
                    return f"{name} has another shape, dtype or requires_grad"
            self._note()
        return reason

    def gone(self, model: nn.Module) -> bool:
        """Whether a tensor of ``model`` is another one or lies elsewhere, so that this state will hardly come back."""
        now = {id(t) for t in (*model.parameters(), *model.buffers())}
        return now != {*map(id, self.tensors)} or bool(self._moved())

    def _moved(self) -> str:
        """Which tensor lies elsewhere, as text."""
        for name, tensor, address in zip(self._names, self.tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"{name} lies elsewhere in memory"
        return ""


def _facts(t: torch.Tensor) -> tuple[object, ...]:
    """What a recording depends on beside a tensor's address and values."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad
