"""Runs the CUDA C++ of kernels on the CPU, compiled by g++ against ``emulation.hpp``: slow, but every index is real."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tilewise.kernels.cuda.launch import Bound
from tilewise.machine import cache

__all__ = ["emulate", "emulated", "launched", "run_bound"]

HEADER = Path(__file__).with_name("emulation.hpp")
FLAGS = ("-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-mfma", "-mf16c")


def _why_not() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"kernels are emulated on x86-64, not on {platform.machine()}"
    if shutil.which("g++") is None:
        return "no g++ to compile kernels for the CPU with"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=False).stdout.strip()
    if int(version.split(".")[0] or 0) < 12:
        return f"g++ {version} has no half precision: 12 would do"
    return ""


emulated = pytest.mark.skipif(bool(reason := _why_not()), reason=reason or "runs")
"""Skips a test, with the reason, where kernels cannot be compiled for the CPU."""


def _run(compiler: Sequence[str]) -> str:
    done = subprocess.run(compiler, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stdout


def _made(path: Path, compiler: Sequence[str]) -> Path:
    """``path``, written by the compiler where no process has written it yet."""
    if not path.exists():
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        _run([*compiler, "-o", str(partial)])
        partial.replace(path)
    return path


@functools.cache
def _compiler() -> str:
    """What tells compiled kernels apart beside their text."""
    text = _run(["g++", "--version"]) + repr(FLAGS) + HEADER.read_text("utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _folder() -> Path:
    """Where all tests keep compiled kernels: with the header compiled already, which takes longer than a kernel."""
    folder = cache.kernel_dir() / "emulated" / _compiler()
    header = folder / HEADER.name
    if not header.exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f".{os.getpid()}-{HEADER.name}"
        copy.write_bytes(HEADER.read_bytes())
        copy.replace(header)
    _made(Path(f"{header}.gch"), ["g++", *FLAGS, "-x", "c++-header", str(header)])
    return folder


@functools.cache
def _compiled(source: str, name: str, pointers: int, scalars: tuple[type, ...]) -> ctypes.CDLL:
    arguments = [f"addresses[{i}]" for i in range(pointers)]
    arguments += [f"{'reals' if kind is float else 'whole'}[{i}]" for i, kind in enumerate(scalars)]
    driver = f"""
template <class... T> struct Call;
static void** addresses; static const long long* whole; static const double* reals;
struct Any {{ void* p; template <class T> operator T*() const {{ return (T*)p; }} }};
static void call() {{ {name}({", ".join(f"Any{{{a}}}" if a.startswith("addresses") else a for a in arguments)}); }}
extern "C" void emulate(void** a, const long long* w, const double* r, unsigned grid, unsigned count, unsigned cluster,
                        bool backwards) {{
  addresses = a; whole = w; reals = r;
  emulation::body = call;
  for (unsigned b = 0; b < grid; b += cluster)
    emulation::block(backwards ? grid - cluster - b : b, count, cluster, backwards);
  emulation::release();
}}
"""
    text = f'#include "{HEADER.name}"\n{source}\n{driver}'
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        own = path.with_name(f"{os.getpid()}-{path.stem}.cpp")
        own.write_text(text, "utf-8")
        _made(path, ["g++", *FLAGS, str(own)])
        own.unlink()
    return ctypes.CDLL(str(path))


def emulate(
    source: str, name: str, grid: int, threads: int, addresses: Sequence[int], scalars: Sequence[int | float],
    backwards: bool = False, cluster: int = 1,
) -> None:  # fmt: skip
    """Run ``grid`` blocks of a kernel on memory of the CPU, each ``cluster`` of them at one time."""
    assert grid % cluster == 0
    library = _compiled(source, name, len(addresses), tuple(type(s) for s in scalars))
    count = len(scalars)
    whole = (ctypes.c_longlong * count)(*(0 if isinstance(s, float) else s for s in scalars))
    reals = (ctypes.c_double * count)(*(float(s) for s in scalars))
    library.emulate((ctypes.c_void_p * len(addresses))(*addresses), whole, reals, grid, threads, cluster, backwards)


def launched(bound: Bound) -> Callable[..., None]:
    """What stands for ``bound.launch`` on the CPU: takes addresses, those not given are 0."""

    def call(*addresses: int) -> None:
        p = bound.program
        given = (*addresses, *[0] * (bound.pointers - len(addresses)))
        emulate(p.source(), p.name, bound.grid, p.threads, given, bound.scalars, cluster=bound.cluster)

    return call


def run_bound(
    bound: Bound, x: torch.Tensor, y: torch.Tensor, inverse: bool, backwards: bool = False,
    peaks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Transform between real data ``x`` and spectra ``y`` where they are: on a GPU, or emulated on the CPU."""
    addresses = [y.data_ptr(), x.data_ptr()] if inverse else [x.data_ptr(), y.data_ptr()]
    addresses += [0 if peaks is None else peaks.data_ptr()] * (bound.pointers - 2)
    if x.is_cuda:
        bound.launch(x.get_device())(*addresses)
        return
    p = bound.program
    emulate(p.source(), p.name, bound.grid, p.threads, addresses, bound.scalars, backwards, bound.cluster)
