"""What :func:`tilewise.optimize` says at its end: one line on what it did, or a warning where it could do nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.nn.notices.channel import NothingPlannedWarning, say, warn
from tilewise.nn.report import LayerReport, RegionReport, Report
from tilewise.nn.step.result import StepReport, ratio_in_words
from tilewise.plan import format_bytes

__all__ = ["conclude", "in_one_line", "why_nothing"]

MORE = "tilewise.summary(model) tells more"
PLANNED_KINDS = "convolutions, linear and recurrent layers, pooling and local response norms"
MOST_REASONS = 3
"""Reasons that a warning names at the most."""


def conclude(model: nn.Module, made: Report, *, silent: bool) -> None:
    """Say what was done to ``model``: one line, or a :class:`NothingPlannedWarning` where nothing could be planned.

    Of several ranks rank 0 says it. The line is only shown on stderr where that is not to be ``silent``.
    """
    if several_ranks() and dist.get_rank() > 0:
        return
    reason = why_nothing(model, made)
    if reason:
        warn(
            f"nothing was planned in this {type(model).__name__}: {reason}. It computes as before",
            NothingPlannedWarning,
        )
    else:
        say(in_one_line(made), shown=not silent)


def why_nothing(model: nn.Module, made: Report) -> str:
    """Why nothing in ``model`` could be planned; empty where something was, though torch may be faster at all of it."""
    if any(True for _ in made.passes()) or any(region.speedup is not None for region in made.regions):
        return ""
    if not made.layers:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            return (
                "it is scripted by torch.jit, and tilewise plans modules of Python: the model before scripting would do"
            )
        return f"it has none of the layers that tilewise plans ({PLANNED_KINDS})"
    alike: dict[str, list[LayerReport]] = {}
    for layer in made.layers:
        alike.setdefault(layer.reason, []).append(layer)
    reasons = sorted(alike.items(), key=lambda item: -len(item[1]))
    told = [f"{_layers(layers)} {_predicate(why)}" for why, layers in reasons[:MOST_REASONS]]
    left = sum(len(layers) for _, layers in reasons[MOST_REASONS:])
    return "; ".join([*told, *([f"{left} more for other reasons"] if left else [])])


def _layers(layers: Sequence[LayerReport]) -> str:
    """So many layers of these kinds, in words.

    >>> _layers([LayerReport("a", "Linear", ()), LayerReport("b", "Conv2d", ()), LayerReport("c", "Conv2d", ())])
    'Conv2d (2), Linear (1):'
    """
    kinds = Counter(layer.kind for layer in layers)
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items())) + ":"


def _predicate(reason: str) -> str:
    """A layer's reason, which is never empty here."""
    return (reason or "not called").splitlines()[0]


def in_one_line(made: Report) -> str:
    """What was done, in one line: how many layers, the step before and after, the workspace, and how to see more.

    >>> print(in_one_line(Report(())))
    planned 0 of 0 layers: torch is as fast or faster; tilewise.summary(model) tells more
    """
    kept = [region for region in made.regions if region.kept]
    by_plan = sum(layer.replaced for layer in made.layers)
    parts = [_regions(kept)] if kept else []
    if made.pending:
        count = sum(1 for _ in made.passes())
        parts.append(f"{made.pending} of {count} passes are planned in the background, between the program's steps")
    elif by_plan or not kept:
        parts.append(f"planned {by_plan} of {len(made.layers)} layers{'' if by_plan else _why_none(made)}")
    graphs = made.facts.get("graphs")
    if graphs is not None and graphs["kept"]:
        parts.append("replayed from CUDA graphs")
    if made.step is not None and not made.pending and not (kept and made.step.reason):
        parts += _step(made.step, by_plan)
    if made.workspace:
        parts.append(f"workspace up to {format_bytes(made.workspace)}")
    return "; ".join([*parts, MORE])


def _why_none(made: Report) -> str:
    """Why no layer runs by plan although some were planned."""
    compared = made.step is not None and not made.step.reason
    return "" if compared else ": torch is as fast or faster"


def _regions(kept: Sequence[RegionReport]) -> str:
    """What became of parts that run as regions."""
    first = kept[0]
    if len(kept) == 1 and first.torch_ms is not None and first.planned_ms is not None:
        where = f"{first.name} runs" if first.name else "the whole model runs"
        ratio = f"{first.speedup:.2f}x in the median pair"
        return f"{where} as one region, {first.torch_ms:.4g} -> {first.planned_ms:.4g} ms ({ratio})"
    return f"{len(kept)} parts run as regions"


def _step(step: StepReport, by_plan: int) -> list[str]:
    """What became of the step; nothing where no step was compared because nothing runs by plan."""
    if step.pending or step.reason:
        return [f"step not compared ({step.reason})"] if by_plan and not step.pending else []
    ranks = f" of {step.ranks} ranks" if step.ranks > 1 else ""
    ratio = ratio_in_words(step.speedup, step.least, step.most)
    if not step.kept:
        return [f"step{ranks} stays torch's at {step.torch_ms:.4g} ms, plans are not surely faster ({ratio})"]
    return [f"step{ranks} {step.torch_ms:.4g} -> {step.planned_ms:.4g} ms ({ratio})"]
