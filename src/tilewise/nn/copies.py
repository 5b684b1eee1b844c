"""Which planned model another one is a copy of: ``copy.deepcopy`` of a planned model runs by the same plans."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from tilewise.nn.layers.swaps import swapped

__all__ = ["original_of", "why_no_report"]


def original_of(model: nn.Module, candidates: Iterable[nn.Module]) -> nn.Module | None:
    """That of ``candidates`` of which ``model`` is a copy: every module of it that runs by plan does so by the same.

    A part of a planned model is no copy of it, as its modules have other names there. ``None`` where there is none.
    """
    ours = {name: forward for name, module in model.named_modules() if (forward := swapped(module)) is not None}
    for candidate in candidates if ours else ():
        theirs = dict(candidate.named_modules())
        alike = all(name in theirs and swapped(theirs[name]) is forward for name, forward in ours.items())
        if alike and type(candidate) is type(model):
            return candidate
    return None


def why_no_report(model: nn.Module) -> str:
    """Why there is no report of ``model``, which is neither a planned model nor a copy of one, and what would do."""
    why = "tilewise.optimize has not been called on it, or was undone"
    if any(swapped(module) is not None for module in model.modules()):
        why = "it is a part of a planned model, or a copy of one that is gone or changed; the report is that one's"
    return f"{why}; a call of tilewise.optimize(model, example_inputs) would do"
