"""Compiling kernels for a CPU in another process, where a program goes on beside planning.

Numba takes seconds for a kernel and holds Python's lock meanwhile. So on a thread that works in turns a process of its
own compiles, with what priority is left, and writes the machine code to disk, from where it is then loaded.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tilewise.kernels.building.kept import NotKept, kept_only
from tilewise.machine.turns import beside, in_turns, wait_apart

__all__ = ["compiled_elsewhere"]

PROGRAM = "tilewise.kernels.cpu.compile_process"
"""The module that is run as the process."""

P = ParamSpec("P")
T = TypeVar("T")


def compiled_elsewhere(load: Callable[P, T]) -> Callable[P, T]:
    """A decorator of a function that loads a kernel: where a program goes on beside it, another process compiles.

    The function is one that :data:`PROGRAM` knows, and its arguments are numbers and tuples of them. Where
    the process fails, the function compiles by itself, and so raises the reason. Machine code is read from disk, and
    Numba imported, beside the program.
    """
    here: set[object] = set()

    @functools.wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> T:
        if not in_turns() or args in here:
            return load(*args, **kwargs)
        with beside():
            try:
                with kept_only():
                    found = load(*args, **kwargs)
            except NotKept:
                _compile(load.__name__, args)
                found = load(*args, **kwargs)
        here.add(args)
        return found

    return loaded


def _compile(name: str, arguments: tuple[Any, ...]) -> None:
    """Have a process call the function called ``name``, and wait for it while the program goes on."""
    places = (os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, name, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "TILEWISE_ENABLE": "0"},
        start_new_session=True,  # Ctrl-C is the program's
    )
    try:
        wait_apart(lambda: process.poll() is not None)
    finally:
        process.kill()
        process.wait()
