"""Build the wheel, and try it as a user would: each extra in a fresh environment, with the pinned packages.

    python -m tools.check_wheel                  # every extra; minutes, as each environment gets its own torch
    python -m tools.check_wheel cpu caffe        # some of them; "base" is tilewise without extras

In each environment the wheel is installed as ``tilewise[EXTRA]``, its packages are asked whether they fit together, a
small model is planned, and one thing runs that needs the extra. On a machine without an NVIDIA GPU no CUDA package is
downloaded: the extra ``gpu`` is then only resolved, which shows that its versions can be had together, and says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.extra_programs import EVERYWHERE, NEEDS, START
from tools.setup_env import (
    CONSTRAINTS,
    CPU_INDEX,
    ROOT,
    SetupError,
    brings_cuda,
    has_nvidia_gpu,
    install_cpu_torch,
    make_venv,
    pins,
    pip,
    would_install,
)

BASE = "base"
TORCHVISION = ("peers", "tutorials")
"""Extras with packages that need torchvision, whose operators are built for one build of torch."""


@dataclass(frozen=True)
class Outcome:
    """What became of one extra: whether it is good, and a line about it."""

    good: bool
    line: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, try each extra, and print a line for each. Returns 0 where all are good."""
    parser = argparse.ArgumentParser(description="Try the wheel in a fresh environment with each extra.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"{', '.join(NEEDS)} (default: all)")
    parser.add_argument("--wheel", type=Path, help="a wheel that is built (default: build one)")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    parser.add_argument("--torch-index", default=CPU_INDEX, help="index of CPU builds of torch (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = [extra for extra in options.extras if extra not in NEEDS]
    if unknown:
        parser.error(f"EXTRA: {unknown[0]!r}: one of {', '.join(NEEDS)} would do")
    good = True
    with tempfile.TemporaryDirectory(prefix="tilewise-wheel-") as folder:
        wheel = options.wheel.resolve() if options.wheel else built(Path(folder) / "dist")
        for extra in options.extras or NEEDS:
            start = time.monotonic()
            with tempfile.TemporaryDirectory(dir=folder) as place:
                try:
                    outcome = tried(extra, wheel, Path(place), options.python, options.torch_index)
                except SetupError as error:
                    outcome = Outcome(False, str(error))
            good = good and outcome.good
            mark = "ok" if outcome.good else "FAILED"
            print(f"{extra:8} {mark:6} {time.monotonic() - start:4.0f} s  {outcome.line}", flush=True)
    return 0 if good else 1


def built(folder: Path) -> Path:
    """The wheel of this clone, built by pip into ``folder``. Raises :class:`SetupError`."""
    constraints = ("--build-constraint", CONSTRAINTS)
    pip(Path(sys.executable), "wheel", "--no-deps", *constraints, "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("tilewise-*.whl")
    return wheel


def tried(extra: str, wheel: Path, place: Path, python: str, torch_index: str) -> Outcome:
    """Install ``wheel`` with ``extra`` into a new environment below ``place``, and run what needs it.

    Raises :class:`SetupError` where something cannot be installed.
    """
    inside = new_environment(place / "venv", python)
    gpu = has_nvidia_gpu()
    wanted = f"tilewise @ {wheel.as_uri()}" if extra == BASE else f"tilewise[{extra}] @ {wheel.as_uri()}"
    if not gpu and brings_cuda(would_install(inside, "torch")):
        install_cpu_torch(inside, torch_index, ("torch", "torchvision") if extra in TORCHVISION else ("torch",))
    if extra == "gpu" and not gpu:
        pip(inside, "install", "--dry-run", *pins(gpu=gpu), wanted)
        return Outcome(True, "no GPU here: pip resolves its packages; nothing was installed or run")
    pip(inside, "install", *pins(gpu=gpu), wanted)
    pip(inside, "check")
    empty = place / "run"
    empty.mkdir()
    for program in (EVERYWHERE, NEEDS[extra]):
        reason = failure(inside, START + program, empty)
        if reason:
            return Outcome(False, reason)
    return Outcome(True, "installed, planned a layer, and ran what it is for")


def new_environment(path: Path, python: str) -> Path:
    """The Python of a new environment at ``path``, made by ``python``, with the pinned pip."""
    if python == sys.executable:
        inside = make_venv(path)
    else:
        subprocess.run([python, "-m", "venv", path], check=True)
        inside = path / "bin" / "python"
    pip(inside, "install", "--upgrade", "-c", CONSTRAINTS, "pip")
    return inside


def failure(python: Path, program: str, folder: Path) -> str:
    """Run ``program`` in ``folder`` with caches of its own; empty where it succeeds, else the end of what it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TILEWISE_"))}
    environment["TILEWISE_CACHE_DIR"] = str(folder / "cache")
    command = [str(python), "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"


if __name__ == "__main__":
    sys.exit(main())
