"""The compilers of GPU kernels, loaded before they are needed."""

from __future__ import annotations

import importlib.util

from tilewise.kernels.cuda import launch

__all__ = ["load"]


def load() -> None:
    """Import those that are installed, and learn by what names they keep kernels: half a second to two for a process.

    No GPU is touched, and nothing is compiled.
    """
    if importlib.util.find_spec("triton") is not None:
        from tilewise.kernels.triton.jobs import read_compiler

        read_compiler()
    if not launch.unavailable():
        launch.compiler()
