"""A process that compiles one kernel for a CPU and leaves it on disk.

Run as ``python -m tilewise.kernels.cpu.compile_process NAME ARGUMENTS``: a function that loads a kernel, of
``compiling.py``, ``channels_last/compiling.py`` or ``tile_registers/compiling.py``, and its arguments as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from tilewise.kernels.cpu import compiling
from tilewise.kernels.cpu.channels_last import compiling as channels_last
from tilewise.kernels.cpu.tile_registers import compiling as tile_registers

__all__ = ["main"]

NICE = 19
"""The priority of the process: the least there is."""


def main() -> None:
    """Call the function that the command line names. Raises ``SystemExit`` for any other."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    name, arguments = sys.argv[1:]
    loads = {
        each: getattr(module, each)
        for module in (compiling, channels_last, tile_registers)
        for each in module.__all__
        if each.startswith("load")
    }
    if name not in loads:
        raise SystemExit(f"{name!r}: one of {', '.join(loads)} would do")
    loads[name](*_tuples(json.loads(arguments)))


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, at every depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
