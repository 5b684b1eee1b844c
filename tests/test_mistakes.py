"""The usual mistakes of a newcomer: each ends in one clear line that names the argument and says what would do."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tilewise
from tilewise.cli import cli
from tilewise.frontends.networks import load_network

LONGEST = 900
"""Characters of the longest line, which lists all solvers."""


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())


def images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*(shape or (2, 3, 8, 8)), dtype=dtype, device="cpu")


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(images(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64, device="cpu")), batch_size=2)


def optimized(*arguments: Any, **options: Any) -> Callable[[], object]:
    """A call of ``optimize`` with a model, its arguments, and nothing measured."""
    return lambda: tilewise.optimize(model(), *(arguments or (images(),)), **{"rigor": "estimate", **options})


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {
    "a name with a typing error": (
        lambda: tilewise.optimise, AttributeError, ("'optimise'", "did you mean 'optimize'"),
    ),
    "a name of an option with a typing error": (
        optimized(workspce="64MiB"), TypeError, ("'workspce'", "workspace would do"),
    ),
    "an option that another function has": (
        lambda: tilewise.enabled(memory_limit="1GiB"), TypeError, ("'memory_limit'", "its options are workspace"),
    ),
    "a size without a unit that is known": (
        optimized(workspace="64 megs"), ValueError, ("workspace='64 megs'", "MiB", "'64MiB'"),
    ),
    "a size without a unit": (
        optimized(workspace="64"), ValueError, ("workspace='64'", "64 of what?", "64MiB for 2^20"),
    ),
    "a size below zero": (optimized(workspace=-1), ValueError, ("workspace=-1", "would do", "'64MiB'")),
    "a share above all there is": (optimized(memory_limit="120%"), ValueError, ("memory_limit='120%'", "100%")),
    "a word that is none of the choices": (optimized(rigor="fast"), ValueError, ("rigor='fast'", "estimate, measure")),
    "options as a dictionary": (
        optimized(settings={"workspace": "64MiB"}), ValueError, ("settings=", "tilewise.Settings"),
    ),
    "a solver with a typing error": (
        optimized(exclude=("winogard",)), ValueError, ("exclude", "'winogard'", "'winograd' would do"),
    ),
    "a shape for inputs": (
        optimized((1, 3, 8, 8)), ValueError, ("example_inputs=(1, 3, 8, 8)", "shape", "torch.randn(1, 3, 8, 8)"),
    ),
    "a shape as a list": (
        optimized([1, 3, 8, 8]), ValueError, ("example_inputs=[1, 3, 8, 8]", "torch.randn(1, 3, 8, 8)"),
    ),
    "a NumPy array for inputs": (
        optimized(np.zeros((1, 3, 8, 8), np.float32)),
        ValueError,
        ("example_inputs", "(1, 3, 8, 8)", "torch.from_numpy"),
    ),
    "a data loader for inputs": (optimized(loader()), ValueError, ("example_inputs", "next(iter(loader))[0]")),
    "images and labels for inputs": (
        lambda: tilewise.optimize(model(), next(iter(loader())), rigor="estimate"),
        RuntimeError,
        ("example_inputs", "example 2 of 2", "int64", "a tuple of all arguments"),
    ),
    "images of other channels": (
        optimized(images(2, 4, 8, 8)), RuntimeError, ("example_inputs", "(2, 4, 8, 8)", "what Sequential takes"),
    ),
    "images of another dtype": (
        optimized(images(dtype=torch.float64)), RuntimeError, ("example_inputs", "float64", "parameters are float32"),
    ),
    "a model on another device": (
        lambda: tilewise.optimize(nn.Linear(8, 4, device="meta"), images(), rigor="estimate"),
        RuntimeError,
        ("example_inputs", "float32 on cpu", "parameters are float32 on meta"),
    ),
    "a name for a model": (
        lambda: tilewise.optimize("resnet50", images()), ValueError, ("model='resnet50'", "a torch.nn.Module would do"),  # type: ignore[type-var]
    ),
    "model and inputs exchanged": (
        lambda: tilewise.optimize(images(), model()),  # type: ignore[type-var]
        ValueError,
        ("model=a tensor of shape (2, 3, 8, 8)", "a torch.nn.Module would do"),
    ),
    "a class for a model": (
        lambda: tilewise.optimize(nn.Conv2d, images()), ValueError, ("model=Conv2d", "a class", "Conv2d(...)"),  # type: ignore[type-var]
    ),
    "a report before anything was planned": (
        lambda: tilewise.nn.report(model()),
        ValueError,
        ("model=Sequential", "tilewise.optimize(model, example_inputs)"),
    ),
    "a schedule that is not there": (
        optimized(schedule="no_such_schedule.json"),
        FileNotFoundError,
        ("schedule='no_such_schedule.json'", ".save(path)"),
    ),
    "devices that are not here": (
        lambda: tilewise.shared(model(), devices=("cuda:98", "cuda:99")), ValueError, ("devices", "'cuda:98'", "cpu"),
    ),
    "a batch where a function makes batches": (
        lambda: tilewise.largest_batch(model(), images(), "1GiB"),  # type: ignore[arg-type]
        ValueError,
        ("make_inputs=a tensor of shape", "a function of a batch's size"),
    ),
    "a function that gives shapes": (
        lambda: tilewise.largest_batch(model(), lambda n: (n, 3, 8, 8), "1GiB", rigor="estimate"),
        ValueError,
        ("make_inputs(", ", 3, 8, 8)", "a shape", "torch.randn("),
    ),
    "a model to export in training mode": (
        lambda: tilewise.export(model(), images(), "model.safetensors"),
        ValueError,
        ("training mode", "eval() would do"),
    ),
    "a checkpoint for an exported model": (
        lambda: (torch.save(model().state_dict(), "m.pt"), tilewise.load_exported("m.pt")),
        ValueError,
        ("m.pt", "tilewise.export"),
    ),
    "graphs on a CPU": (lambda: tilewise.graphed(model(), images()), ValueError, ("cpu", "tensors on a CUDA device")),
    "text for a problem": (
        lambda: tilewise.Planner().plan("mb1ic3ih8oc8kh3"),  # type: ignore[arg-type]
        ValueError,
        ("problem='mb1ic3ih8oc8kh3'", "tilewise.notation"),
    ),
    "torch's name of a dtype": (
        lambda: tilewise.GemmProblem(16, 32, 8, dtype="float32"), ValueError, ("dtype='float32'", "fp32, bf16, fp16"),
    ),
    "numbers for axes": (
        lambda: tilewise.ConvProblem(tilewise.Pass.FPROP, 1, 3, 8, (8, 8)),  # type: ignore[arg-type]
        ValueError,
        ("axes has 8", "Axis(size=8, kernel=3)"),
    ),
    "a layer with a typing error": (
        lambda: tilewise.notation.parse_layer("mb8ic64ih56oc128k3"), ValueError, ("'k3'", "kh"),
    ),
    "a network with a typing error": (lambda: load_network("alexnett"), ValueError, ("'alexnett'", "'alexnet'")),
    "a model where it is to be spread first": (
        lambda: tilewise.distributed.optimize(model(), images()),  # type: ignore[arg-type]
        ValueError,
        ("parallel=Sequential", "SpatialParallel would do"),
    ),
    "no mesh": (
        lambda: tilewise.distributed.SpatialParallel(model(), None),  # type: ignore[arg-type]
        ValueError,
        ("mesh=None", "init_device_mesh"),
    ),
    "weights for a model": (
        lambda: tilewise.optimize(model().state_dict(), images()),  # type: ignore[type-var]
        ValueError,
        ("model=OrderedDict of 2 tensors", "the torch.nn.Module that loads them"),
    ),
    "an optimizer for inputs": (
        optimized(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        ValueError,
        ("example_inputs=SGD", "torch.randn(1, 3, 224, 224)"),
    ),
    "a generator of batches for inputs": (
        optimized(batch for batch in [images()]), ValueError, ("example_inputs=a generator", "torch.randn("),
    ),
    "a device as an option": (optimized(device="cuda"), TypeError, ("'device'", "model.to(device) before would do")),
    "a dtype as an option": (optimized(dtype=torch.bfloat16), TypeError, ("'dtype'", "model.to(dtype)", "autocast")),
    "a fraction of the memory": (optimized(memory_limit=0.8), ValueError, ("memory_limit=0.8", "'80%'", "'16GiB'")),
    "a filter that takes the module alone": (
        optimized(filter_fn=lambda module: True), ValueError, ("filter_fn=", "(module)", "(name, module) would do"),
    ),
    "a loss for a step": (
        optimized(step=nn.functional.cross_entropy), ValueError, ("step=cross_entropy(input", "of (model) would do"),
    ),
    "a module for an activation": (
        lambda: tilewise.conv2d(images(), torch.zeros(8, 3, 3, 3, device="cpu"), activation=nn.ReLU()),  # type: ignore[arg-type]
        ValueError,
        ("activation=ReLU()", "its name", "relu"),
    ),
    "a number of devices": (
        lambda: tilewise.Planner(devices=4), ValueError, ("devices=4", "'all'", "'cuda:0'"),  # type: ignore[arg-type]
    ),
    "a tensor for a path": (
        lambda: tilewise.export(model().eval(), "m.safetensors", images()),  # type: ignore[arg-type]
        ValueError,
        ("path=a tensor of shape (2, 3, 8, 8)", "the path of a file would do"),
    ),
    "a list for a signal": (
        lambda: tilewise.fft.rfft([1.0, 2.0], 4), TypeError, ("x is a list", "torch.as_tensor"),  # type: ignore[arg-type]
    ),
}  # fmt: skip
COMMANDS = {
    "plan alexnett": ("'alexnett'", "'alexnet'"),
    "plan mb4ic3ih12oc8kh": ("kh", "whole number"),
    "plan alexnet --rigor fast": ("--rigor", "'fast'", "measure"),
    "plan alexnet --device tpu": ("--device", "tpu", "cpu"),
    "report no_such_file.json": ("no_such_file.json",),
    "plan resnet50.pt": ("'resnet50.pt'", "weights", "module.path:factory"),
    "plan 1,3,224,224": ("'1,3,224,224'", "a shape", "mb1ic3"),
    "plna alexnet": ("'plna'", "did you mean 'plan'"),
    "plan alexnet --workspace 64": ("--workspace", "64", "64MiB"),
    "plan alexnet --workspace 64M": ("--workspace", "64M", "64MiB"),
    "plan model.py": ("'model.py'", "a file of Python", "model:NAME"),
    "plan torchvision.models.resnet50": ("'torchvision.models.resnet50'", "'torchvision:resnet50' would do"),
    "plan alexnet --batch 32,64": ("--batch", "'32,64' is not a whole number"),
    "optimize alexnet": ("'optimize'", "did you mean 'plan'"),
    "advise lstm 768": ("'lstm'", "conv, gemm, rnn would do"),
    "report .": ("'.'", "a folder", "tilewise plan NET --json"),
    f"report {__file__}": ("is not JSON", "tilewise plan NET --json"),
    f"time alexnet --schedule {__file__}": ("--schedule", "not JSON", "tilewise plan NET -o FILE"),
}
"""Command lines, and what their one line has."""
AT_LEAST = 25


def test_there_are_as_many_as_promised() -> None:
    assert len(MISTAKES) + len(COMMANDS) >= AT_LEAST


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_call_ends_in_one_line_that_helps(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line that Python prints: that of the error itself, or its note below what torch said."""
    monkeypatch.chdir(tmp_path)
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind) as raised:
        call()
    printed = "".join(traceback.format_exception_only(raised.value)).splitlines()
    assert len(printed) <= 2, "a line of torch's, and one of ours"
    assert len(printed) == 1 or getattr(raised.value, "__notes__", None) == printed[1:]
    assert len(printed[-1]) <= LONGEST
    for word in words:
        assert word in printed[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_in_one_line_that_helps(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, command.split(), prog_name="tilewise")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise: ")
    for word in COMMANDS[command]:
        assert word in line


def test_a_limit_without_its_unit_is_told_at_the_end() -> None:
    """Each solver has its reason there, in a line of its own; the last line is the one that is seen."""
    with pytest.raises(tilewise.NoPlanError) as raised:
        optimized(workspace=64)()
    assert str(raised.value).splitlines()[-1] == (
        "workspace=64: 64 B is less than kernels need; text such as '64MiB' would do"
    )


def said_without(program: str, tmp_path: Path, *missing: str, **variables: str) -> str:
    """The last line of a process that ends with an error, where Python does not find the packages ``missing``."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({list(missing)}))\n"  # what `import` then says is the same
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", hidden + program], capture_output=True, text=True, env=environment)
    assert done.returncode
    return done.stderr.splitlines()[-1]


def test_an_extra_that_is_missing(tmp_path: Path) -> None:
    line = said_without("from tilewise.frontends import caffe", tmp_path, "google.protobuf")
    assert line.startswith("ModuleNotFoundError: tilewise.frontends.caffe needs protobuf")
    assert line.endswith("pip install 'tilewise[caffe]' would do")


def test_a_variable_that_is_wrong(tmp_path: Path) -> None:
    line = said_without("import tilewise", tmp_path, TILEWISE_ENABLE="yes")
    assert line == "ValueError: TILEWISE_ENABLE='yes': 1 or 0 would do"


@pytest.mark.filterwarnings("ignore")  # nothing of it is to be planned
def test_a_model_that_takes_numbers_is_planned() -> None:
    """What looks like a shape is only said to be a mistake where the model does not take it."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, *shape: int) -> torch.Tensor:
            y: torch.Tensor = self.conv(torch.zeros(*shape, dtype=torch.float32, device="cpu"))
            return y

    planned = tilewise.optimize(Drawn(), (1, 3, 8, 8), filter_fn=lambda name, module: False)
    assert [layer.name for layer in tilewise.nn.report(planned).layers] == ["conv"]
