"""Make the project's virtual environment: everything pinned, and CUDA only where there is a GPU.

Run by ``make``; needs nothing but Python 3.11 and its standard library.

On Linux, PyPI's torch brings gigabytes of CUDA libraries. So on a machine without an NVIDIA GPU this first asks pip
what it would install (metadata only); where that holds a CUDA package, torch comes from PyTorch's CPU index instead.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_CONSTRAINTS = ROOT / "constraints-cpu.txt"
"""Pins that fit the CPU build of torch alone."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MINIMUM_PYTHON = (3, 11)
EXTRAS = ("caffe", "cpu", "demo", "dev", "docs", "report")
CUDA_PACKAGE = re.compile(r"^(nvidia|cuda|triton)(-|$)")


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what would help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Set the environment up, or with ``--dry-run`` say what would be done. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the project's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv)")
    parser.add_argument("--torch-index", default=CPU_INDEX, help="index of CPU builds of torch (default: %(default)s)")
    parser.add_argument("--gpu", choices=("auto", "yes", "no"), default="auto", help="install for a GPU")
    parser.add_argument("--dry-run", action="store_true", help="install no package; say which torch would be")
    options = parser.parse_args(arguments)
    try:
        if sys.version_info < MINIMUM_PYTHON:
            wanted = ".".join(map(str, MINIMUM_PYTHON))
            raise SetupError(f"Python {wanted} or later is needed, this is {sys.version.split()[0]}: make PYTHON=...")
        gpu = options.gpu == "yes" or (options.gpu == "auto" and has_nvidia_gpu())
        python = make_venv(options.venv)
        say("looking which torch fits this machine")
        pip(python, "install", "--upgrade", "-c", CONSTRAINTS, "pip")
        cpu_index = not gpu and brings_cuda(would_install(python, "torch"))
        say(f"{'an' if gpu else 'no'} NVIDIA GPU; torch from {torch_source(options.torch_index, gpu, cpu_index)}")
        if options.dry_run:
            return 0
        say("installing; this takes some minutes the first time, and says nothing meanwhile")
        if cpu_index:
            install_cpu_torch(python, options.torch_index)
        extras = ",".join((*EXTRAS, "gpu") if gpu else EXTRAS)
        constraints = (*pins(gpu=gpu), "--build-constraint", CONSTRAINTS)
        pip(python, "install", *constraints, "--editable", f"{ROOT}[{extras}]")
    except SetupError as error:
        say(str(error))
        return 1
    return 0


def torch_source(index: str, gpu: bool, cpu_index: bool) -> str:
    """Where torch comes from, in words: ``index`` for ``cpu_index``, and else the usual one."""
    if cpu_index:
        return index
    return "the usual index" if gpu else "the usual index, whose build here has no CUDA"


def pins(*, gpu: bool) -> tuple[str | Path, ...]:
    """The options of pip that pin packages beside torch's CUDA build (``gpu``), or beside its CPU build."""
    return ("-c", CONSTRAINTS) if gpu else ("-c", CONSTRAINTS, "-c", CPU_CONSTRAINTS)


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    tool = shutil.which("nvidia-smi")  # where the driver is another system's, as under WSL
    if tool is None:
        return False
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def make_venv(path: Path) -> Path:
    """The Python of the virtual environment at ``path``, made anew where there is none that works."""
    python = path / "bin" / "python"
    version = "import sys; assert sys.version_info >= (3, 11); import pip"
    if python.exists() and subprocess.run([python, "-c", version], capture_output=True, check=False).returncode == 0:
        return python
    say(f"making {path}")
    try:
        venv.create(path, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"cannot make {path}: {error}\nOn Debian and Ubuntu: apt install python3-venv") from error
    return python


def would_install(python: Path, requirement: str) -> list[str]:
    """Names of the packages that installing ``requirement`` would bring, without downloading them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # fast-deps reads a wheel's metadata by range requests where the index does not serve it apart.
        options = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", report)
        pip(python, "install", *options, "-c", CONSTRAINTS, requirement)
        return [str(item["metadata"]["name"]) for item in json.loads(report.read_text("utf-8"))["install"]]


def brings_cuda(packages: Iterable[str]) -> bool:
    """Whether a CUDA package is among ``packages``."""
    return any(CUDA_PACKAGE.match(re.sub(r"[-_.]+", "-", name.lower())) for name in packages)


def install_cpu_torch(python: Path, index: str, packages: Sequence[str] = ("torch",)) -> None:
    """Install ``packages`` alone, pinned, from ``index``; what they depend on comes with the project, pinned."""
    lines = [line.strip() for line in CONSTRAINTS.read_text("utf-8").splitlines()]
    pinned = [line for line in lines if line.partition("==")[0] in packages]
    try:
        pip(python, "install", "--no-deps", "--index-url", index, *pinned)
    except SetupError as error:
        raise SetupError(
            f"{error}\nNo CPU build of {' and '.join(pinned)} could be had from {index}, and the usual index would "
            "bring CUDA to a machine without a GPU. Name another index of CPU builds (make TORCH_INDEX=URL), or take "
            "the CUDA build all the same (make GPU=yes)."
        ) from error


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip; only its errors show. Raises :class:`SetupError`."""
    command = [str(python), "-m", "pip", arguments[0], "-qq", "--disable-pip-version-check", *arguments[1:]]
    if subprocess.run(command, check=False).returncode != 0:
        raise SetupError("failed: " + " ".join(map(str, command)))


def say(message: str) -> None:
    """Tell the user, on stderr and at once."""
    print(f"set-up: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
