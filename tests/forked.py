"""Processes that begin with what takes seconds to import: each is forked from a server that has done it once.

There are two servers. One has imported tilewise, too, as that takes most of a second. The other has not: from it come
programs that have another copy of tilewise, or for which the import itself is what counts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

__all__ = ["ForkedScript", "run_script", "server"]

LATE = ("torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "torch._dynamo")
"""What torch imports at the first backward, comparison of tensors, and checkpoint."""
PRELOADED = ["torch", *LATE, "scipy.optimize", "sqlite3", "pytest", "hypothesis"]
if importlib.util.find_spec("numba") is not None:
    PRELOADED.append("numba")
TILEWISE = ["tilewise.nn", "tilewise.distributed", "tilewise.cli"]
_without_tilewise = forkserver.ForkServer()


def server() -> ForkServerContext:
    """The context whose processes share nothing with this one. They have imported tilewise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *TILEWISE])
    _start()
    return context


@contextlib.contextmanager
def _server_without_tilewise() -> Iterator[ForkServerContext]:
    """The context whose processes come from the server that has not imported tilewise, as long as this is entered."""
    _without_tilewise.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ensure_running", "connect_to_new_process", "get_inherited_fds"):
            patch.setattr(forkserver, name, getattr(_without_tilewise, name))
        _start()
        yield multiprocessing.get_context("forkserver")


def _start() -> None:
    """Have the server run.

    It starts without what the test that is first to ask has set for tilewise, save where files are kept: it lasts.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith("TILEWISE_")}
    for name in own:
        if name != "TILEWISE_CACHE_DIR":
            del os.environ[name]
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update(own)


class ForkedScript:
    """``python SCRIPT arguments`` as a process of its own in ``cwd`` with ``environment``, but for what is preloaded.

    ``script`` is a path, ``-m NAME`` a module, ``-c CODE`` a program. Variables that are read when Python starts or
    torch is imported have no effect, save ``PYTHONPATH`` and ``OMP_NUM_THREADS``; without ``has_tilewise`` those of
    tilewise have one, too.
    """

    def __init__(
        self, *words: str, environment: Mapping[str, str], cwd: Path | None = None, has_tilewise: bool = True
    ) -> None:
        self.args = list(words)
        self._files = [tempfile.NamedTemporaryFile("r", encoding="utf-8") for _ in range(2)]  # noqa: SIM115
        paths = [file.name for file in self._files]
        arguments = list(words), dict(environment), str(cwd or Path.cwd()), paths
        with contextlib.nullcontext(server()) if has_tilewise else _server_without_tilewise() as context:
            self.process: ForkServerProcess = context.Process(target=_main, args=arguments)
            self.process.start()

    def poll(self) -> int | None:
        """The exit status, or ``None`` while it runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.join(30)

    def aborted(self) -> str:
        """End it where it still runs; its exit status and all that it wrote, lastly the stacks of its threads."""
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, signal.SIGABRT)  # faulthandler tells them even where the GIL is never free
            self.process.join(10)
            self.kill()
        out, err = (file.read() for file in self._files)
        return f"exit status {self.process.exitcode}\n{out}\n{err}"

    def finished(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end; one that takes more than ``timeout`` seconds is aborted and raises."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            error = subprocess.TimeoutExpired(self.args, timeout)
            error.add_note(self.aborted())
            raise error
        out, err = (file.read() for file in self._files)
        return subprocess.CompletedProcess(self.args, self.process.exitcode, out, err)


def run_script(
    *words: str,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    timeout: float = 120,
    has_tilewise: bool = True,
) -> subprocess.CompletedProcess[str]:
    """A :class:`ForkedScript` to its end."""
    return ForkedScript(*words, environment=environment, cwd=cwd, has_tilewise=has_tilewise).finished(timeout)


def _main(words: list[str], environment: dict[str, str], cwd: str, paths: list[str]) -> None:
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    faulthandler.enable(2)  # for aborted(); by number, as a program may put something else in place of sys.stderr
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    first, *arguments = words
    named = first in ("-m", "-c")
    sys.path[:] = ["" if named else str(Path(first).parent), *added, *(p for p in sys.path if p not in added)]
    name, *arguments = arguments if named else [first, *arguments]
    sys.argv[:] = [first if named else name, *arguments]
    if first == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")
