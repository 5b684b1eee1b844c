"""tilewise plans convolutions the way FFTW plans Fourier transforms.

Given a layer, a device and a memory limit it finds the fastest exact way to compute it there, remembers it, and runs it
in place of the framework's own choice.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from tilewise.version import VERSION as __version__

if TYPE_CHECKING:
    from tilewise import cpu, distributed, fft, rnn, settings
    from tilewise.nn import background
    from tilewise.nn.background.begin import wait
    from tilewise.nn.exported.export import export
    from tilewise.nn.exported.loaded import load_exported
    from tilewise.nn.functional import (
        conv1d,
        conv2d,
        conv3d,
        conv_transpose1d,
        conv_transpose2d,
        conv_transpose3d,
        linear,
    )
    from tilewise.nn.graphs.graphed import graphed
    from tilewise.nn.largest_batch import largest_batch
    from tilewise.nn.optimize import optimize, restore
    from tilewise.nn.report import summary
    from tilewise.nn.schedule import schedule
    from tilewise.nn.script.session import disable, enable, enabled
    from tilewise.nn.shared.shared import shared
    from tilewise.plan import Plan
    from tilewise.planner import NoPlanError, Options, Planner, Schedule, ScheduleError
    from tilewise.problems.conv.problem import ConvProblem, Pass
    from tilewise.problems.gemm.problem import GemmProblem
    from tilewise.problems.recurrent.problem import RecurrentProblem
    from tilewise.settings import Settings
    from tilewise.wisdom import Wisdom


_HOMES = {
    "tilewise.nn": (
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "disable",
        "enable",
        "enabled",
        "export",
        "graphed",
        "largest_batch",
        "linear",
        "load_exported",
        "optimize",
        "restore",
        "schedule",
        "shared",
        "summary",
        "wait",
    ),
    "tilewise.plan": ("Plan",),
    "tilewise.planner": ("NoPlanError", "Options", "Planner", "Schedule", "ScheduleError"),
    "tilewise.problems.conv.problem": ("ConvProblem", "Pass"),
    "tilewise.problems.gemm.problem": ("GemmProblem",),
    "tilewise.problems.recurrent.problem": ("RecurrentProblem",),
    "tilewise.settings": ("Settings",),
    "tilewise.wisdom": ("Wisdom",),
}
_MODULES = {
    "background": "tilewise.nn.background",
    "cpu": "tilewise.cpu",
    "distributed": "tilewise.distributed",
    "fft": "tilewise.fft",
    "rnn": "tilewise.rnn",
    "settings": "tilewise.settings",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ConvProblem",
    "GemmProblem",
    "NoPlanError",
    "Options",
    "Pass",
    "Plan",
    "Planner",
    "RecurrentProblem",
    "Schedule",
    "ScheduleError",
    "Settings",
    "Wisdom",
    "__version__",
    "background",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cpu",
    "disable",
    "distributed",
    "enable",
    "enabled",
    "export",
    "fft",
    "graphed",
    "largest_batch",
    "linear",
    "load_exported",
    "optimize",
    "restore",
    "rnn",
    "schedule",
    "settings",
    "shared",
    "summary",
    "wait",
]


def __getattr__(name: str) -> object:
    """Public names come from their modules on first use, so that importing tilewise costs nothing."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _enable_if_asked() -> None:
    """Enable planning where ``TILEWISE_ENABLE`` is 1. Raises ``ValueError`` when it is anything but 1, 0 or empty."""
    asked = os.environ.get("TILEWISE_ENABLE", "").strip()
    if asked not in ("", "0", "1"):
        raise ValueError(f"TILEWISE_ENABLE={asked!r}: 1 or 0 would do")
    if asked == "1":
        importlib.import_module("tilewise.nn.script.session").enable()


_enable_if_asked()
