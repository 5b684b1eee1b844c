"""Host time of a pass of three kernels: launched from Python by Triton's launchers, and queued by one call from C.

Without a GPU the driver is a stand-in that counts launches and returns at once, so that what is left is the host's own
time; what a real driver takes comes on top on both sides. With a GPU the plan is ``implicit_gemm``'s of a small layer,
and the driver's time is part of both. "hot" is the least mean of many calls in a row. "cold" is the median of calls
between which 64 MiB are written, as in a network, where the objects of each layer have left the caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness.result import Result, Row, Side
from harness.settings import BadInput, NothingToMeasure, Settings

from tilewise import execute, solvers
from tilewise.kernels.native import building
from tilewise.kernels.native.sequence import Address, KernelLaunch, LaunchSequence
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.conv import ConvSolver

DEFAULTS = {"calls": "2000", "batches": "15", "cold": "200", "launches": "3"}
QUICK = {"calls": "50", "batches": "2", "cold": "5"}
COLD_BYTES = 64 << 20
DRIVER = Path(__file__).resolve().parent.parent / "tests" / "kernels" / "native" / "standin_driver.c"
SCALARS = 24
"""Numbers that each kernel takes beside its addresses, as ours do."""
POINTERS = ((0, 0), (1, 0), (2, 0), (3, 256))


def run(settings: Settings) -> Result:
    """Rows of a pass with and without a new result, hot and cold; values are microseconds a call."""
    if settings.integer("launches") < 1:
        raise BadInput(f"launches={settings.integer('launches')}: one or more would do")
    with contextlib.ExitStack() as stack:
        if settings.device.type == "cuda":
            problem, bind = _on_gpu()
        else:
            problem, bind = _on_standin(stack, settings.integer("launches"))
        if reason := building.why_not():
            raise NothingToMeasure(f"launches do not come from C here: {reason}")
        native = bind()
        with _in_python():
            plain = bind()
        tensors = (*make_operands(problem), make_result(problem))
        rows = [row for given in (False, True) for row in _rows(settings, plain, native, tensors, given=given)]
    return Result(rows)


def _rows(
    settings: Settings, plain: execute.Bound, native: execute.Bound, tensors: tuple[torch.Tensor, ...], *, given: bool
) -> Iterator[Row]:
    """Hot and cold, for a result that is allocated or ``given``."""
    a, b, out = tensors
    into = out if given else None
    calls = [lambda call=bound.call: call(a, b, None, into) for bound in (plain, native)]
    what = "into a given result" if given else "with a new result"
    for name, times in (("hot", _hot(settings, calls)), ("cold", _cold(settings, calls))):
        sides = Side("from Python", times[0]), Side("from C", times[1])
        yield Row(f"a pass {what}, {name}", name, *sides, unit="us")


def _hot(settings: Settings, calls: list[Callable[[], Any]]) -> list[float]:
    """The least mean of batches, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    count = settings.integer("calls")
    for _ in range(settings.integer("batches")):
        for index, call in enumerate(calls):
            _wait(settings.device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[index].append((time.perf_counter() - start) / count * 1e6)
    return [min(each) for each in times]


def _cold(settings: Settings, calls: list[Callable[[], Any]]) -> list[float]:
    """The median of single calls, in turns, with memory written before each."""
    times: list[list[float]] = [[] for _ in calls]
    memory = torch.zeros(COLD_BYTES, dtype=torch.uint8, device="cpu")
    for _ in range(settings.integer("cold")):
        for index, call in enumerate(calls):
            _wait(settings.device)
            memory.add_(1)
            start = time.perf_counter()
            call()
            times[index].append((time.perf_counter() - start) * 1e6)
    return [statistics.median(each) for each in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Plans that are bound now launch from Python."""
    with _changed(building, "_native", lambda: (None, "for a benchmark")):
        yield


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while."""
    there = name in vars(owner)
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if there else delattr(owner, name)


def _layer(device: str) -> ConvProblem:
    return ConvProblem(Pass.FPROP, 2, 16, 16, (Axis(8, 3, 1, 1, 1, 1),) * 2, device=device)


def _on_gpu() -> tuple[ConvProblem, Callable[[], execute.Bound]]:
    """A small layer, and what binds its plan."""
    p, solver = _layer(device_name("cuda")), solvers.get("implicit_gemm")
    if reasons := solver.why_not(p):
        raise NothingToMeasure(f"implicit_gemm: {'; '.join(reasons)}")
    plan = Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p))))
    operands = make_operands(p)
    return p, lambda: execute.bind(plan, p, *operands)


