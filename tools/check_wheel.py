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

EVERYWHERE = """
import torch, tilewise
assert tilewise.__file__.startswith(__import__("sys").prefix), tilewise.__file__
model = torch.nn.Conv2d(4, 8, 3, padding=1)
images = torch.randn(2, 4, 16, 16)
expected = model(images)
assert tilewise.optimize(model, images, workspace="1MiB", training=False) is model
torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
"""
"""What runs in each environment: the installed package plans a layer, and the result stays."""

COMPILED = """
from tilewise import Options, Planner
from tilewise.device import device_name
from tilewise.notation import parse_layer
problem = parse_layer("mb1ic8ih12oc8kh3ph1", device=device_name("{device}"))
tried = Planner().explain(problem, Options(), every_config_of=("{solver}",))
assert any(m.solver == "{solver}" and m.time_ms for m in tried), tried
"""

PROTOTXT = r"""
from pathlib import Path
import h5py, lmdb, PIL, torch
from tilewise.frontends.caffe import load
Path("net.prototxt").write_text('''
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
''')
assert load("net.prototxt") is not None
"""

TESTED = """
import sys, subprocess
from pathlib import Path
root = Path({root!r})
# Not from the clone: there its own modules would be found. That the wheel's types are found shows its py.typed.
types = str(root / "tests" / "typing" / "public_api.py")
subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", "mypy", types], check=True)
options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(root), "-c", str(root / "pyproject.toml")]
subprocess.run([sys.executable, "-m", "pytest", *options, str(root / "tests" / "test_plan.py")], check=True)
"""

NEEDS = {
    BASE: "",
    "cpu": COMPILED.format(solver="fused_lowering", device="cpu"),
    "gpu": COMPILED.format(solver="implicit_gemm", device="cuda"),
    "caffe": PROTOTXT,
    "demo": "from sklearn.datasets import load_sample_images\nassert len(load_sample_images().images) == 2\n",
    "report": "import matplotlib\nmatplotlib.use('Agg')\n"
    "from matplotlib import pyplot\npyplot.plot([1, 2])\npyplot.savefig('picture.png')\n",
    "peers": "import onnx, onnxruntime, openvino\nfrom tilewise.frontends.networks import load_network\n"
    "assert load_network('torchvision:squeezenet1_1')\nassert load_network('timm:mobilenetv3_small_050')\n",
    "tutorials": "import diffusers, lightning, monai, timm\n",
    "docs": "import furo, myst_parser, sphinx\n",
    "release": "import build, twine\n",
    "dev": TESTED.format(root=str(ROOT)),
}
"""What runs with each extra, beside :data:`EVERYWHERE`."""


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
        # torchvision has operators that are built for one build of torch.
        install_cpu_torch(inside, torch_index, ("torch", "torchvision") if extra == "peers" else ("torch",))
    if extra == "gpu" and not gpu:
        pip(inside, "install", "--dry-run", *pins(gpu=gpu), wanted)
        return Outcome(True, "no GPU here: pip resolves its packages; nothing was installed or run")
    pip(inside, "install", *pins(gpu=gpu), wanted)
    pip(inside, "check")
    for program in (EVERYWHERE, NEEDS[extra]):
        reason = failure(inside, program, place)
        if reason:
            return Outcome(False, reason)
    return Outcome(True, "installed, planned a layer" + (", and ran what needs it" if NEEDS[extra] else ""))


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
