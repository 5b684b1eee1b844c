"""How ``torch.compile`` sees the call of a region: as one operator, where there is a program for it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from tilewise.nn.layers.frozen import compiler_of_trace, is_frozen_by_inductor
from tilewise.nn.regions.compiled.contest import Contest, is_alone
from tilewise.nn.regions.compiled.operator import Form, Known, publish, returned, returns_of
from tilewise.nn.regions.trace import Traced
from tilewise.nn.regions.units import value_of

__all__ = ["Compilations", "trace"]

Call = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]
"""Computes a call of a module."""


class Program(Protocol):
    """What is known of a program of the module."""

    traced: Traced
    shape: tuple[Any, ...]
    modes: Any


class Compilations:
    """The operators in whose form compiled graphs hold the calls of one module.

    ``call`` computes a call as the planned module does, and ``note`` is told what was faster. The module is held
    weakly: graphs name their regions, and a name is forgotten with its module.
    """

    def __init__(self, module: nn.Module, call: Call, note: Callable[[dict[str, Any]], object]) -> None:
        self._module, self._call, self._note = weakref.ref(module), call, note
        self._made: dict[tuple[Any, ...], tuple[Known | None, Contest, Any]] = {}

    def known(self, programs: Iterable[Program]) -> tuple[Known, ...]:
        """The kinds of calls that the graph which is traced at this moment may hold as operators.

        Dynamo calls this while it traces. Arguments must be tensors alone, by position.
        """
        module = self._module()
        if module is None or is_alone():
            return ()
        backend, frozen = compiler_of_trace(), is_frozen_by_inductor()
        found = []
        for program in programs:
            key = (program.shape, program.modes, id(backend), frozen)
            if key not in self._made:
                contest = self._contest(module, backend, frozen)
                self._made[key] = _published(program, contest), contest, backend
            found.append(self._made[key][0])
        return tuple(known for known in found if known is not None)

    def _contest(self, module: nn.Module, backend: Any, frozen: bool) -> Contest:
        """What an operator runs."""
        reference, call = self._module, self._call

        def by_program(*tensors: torch.Tensor) -> Any:
            itself = reference()
            assert itself is not None, "the module holds what calls this"
            return call(itself, tensors, {})

        return Contest(by_program, _class_forward(module), backend, frozen=frozen, note=self._note)


def _published(program: Program, contest: Contest) -> Known | None:
    """The operator for one kind of calls; ``None`` where arguments or results are not what :class:`Known` can tell."""
    traced = program.traced
    returns = returns_of(traced.structure, iter(traced.leaves))
    _, others, *given = program.shape
    if others is not None or returns is None:
        return None
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    device = given[0][3]
    results = [Form.of(value_of(node)) for node in output.args[0]]
    tensors = tuple((tuple(shape), tuple(strides), dtype, place) for shape, strides, dtype, place in given)
    name = publish(contest, tuple(Form(*each) for each in tensors), tuple(replace(r, device=device) for r in results))
    return Known(name, tensors, returns)


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    """What ``module`` computes by its class, as a function with code of its own that holds the module weakly.

    Dynamo keeps what it compiled, and counts how often, by code: parts of one class must not share it.
    """
    forward, reference = type(module).forward, weakref.ref(module)

    def alone(*tensors: torch.Tensor) -> Any:
        return forward(reference(), *tensors)

    return types.FunctionType(alone.__code__.replace(), alone.__globals__, "alone", None, alone.__closure__)


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], kinds_of: Callable[[int], tuple[Known, ...]]
) -> Any:
    """What Dynamo traces for a call of ``module``: the operator of a program that fits, or the class's own forward.

    ``kinds_of`` gives the kinds of calls of the module with an ``id``; to Dynamo its result is a constant.
    """
    # An exported program runs without tilewise.
    if torch.compiler._is_exporting_flag or not torch.compiler.is_dynamo_compiling() or kwargs:
        return type(module).forward(module, *args, **kwargs)
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        for known in kinds_of(id(module)):
            if fits(known, args):
                return returned(known.returns, torch.ops.tilewise.region(list(args), known.name))
    return type(module).forward(module, *args, **kwargs)


def fits(known: Known, args: tuple[Any, ...]) -> bool:
    """Whether ``args`` are tensors as the known call has them."""
    if len(args) != len(known.tensors):
        return False
    for t, (shape, strides, dtype, device) in zip(args, known.tensors, strict=True):
        if type(t) is not torch.Tensor or t.dim() != len(shape):
            return False
        if t.shape != shape or t.stride() != strides or t.dtype != dtype or t.device != device:
            return False
    return True