def _on_standin(stack: contextlib.ExitStack, launches: int) -> tuple[ConvProblem, Callable[[], execute.Bound]]:
    """A layer whose plan is so many kernels of a driver that returns at once, and what binds it."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    library = _standin(Path(folder))
    module = building.load()
    native = building.Native(module, module.Driver(str(library)))
    stack.enter_context(_changed(building, "_native", lambda: (native, "")))
    stack.enter_context(_changed(torch._C, "_cuda_getCurrentRawStream", lambda device: 0))
    solver = Standin(Path(folder), launches)
    known = (*solvers.all_solvers(), solver)
    stack.enter_context(_changed(solvers, "all_solvers", lambda: known))
    p = _layer("cpu")
    plan, operands = Plan(p.key, solver.name, solver.version), make_operands(p)
    return p, lambda: execute.bind(plan, p, *operands)


def _standin(folder: Path) -> Path:
    """The driver that returns at once, compiled, and loaded where Triton's launchers look for it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NothingToMeasure("there is no C compiler, and no GPU")
    path = folder / "libcuda.so.1"
    named = "-Wl,-soname,libcuda.so.1"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-pthread", named, str(DRIVER), "-o", str(path)], check=True)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path


class Standin(ConvSolver):
    """Kernels that do nothing, launched by Triton's own launcher or told to the driver."""

    name, version = "standin", 1
    devices = frozenset({"cpu"})

    def __init__(self, folder: Path, launches: int) -> None:
        self._launches, self._launcher = launches, _launcher(folder)

    def unsupported(self, p: Any) -> list[str]:
        return []

    def configs(self, p: Any) -> Any:
        return ()

    def workspace(self, p: Any, c: Any) -> int:
        return 4096

    def cost(self, p: Any, c: Any) -> Any:
        raise NotImplementedError

    def bind(self, p: Any, c: Any, *tensors: Any, **nothing: Any) -> Any:
        return StandinRun(self._launcher, self._launches)


class StandinRun:
    """The kernels of one plan, launched as :class:`~tilewise.kernels.triton.launch.Program` launches them."""

    def __init__(self, launcher: Any, launches: int) -> None:
        sizes = [8] * len(POINTERS) + [4] * SCALARS + [8, 8]
        self._functions = [(ctypes.c_int64 * 257)(len(sizes), *sizes) for _ in range(launches)]
        handles = [ctypes.addressof(function) for function in self._functions]
        parameters = (*(Address(*p) for p in POINTERS), *[bytes(4)] * SCALARS, bytes(8), bytes(8))
        told = (KernelLaunch(handle, (8, 1, 1), (128, 1, 1), 0, (), parameters) for handle in handles)
        self.sequence = LaunchSequence(tuple(told), -1)
        self._steps = [(_runner(launcher, handle), POINTERS, (0,) * SCALARS) for handle in handles]
        self._stream = torch._C._cuda_getCurrentRawStream

    def __call__(self, *tensors: Any) -> Any:
        raise NotImplementedError("called by address")

    def run_pointers(self, *addresses: int) -> None:
        stream = self._stream(0)
        for run_one, pointers, rest in self._steps:
            run_one(*[addresses[source] + offset for source, offset in pointers], *rest, stream=stream)


def _launcher(folder: Path) -> Any:
    """What Triton's ``CompiledKernel.run`` is for a kernel with these arguments."""
    if "TRITON_LIBCUDA_PATH" not in os.environ:
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    try:
        from triton.backends.nvidia import driver
    except ImportError as error:
        raise NothingToMeasure(f"Triton is not installed: {error}") from error
    kinds = ["*fp32"] * len(POINTERS) + ["i32"] * SCALARS
    source = SimpleNamespace(constants={}, signature=dict(enumerate(kinds)))
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    metadata = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False, **scratch)
    return driver.CudaLauncher(source, metadata)


def _runner(launcher: Any, function: int) -> Callable[..., None]:
    """What Triton's ``CompiledKernel.__getitem__`` returns: a launch of a grid."""
    from triton import knobs
    from triton.compiler.compiler import LazyDict

    def runner(*arguments: int, stream: int) -> None:
        metadata = LazyDict({"name": "standin", "function": function, "stream": stream})
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        launcher(8, 1, 1, stream, function, (4, 1, 0), metadata, *hooks, *arguments)

    return runner
