"""The C module that queues launches, compiled on this machine and kept where compiled kernels are.

It needs a C compiler and Python's header files, as Triton does, and is compiled once for each version of Python. Where
that cannot be done, kernels are launched from Python as before, and :func:`why_not` says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tilewise.kernels.building import code_files
from tilewise.kernels.building.noted import note
from tilewise.machine import cache

__all__ = ["VARIABLE", "Native", "Unavailable", "file_name", "load", "native", "start", "why_not"]

VARIABLE = "TILEWISE_NATIVE"
"""The environment variable that keeps launches in Python where it is 0."""
NAME = "launches"
MAIN, HEADERS = "launches.c", ("driver.h", "launch_list.h", "pass_call.h")
FLAGS = ("-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
"""Compilers that are looked for where ``$CC`` names none."""
LONGEST_S = 60.0
"""Seconds that the compiler may take."""
DRIVER = "libcuda.so.1"


class Unavailable(Exception):
    """The module cannot be had. The message says why."""


def switched_on() -> bool:
    """Whether :data:`VARIABLE` leaves launches in C on. Raises ``ValueError`` for a value that makes no sense."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={asked!r}: 1 or 0 would do")
    return asked != "0"


class _Loading:
    """One attempt to get the module, in a thread of its own: most of it is waiting for the compiler."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.reason = "a process was forked while the module was being loaded"
        self._thread = threading.Thread(target=self._run, name="tilewise-native", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.module, self.reason = load(), ""
        except Unavailable as error:
            self.reason = str(error)
        except Exception as error:  # a fault of ours must not keep a plan from running
            self.reason = f"{type(error).__name__}: {error}"

    def finished(self) -> _Loading:
        """This attempt, once it has ended."""
        self._thread.join()
        return self


@functools.cache
def start() -> None:
    """Begin to load the module, or to compile it, in the background, where launches can come from C.

    Costs nothing the next time. Raises ``ValueError`` for a :data:`VARIABLE` that makes no sense.
    """
    if switched_on() and torch.version.cuda is not None:
        _loading()


@functools.cache
def _loading() -> _Loading:
    """This process's attempt to load the module."""
    return _Loading()


class Native(NamedTuple):
    """The module, and the functions of the driver that its ``LaunchList`` takes."""

    module: ModuleType
    driver: Any


def native() -> Native | None:
    """The module with the CUDA driver; ``None`` where launches stay in Python.

    Waits until the module is there, at most for the time of one compilation. That happens once on a machine, and most
    of it while kernels are compiled. So launches come from C from the first call on, or never. Raises as :func:`start`.
    """
    return _native()[0]


def why_not() -> str:
    """Why launches of this process come from Python; empty where they come from C. Waits as :func:`native` does."""
    return _native()[1]


@functools.cache
def _native() -> tuple[Native | None, str]:
    """The module with the driver's functions, or why there are none."""
    if not switched_on():
        return None, f"{VARIABLE} is 0"
    if torch.version.cuda is None:
        return None, "this torch has no CUDA"
    loading = _loading().finished()
    if loading.module is None:
        return None, loading.reason
    try:
        return Native(loading.module, loading.module.Driver(DRIVER)), ""
    except OSError as error:
        return None, str(error)


def load() -> ModuleType:
    """The module, from its file or compiled. Raises :class:`Unavailable`.

    A file that cannot be loaded, as one made with another C library cannot, is made anew.
    """
    path = cache.kernel_dir() / "native" / file_name()
    note(f"native/{path.name}")
    kept = code_files.load(path)
    if kept is not None:
        try:
            return _loaded(kept)
        except (ImportError, OSError):
            pass  # what is compiled next is loaded, or says why it cannot be
    code = _compiled()
    try:
        module = _loaded(code)
    except (ImportError, OSError) as error:
        raise Unavailable(f"the compiled module cannot be loaded: {error}") from error
    code_files.store(path, code)
    return module


def file_name() -> str:
    """The name of the file that holds the module for this machine's Python and C library."""
    return f"{NAME}-{_version()}.so"


def _sources() -> dict[str, bytes]:
    """The files of the module by name."""
    folder = importlib.resources.files(__package__)
    return {name: folder.joinpath(name).read_bytes() for name in (MAIN, *HEADERS)}


def _version() -> str:
    """A hash of all that tells one compiled module from another: its text, Python's binary interface, the machine.

    The compiler is not part of it: every one makes code for the same interface. So an image without a compiler can use
    what was made when it was built.
    """
    digest = hashlib.sha256()
    for name, text in _sources().items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    interface = sysconfig.get_config_var("SOABI"), sys.version_info[:2], platform.machine(), _c_library(), FLAGS
    digest.update(repr(interface).encode())
    return digest.hexdigest()[:24]


def _c_library() -> str:
    """Name and version of the C library; empty where it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""


def _compiler() -> list[str]:
    """The command of the C compiler. Raises :class:`Unavailable`."""
    asked = shlex.split(os.environ.get("CC", ""))
    if asked:
        return asked
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise Unavailable(f"there is no C compiler: one named {', '.join(COMPILERS)} or by CC would do")


def _headers() -> str:
    """The folder of Python's header files. Raises :class:`Unavailable`."""
    scheme = sysconfig.get_default_scheme()
    # Debian's Python installs into a scheme of its own, in which the header files are not.
    folder = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(folder, "Python.h").is_file():
        raise Unavailable(f"{folder} has no Python.h: the development files of Python would do (python3-dev)")
    return folder


def _compiled() -> bytes:
    """The compiled module. Raises :class:`Unavailable`."""
    compiler, headers = _compiler(), _headers()
    with tempfile.TemporaryDirectory(prefix="tilewise-native-") as folder:
        for name, text in _sources().items():
            Path(folder, name).write_bytes(text)
        out = Path(folder, f"{NAME}.so")
        command = [*compiler, *FLAGS, f"-I{headers}", str(Path(folder, MAIN)), "-o", str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=LONGEST_S, check=False, cwd=folder
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler[0]} cannot be run: {error}") from error
        if done.returncode or not out.is_file():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            reason = said[0] if said else "it says nothing"
            raise Unavailable(f"{compiler[0]} ended with {done.returncode}: {reason}"[:300])
        return out.read_bytes()


def _loaded(code: bytes) -> ModuleType:
    """The module in ``code``. Raises ``ImportError`` or ``OSError``.

    It is loaded from memory, so that what was checked is what runs, wherever files may not be run from.
    """
    memory = os.memfd_create(f"tilewise-{NAME}")  # stays open: the loader tells libraries apart by their names
    with os.fdopen(os.dup(memory), "wb") as file:
        file.write(code)
    place = f"/proc/self/fd/{memory}"
    loader = importlib.machinery.ExtensionFileLoader(NAME, place)
    specification = importlib.util.spec_from_file_location(NAME, place, loader=loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module
