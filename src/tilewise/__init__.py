"""tilewise plans convolutions the way FFTW plans Fourier transforms.

Given a layer, a device and a memory limit it finds the fastest exact way to compute it there, remembers it, and runs it
in place of the framework's own choice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tilewise.version import VERSION as __version__

if TYPE_CHECKING:
    from tilewise import cpu, fft
    from tilewise.nn.batch import largest_batch
    from tilewise.nn.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
    from tilewise.nn.optimize import optimize, restore
    from tilewise.plan import Plan
    from tilewise.planner import NoPlanError, Options, Planner
    from tilewise.problem import ConvProblem, Pass
    from tilewise.wisdom import Wisdom


_HOMES = {
    "tilewise.nn": (
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "largest_batch",
        "optimize",
        "restore",
    ),
    "tilewise.plan": ("Plan",),
    "tilewise.planner": ("NoPlanError", "Options", "Planner"),
    "tilewise.problem": ("ConvProblem", "Pass"),
    "tilewise.wisdom": ("Wisdom",),
}
_MODULES = ("cpu", "fft")
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ConvProblem",
    "NoPlanError",
    "Options",
    "Pass",
    "Plan",
    "Planner",
    "Wisdom",
    "__version__",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cpu",
    "fft",
    "largest_batch",
    "optimize",
    "restore",
]


def __getattr__(name: str) -> object:
    """Public names come from their modules on first use, so that importing tilewise costs nothing."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
