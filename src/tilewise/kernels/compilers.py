"""Loading the compilers of GPU kernels before they are needed."""

from __future__ import annotations

import contextlib
import importlib.util

from tilewise.kernels.cuda import launch

__all__ = ["load"]


def load() -> None:
    """Import the compilers that are installed and read the keys of their caches, which takes half a second to two.

    No GPU is touched, and nothing is compiled. What fails here fails again where it is needed, and the reason is kept
    there.
    """
    if importlib.util.find_spec("triton") is not None:
        with contextlib.suppress(Exception):
            from tilewise.kernels.building.jobs import read_compiler

            read_compiler()
    if not launch.unavailable():
        with contextlib.suppress(Exception):  # cuda.core is there, its compiler's library perhaps not
            launch.compiler()
