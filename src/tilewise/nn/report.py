"""What :func:`tilewise.optimize` did to each layer and pass of a model, and why."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tilewise.nn.book import Book
from tilewise.nn.branch_times import BranchReport
from tilewise.nn.modules import unwrapped
from tilewise.nn.overrides import base_of, override
from tilewise.plan import Plan
from tilewise.problem import ConvProblem

__all__ = ["CallReport", "LayerReport", "PassReport", "Report", "forget", "keep", "kept", "report"]


@dataclass(frozen=True)
class PassReport:
    """One computation of a layer: ``role`` is ``forward``, ``grad_input`` or ``grad_weight``.

    ``plan`` is the plan chosen, torch's own included, ``None`` with a ``reason`` where there is none; ``torch_ms`` is
    torch's time beside which it was measured, where that is known. ``replaced`` says that the plan runs in the module.
    ``note`` says why a schedule's plan was not taken, empty where it was or there was no schedule.
    """

    role: str
    problem: ConvProblem
    plan: Plan | None
    torch_ms: float | None
    replaced: bool
    reason: str = ""
    note: str = ""

    @property
    def planned_ms(self) -> float | None:
        """The plan's time, torch's own where that won."""
        return None if self.plan is None else self.plan.time_ms


@dataclass(frozen=True)
class CallReport:
    """One way in which the example called a layer. ``shape`` is its input's, as planned (batched, padded)."""

    shape: tuple[int, ...]
    passes: tuple[PassReport, ...]


@dataclass(frozen=True)
class LayerReport:
    """One convolution module; ``reason`` says why nothing was planned for it, or runs by plan any more, else empty."""

    name: str
    kind: str
    calls: tuple[CallReport, ...]
    reason: str = ""

    @property
    def replaced(self) -> bool:
        """Whether the module's computation was swapped."""
        return any(p.replaced for p in self.passes())

    def passes(self) -> Iterator[PassReport]:
        """Every pass of every call."""
        for call in self.calls:
            yield from call.passes


@dataclass(frozen=True)
class Report:
    """Every convolution of a model, and its parallel branches where they were asked for. Prints as a table.

    ``facts``: what else was found, by name (``docs/json.md``).
    """

    layers: tuple[LayerReport, ...]
    branches: tuple[BranchReport, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def passes(self) -> Iterator[tuple[LayerReport, CallReport, PassReport]]:
        """Every pass with its call and layer."""
        for layer in self.layers:
            for call in layer.calls:
                for one in call.passes:
                    yield layer, call, one

    def __str__(self) -> str:
        rows = [("layer", "input", "pass", "runs", "plan ms", "torch ms")]
        for layer, call, one in self.passes():
            ran = one.plan.solver if one.plan is not None and one.replaced else "torch"
            said = one.reason or one.note
            rows.append(
                (
                    layer.name,
                    "x".join(map(str, call.shape)),
                    one.role,
                    f"{ran} ({said.splitlines()[0]})" if said else ran,
                    _ms(one.planned_ms),
                    _ms(one.torch_ms),
                )
            )
        rows += [(layer.name, "", "", f"torch ({layer.reason})", "", "") for layer in self.layers if layer.reason]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *map(str, self.branches)])


_kept: weakref.WeakKeyDictionary[nn.Module, tuple[Report, Book, bool]] = weakref.WeakKeyDictionary()


def keep(model: nn.Module, made: Report, book: Book, deterministic: bool) -> None:
    """Remember the report of ``model``, its plans, and whether torch's deterministic flag was on."""
    _kept[model] = made, book, deterministic


def forget(model: nn.Module) -> None:
    """Remember nothing of ``model`` any more."""
    _kept.pop(model, None)


def report(model: nn.Module) -> Report:
    """What the last :func:`tilewise.optimize` of exactly this model did.

    A layer that was overridden since (a ``forward`` set on it, say) computes by torch, and has the reason.

    Raises ``ValueError`` for a model that was not optimized, was restored since, or is a copy of an optimized one.
    """
    made, inner = kept(model)[0], unwrapped(model)
    return replace(made, layers=tuple(_as_it_is(layer, inner) for layer in made.layers))


def _as_it_is(layer: LayerReport, model: nn.Module) -> LayerReport:
    """``layer`` as it runs now."""
    if not layer.replaced:
        return layer
    try:
        module = model.get_submodule(layer.name)
    except AttributeError:
        return _by_torch(layer, "is no longer in the model")
    if base_of(module) is None:
        return _by_torch(layer, f"is a {type(module).__name__} now")
    reason = override(module)
    return _by_torch(layer, reason) if reason else layer


def _by_torch(layer: LayerReport, reason: str) -> LayerReport:
    calls = tuple(
        replace(call, passes=tuple(replace(one, replaced=False) for one in call.passes)) for call in layer.calls
    )
    return replace(layer, calls=calls, reason=reason)


def kept(model: nn.Module) -> tuple[Report, Book, bool]:
    """What :func:`keep` was told. Raises ``ValueError`` as :func:`report`."""
    found = _kept.get(model)
    if found is None:
        raise ValueError(f"model={type(model).__name__}: tilewise.optimize has not been called on it, or was undone")
    return found


def _ms(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
