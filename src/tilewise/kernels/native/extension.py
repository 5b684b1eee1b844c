"""Native modules that are compiled on this machine, once, and kept where compiled kernels are.

They need a compiler and Python's header files, as Triton does. Where one cannot be had, :class:`Unavailable` says why.
"""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from tilewise.kernels.building import code_files
from tilewise.kernels.building.noted import note
from tilewise.machine import cache

__all__ = ["Extension", "Loading", "Unavailable", "file_name", "headers", "is_kept", "load", "missing"]


class Unavailable(Exception):
    """The module cannot be had. The message says why."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A module in C or C++, of which ``main`` is the file that is compiled and ``headers`` are the others.

    ``variable`` names the environment variable that names a compiler; else the first of ``compilers`` that is there
    compiles. One that takes more than ``longest_s`` seconds is ended. ``uses_torch`` says that it includes torch's
    headers and calls its libraries.
    """

    name: str
    main: str
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    language: str
    variable: str
    compilers: tuple[str, ...]
    longest_s: float = 60.0
    uses_torch: bool = False


class Loading:
    """One attempt to get a module, in a thread of its own: most of it is waiting for the compiler.

    ``then`` is called in that thread once the module is there.
    """

    def __init__(self, extension: Extension, then: Callable[[], None] = lambda: None) -> None:
        self.module: ModuleType | None = None
        self.reason = "a process was forked while the module was being loaded"
        self._extension, self._then = extension, then
        self._thread = threading.Thread(target=self._run, name=f"tilewise-{extension.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.module, self.reason = load(self._extension), ""
        except Unavailable as error:
            self.reason = str(error)
        except Exception as error:  # a fault of ours must not keep a plan from running
            self.reason = f"{type(error).__name__}: {error}"
        else:
            self._then()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._thread.is_alive()

    def finished(self) -> Loading:
        """This attempt, once it has ended."""
        self._thread.join()
        return self


def load(extension: Extension) -> ModuleType:
    """The module, from its file or compiled. Raises :class:`Unavailable`.

    A file that cannot be loaded, as one made with another C library cannot, is made anew.
    """
    path = cache.kernel_dir() / "native" / file_name(extension)
    note(f"native/{path.name}")
    kept = code_files.load(path)
    if kept is not None:
        try:
            return _loaded(extension, kept)
        except (ImportError, OSError):
            pass  # what is compiled next is loaded, or says why it cannot be
    code = _compiled(extension)
    try:
        module = _loaded(extension, code)
    except (ImportError, OSError) as error:
        raise Unavailable(f"the compiled module cannot be loaded: {error}") from error
    code_files.store(path, code)
    return module


def file_name(extension: Extension) -> str:
    """The name of the file that holds the module for this machine's Python, C library and, where it is used, torch."""
    return f"{extension.name}-{_version(extension)}.so"


def is_kept(extension: Extension) -> bool:
    """Whether there is a file of the module."""
    return (cache.kernel_dir() / "native" / file_name(extension)).is_file()


def missing(extension: Extension) -> str:
    """What the module lacks to be compiled; empty where nothing is known to be missing."""
    try:
        _compiler(extension)
        headers()
        if extension.uses_torch:
            _torch_flags()
    except Unavailable as error:
        return str(error)
    return ""


def headers() -> str:
    """The folder of Python's header files. Raises :class:`Unavailable`."""
    scheme = sysconfig.get_default_scheme()
    # Debian's Python installs into a scheme of its own, in which the header files are not.
    folder = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(folder, "Python.h").is_file():
        raise Unavailable(f"{folder} has no Python.h: the development files of Python would do (python3-dev)")
    return folder


def _sources(extension: Extension) -> dict[str, bytes]:
    """The files of the module by name."""
    folder = importlib.resources.files(__package__)
    return {name: folder.joinpath(name).read_bytes() for name in (extension.main, *extension.headers)}


def _version(extension: Extension) -> str:
    """A hash of all that tells one compiled module from another: its text, the binary interfaces, the machine.

    The compiler is not part of it: every one makes code for the same interface. So an image without a compiler can use
    what was made when it was built.
    """
    digest = hashlib.sha256()
    for name, text in _sources(extension).items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    python = sysconfig.get_config_var("SOABI"), sys.version_info[:2], platform.machine()
    interface = (*python, _c_library(), extension.flags, torch.__version__ if extension.uses_torch else "")
    digest.update(repr(interface).encode())
    return digest.hexdigest()[:24]


def _c_library() -> str:
    """Name and version of the C library; empty where it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""


def _compiler(extension: Extension) -> list[str]:
    """The command of the compiler. Raises :class:`Unavailable`."""
    asked = shlex.split(os.environ.get(extension.variable, ""))
    if asked:
        return asked
    for name in extension.compilers:
        if found := shutil.which(name):
            return [found]
    names = ", ".join(extension.compilers)
    raise Unavailable(
        f"there is no {extension.language} compiler: one named {names} or by {extension.variable} would do"
    )


def _torch_flags() -> tuple[list[str], list[str]]:
    """What the compiler and then the linker must be told of this torch. Raises :class:`Unavailable`."""
    folder = Path(torch.__file__).parent
    include, libraries = folder / "include", folder / "lib"
    if not (include / "torch" / "csrc" / "autograd" / "function.h").is_file():
        raise Unavailable(f"{include} has not torch's header files: a torch from a wheel would do")
    interface = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    before = [f"-I{include}", f"-D_GLIBCXX_USE_CXX11_ABI={interface}"]
    return before, [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def _compiled(extension: Extension) -> bytes:
    """The compiled module. Raises :class:`Unavailable`."""
    compiler, python = _compiler(extension), headers()
    before, after = _torch_flags() if extension.uses_torch else ([], [])
    with tempfile.TemporaryDirectory(prefix="tilewise-native-") as folder:
        for name, text in _sources(extension).items():
            Path(folder, name).write_bytes(text)
        out = Path(folder, f"{extension.name}.so")
        command = [
            *compiler,
            *extension.flags,
            f"-I{python}",
            *before,
            str(Path(folder, extension.main)),
            "-o",
            str(out),
        ]
        try:
            done = subprocess.run(
                [*command, *after], capture_output=True, text=True, errors="replace", timeout=extension.longest_s,
                check=False, cwd=folder,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler[0]} cannot be run: {error}") from error
        if done.returncode or not out.is_file():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            said = [line for line in said if "error" in line] or said
            reason = said[0] if said else "it says nothing"
            raise Unavailable(f"{compiler[0]} ended with {done.returncode}: {reason}"[:300])
        return out.read_bytes()


def _loaded(extension: Extension, code: bytes) -> ModuleType:
    """The module in ``code``. Raises ``ImportError`` or ``OSError``.

    It is loaded from memory, so that what was checked is what runs, wherever files may not be run from.
    """
    memory = os.memfd_create(
        f"tilewise-{extension.name}"
    )  # stays open: the loader tells libraries apart by their names
    with os.fdopen(os.dup(memory), "wb") as file:
        file.write(code)
    place = f"/proc/self/fd/{memory}"
    loader = importlib.machinery.ExtensionFileLoader(extension.name, place)
    specification = importlib.util.spec_from_file_location(extension.name, place, loader=loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module
