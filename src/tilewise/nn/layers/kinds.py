"""The kinds of modules that can be planned: one file of this folder for each kind, which registers itself.

A kind says which classes of modules it is for, how a call of such a module becomes problems, and how the module runs by
their plans. :func:`kind_of` finds a module's kind. Nothing else lists them: a new file in this folder is enough.

:mod:`tilewise.nn.layers.convolution` has the kind of torch's own convolutions.
"""

from __future__ import annotations

import abc
import functools
import importlib
import pkgutil
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import nn

from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import swap, swapped
from tilewise.nn.layers.weights import Weights
from tilewise.problems.base import Problem

__all__ = [
    "Call",
    "Layer",
    "Layers",
    "ModuleKind",
    "is_planned",
    "kind_of",
    "kinds",
    "offer_plans",
    "register",
    "run_by_plans",
    "take_offer",
    "withdraw_offer",
]

MARK = "_tilewise_planned"
"""The attribute of a function that computes a module by plans: the module's layers."""


class Call(Protocol):
    """One call of a layer as far as plans depend on it: a frozen, hashable dataclass.

    ``needs`` says which of its tensors need gradients, ``deterministic`` is torch's flag during the call, and ``shape``
    the shape of its input for the report.
    """

    @property
    def needs(self) -> tuple[bool, ...]: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Runs(Protocol):
    """What runs one kind of call."""

    @property
    def planned(self) -> bool:
        """Whether a plan computes any part of it."""
        ...


class Layer(Protocol):
    """What calls of one module have in common: it turns calls into problems and finds their plans in a plan table."""

    def problems(self, call: Any) -> Mapping[str, Problem]:
        """The problems of a call by the name of the pass, the forward's first.

        There is one for the forward, and one for each gradient of ``call.needs`` that is planned. Raises ``ValueError``
        for sizes that torch refuses.
        """
        ...

    def resolve(self, call: Any) -> Runs | None:
        """What runs such a call, its plans bound; ``None`` where it cannot be planned at this moment."""
        ...


class Layers(Protocol):
    """The layers of one module. A module has several where its calls differ by more than tensors."""

    def forget(self) -> None:
        """Let every layer look its plans up anew, since the plan table's plans have changed."""
        ...


class ModuleKind(abc.ABC):
    """One kind of modules, without state."""

    classes: ClassVar[tuple[type[nn.Module], ...]]
    """The modules that it is for, and those of classes derived from them."""
    under_limits: ClassVar[bool] = True
    """Whether they are planned under a memory limit, which torch's own choice must then keep as well."""
    named: ClassVar[bool] = False
    """Whether its layers have a ``name`` to be set: the module's in its model, for a profiler to show."""
    whole_graphs: ClassVar[bool] = False
    """Whether ``torch.compile(fullgraph=True)`` refuses such a module unless it computes by :meth:`forward`."""
    in_its_own_way: ClassVar[bool] = False
    """Whether ``resolve`` may say ``planned`` of calls for which no plan gains, since other operators of torch do."""
    problems: ClassVar[str] = ""
    """The first word of their problems' keys. A schedule without any such problem leaves them to torch."""

    @abc.abstractmethod
    def obstacle(self, module: nn.Module) -> str:
        """Why the computation of this module cannot be swapped; empty where it can."""

    @abc.abstractmethod
    def layers(self, plan_table: PlanTable, weights: Weights) -> Layers:
        """The layers of a module with its plans in ``plan_table``. ``weights`` says what may be kept of its weights."""

    @abc.abstractmethod
    def calls(
        self, module: Any, layers: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients_later: bool
    ) -> tuple[list[tuple[Layer, Call]], str]:
        """What ``module(*args, **kwargs)`` asks of its layers, or the reason why that is left to torch.

        With ``gradients_later`` the call runs without autograd, but runs again with it (a reentrant checkpoint): then
        the calls need all gradients that they may need.
        """

    @abc.abstractmethod
    def forward(self, module: Any, layers: Any) -> Callable[..., Any]:
        """A function of (module, *arguments) that computes the module by plans, with autograd.

        It computes as the module's class does where there is no plan, and where the module was changed so that
        :meth:`obstacle` finds something. It holds no tensor: copies of the module share it.
        """


_registered: dict[type[nn.Module], ModuleKind] = {}


def register(kind: ModuleKind) -> None:
    """Make a kind of modules known. Raises ``TypeError`` where one of its classes has a kind already."""
    for module_class in kind.classes:
        standing = _registered.setdefault(module_class, kind)
        if type(standing).__qualname__ != type(kind).__qualname__:
            names = f"{type(standing).__name__} and {type(kind).__name__}"
            raise TypeError(f"{module_class.__name__} has two kinds of modules, {names}; one of them would do")


@functools.cache
def _load() -> None:
    """Import every file of this folder, so that each kind registers itself."""
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{info.name}")


def kinds() -> tuple[ModuleKind, ...]:
    """All kinds of modules."""
    _load()
    return tuple(dict.fromkeys(_registered.values()))


def kind_of(module: nn.Module) -> ModuleKind | None:
    """The kind of ``module``: that of the nearest of its classes that has one; ``None`` for a module of no kind."""
    _load()
    return next((_registered[base] for base in type(module).__mro__ if base in _registered), None)


def run_by_plans(module: nn.Module, layers: Layers) -> None:
    """Let ``module``, which must be of a kind, compute by the plans of ``layers``.

    :func:`tilewise.nn.layers.swaps.swap_back` undoes it.
    """
    kind = kind_of(module)
    assert kind is not None
    forward = kind.forward(module, layers)
    forward.__name__ = "forward"
    forward.__qualname__ = f"{type(module).__qualname__}.forward"
    setattr(forward, MARK, layers)
    swap(module, forward)


_offers: weakref.WeakKeyDictionary[nn.Module, Layers] = weakref.WeakKeyDictionary()
"""Modules that compute as their class does, with the layers by which they may be compiled."""


def offer_plans(module: nn.Module, layers: Layers) -> None:
    """Let ``module`` compute as its class does, and by ``layers`` once it is compiled where that needs them."""
    kind = kind_of(module)
    if kind is not None and kind.whole_graphs:
        _offers[module] = layers


def take_offer(module: nn.Module) -> bool:
    """Let ``module`` compute by the layers that were offered, and return whether it computes by plans now."""
    layers = _offers.get(module)
    if layers is not None and not is_planned(module) and "forward" not in module.__dict__:
        run_by_plans(module, layers)
    return is_planned(module)


def withdraw_offer(module: nn.Module) -> None:
    """Undo :func:`offer_plans`."""
    _offers.pop(module, None)


def is_planned(module: nn.Module) -> bool:
    """Whether ``module`` computes by plans."""
    return hasattr(swapped(module), MARK)
