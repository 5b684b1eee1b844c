"""The compilers of GPU kernels, loaded before they are needed."""

from __future__ import annotations

import contextlib
import importlib.util

from tilewise.kernels.cuda import launch

__all__ = ["load"]


def load() -> None:
    """Import those that are installed, and learn by what names they keep kernels: half a second to two for a process.

    No GPU is touched, and nothing is compiled. What fails here fails again where it is needed, which keeps the reason.
    """
    if importlib.util.find_spec("triton") is not None:
        with contextlib.suppress(Exception):
            from tilewise.kernels.triton.jobs import read_compiler

            read_compiler()
    if not launch.unavailable():
        with contextlib.suppress(Exception):  # cuda.core is there, its compiler's library perhaps not
            launch.compiler()
