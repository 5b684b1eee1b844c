"""tilewise plans convolutions the way FFTW plans Fourier transforms.

Given a layer, a device and a memory limit it finds the fastest exact way to compute it there, remembers it, and runs it
in place of the framework's own choice.

>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
>>> model = tilewise.optimize(model, torch.randn(2, 3, 16, 16), rigor="estimate")
>>> tilewise.__version__.count(".") >= 2
True
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from tilewise.version import VERSION as __version__

if TYPE_CHECKING:
    from tilewise import advice as advice
    from tilewise import axis as axis
    from tilewise import cpu, distributed, fft, rnn, settings
    from tilewise import device as device
    from tilewise import execute as execute
    from tilewise import nn as nn
    from tilewise import notation as notation
    from tilewise import plan as plan
    from tilewise import planner as planner
    from tilewise import problem as problem
    from tilewise import solvers as solvers
    from tilewise import wisdom as wisdom
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
    "advice": "tilewise.advice",
    "axis": "tilewise.axis",
    "background": "tilewise.nn.background",
    "cpu": "tilewise.cpu",
    "device": "tilewise.device",
    "distributed": "tilewise.distributed",
    "execute": "tilewise.execute",
    "fft": "tilewise.fft",
    "nn": "tilewise.nn",
    "notation": "tilewise.notation",
    "plan": "tilewise.plan",
    "planner": "tilewise.planner",
    "problem": "tilewise.problem",
    "rnn": "tilewise.rnn",
    "settings": "tilewise.settings",
    "solvers": "tilewise.solvers",
    "wisdom": "tilewise.wisdom",
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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_close_to(name)}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _close_to(name: str) -> str:
    """What was perhaps meant by ``name``, for an error message; empty where nothing is like it."""
    if name.startswith("_"):  # what programs ask for, not people
        return ""
    import difflib

    close = difflib.get_close_matches(name.lower(), __dir__(), n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _enable_if_asked() -> None:
    """Enable planning where ``TILEWISE_ENABLE`` is 1. Raises ``ValueError`` when it is anything but 1, 0 or empty."""
    asked = os.environ.get("TILEWISE_ENABLE", "").strip()
    if asked not in ("", "0", "1"):
        raise ValueError(f"TILEWISE_ENABLE={asked!r}: 1 or 0 would do")
    if asked == "1":
        importlib.import_module("tilewise.nn.script.session").enable()


_enable_if_asked()
