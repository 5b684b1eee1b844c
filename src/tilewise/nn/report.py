"""What :func:`tilewise.optimize` did to each layer and pass of a model, and why."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tilewise.plan import Plan
from tilewise.problem import ConvProblem

__all__ = ["CallReport", "LayerReport", "PassReport", "Report", "keep", "report"]


@dataclass(frozen=True)
class PassReport:
    """One computation of a layer: ``role`` is ``forward``, ``grad_input`` or ``grad_weight``.

    ``plan`` is the plan chosen, torch's own included, ``None`` with a ``reason`` where there is none; ``torch_ms`` is
    torch's time beside which it was measured, where that is known. ``replaced`` says that the plan runs in the module.
    """

    role: str
    problem: ConvProblem
    plan: Plan | None
    torch_ms: float | None
    replaced: bool
    reason: str = ""

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
    """One convolution module; ``reason`` says why nothing was planned for it, empty where something was."""

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
    """Every convolution of a model, and ``facts`` of the whole by name. Prints as a table."""

    layers: tuple[LayerReport, ...]
    facts: dict[str, Any] = field(default_factory=dict)

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
            rows.append(
                (
                    layer.name,
                    "x".join(map(str, call.shape)),
                    one.role,
                    f"{ran} ({one.reason.splitlines()[0]})" if one.reason else ran,
                    _ms(one.planned_ms),
                    _ms(one.torch_ms),
                )
            )
        rows += [(layer.name, "", "", f"torch ({layer.reason})", "", "") for layer in self.layers if layer.reason]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows
        )


_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def keep(model: nn.Module, made: Report | None) -> None:
    """Remember the report of ``model``, or forget it."""
    if made is None:
        _reports.pop(model, None)
    else:
        _reports[model] = made


def report(model: nn.Module) -> Report:
    """What the last :func:`tilewise.optimize` of exactly this model did.

    Raises ``ValueError`` for a model that was not optimized, was restored since, or is a copy of an optimized one.
    """
    made = _reports.get(model)
    if made is None:
        raise ValueError(f"model={type(model).__name__}: tilewise.optimize has not been called on it, or was undone")
    return made


def _ms(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
