"""Exported models: loaded in a process that has none of the model's code they give the same results, or say why not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.nn.regions.kept import First, net
from torch import nn

import tilewise
from tilewise.nn import ExportError
from tilewise.nn.regions import ways
from tilewise.problems.pooling.problem import PoolingProblem

pytest.importorskip("numba")
BOUND = 2e-5


def exported(model: nn.Module, examples: Any, path: Path) -> Any:
    """The model as it is loaded from a file."""
    report = tilewise.export(model, examples, path, planner=First())
    assert report.size == path.stat().st_size
    return tilewise.load_exported(path)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert (found.double() - wanted.double()).norm() <= BOUND * wanted.double().norm()


def by_torch(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


class Several(nn.Module):
    """Results of all kinds, for arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(4, 4, 3, padding=1), nn.Conv1d(3, 5, 3)

    def forward(self, x: torch.Tensor, pair: list[torch.Tensor], *, scale: float = 1.0, names: Any = None) -> Any:
        y = torch.sigmoid(self.conv(x)) * scale
        lines = self.wide(pair[0]) + torch.clamp(pair[1], min=-float("inf"), max=0.5)
        return OrderedDict(out=y, rest=(lines.to(torch.float64), [None, names, 3.5], {"max": y.amax((2, 3))}))


def several() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Several().eval(), (torch.randn(2, 4, 6, 5), [torch.randn(1, 3, 9), torch.randn(1, 5, 7)]), {"names": ("a",)}


@pytest.mark.slow
def test_a_process_without_the_model_gives_its_results(tmp_path: Path) -> None:
    model, x = net(), torch.randn(2, 3, 9, 7)
    tilewise.export(model, x, tmp_path / "net", planner=First())
    torch.save(x, tmp_path / "x")
    code = (
        "import sys, torch, tilewise; folder = sys.argv[1];"
        "y = tilewise.load_exported(folder + '/net')(torch.load(folder + '/x', weights_only=True));"
        "assert not any(name.startswith('tests') for name in sys.modules);"
        "assert 'torch._dynamo' not in sys.modules, 'which takes seconds to import';"
        "torch.save(y, folder + '/y')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path, timeout=300)
    assert_near(torch.load(tmp_path / "y", weights_only=True), by_torch(model, x))


@pytest.mark.parametrize("pooling", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)], ids=str)
def test_a_pooling_by_a_plan(pooling: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of poolings are told to be the fastest, so that they are taken. They have no filter."""
    monkeypatch.setattr(ways.Times, "of", lambda self, key, run: 0.0 if isinstance(key[0], PoolingProblem) else 1e3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), pooling, nn.Conv2d(8, 4, 1)).eval()
    x, path = torch.randn(2, 3, 13, 11), tmp_path / "model"
    program = exported(model, x, path)
    assert_near(program(x), by_torch(model, x))
    with safe_open(path, framework="pt") as file:
        document, tensors = json.loads(file.metadata()["tilewise"]), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    steps = document["programs"][0]["program"]["steps"]
    (pool,) = (step for step in steps if step.get("plan", {}).get("problem", "").startswith("pool "))
    for change, words in (
        ({"inputs": pool["inputs"] * 2}, "has 3 tensors: 2 would do"),
        ({"inputs": [pool["output"]]}, "x is float32"),
        ({"plan": {**pool["plan"], "problem": pool["plan"]["problem"].replace("inference", "training")}}, "one tensor"),
    ):
        steps[steps.index(pool)] = changed = {**pool, **change}
        save_file(tensors, path, metadata={"tilewise": json.dumps(document)})
        with pytest.raises(ExportError, match=words):
            tilewise.load_exported(path)
        steps[steps.index(changed)] = pool


def test_examples_of_several_sizes_share_their_filters(tmp_path: Path) -> None:
    model, one, two = net(), torch.randn(1, 3, 8, 8), torch.randn(3, 3, 6, 10)
    alone = tilewise.export(model, one, tmp_path / "one", planner=First()).size
    program = exported(model, [one, two], tmp_path / "two")
    assert (tmp_path / "two").stat().st_size < 2 * alone
    with safe_open(tmp_path / "two", framework="pt") as both, safe_open(tmp_path / "one", framework="pt") as single:
        assert len(both.keys()) < 2 * len(single.keys())
    for x in (one, two):
        assert_near(program(x), by_torch(model, x))
    assert len(program.examples) == 2
    assert "(3, 3, 6, 10)" in repr(program)


def test_arguments_and_results_of_any_structure(tmp_path: Path) -> None:
    """Lists, names, constants; an ordered dict with tuples, lists and dicts of tensors, in two types."""
    model, args, kwargs = several()
    named = {"x": args[0], "pair": args[1], **kwargs, "scale": 0.5}
    program = exported(model, [named], tmp_path / "model")
    found, wanted = program(**dict(reversed(named.items()))), by_torch(model, **named)
    assert type(found) is OrderedDict
    assert list(found) == list(wanted)
    assert_near(found["out"], wanted["out"])
    (lines, constants, most), (its_lines, its_constants, its_most) = found["rest"], wanted["rest"]
    assert constants == its_constants
    assert_near(lines, its_lines)
    assert_near(most["max"], its_most["max"])
    with pytest.raises(ValueError, match=r"0\.25.*exported for.*0\.5"):
        program(**{**named, "scale": 0.25})


@pytest.mark.parametrize("lies", ["channels_last", "sliced", "expanded", "unaligned", "inference", "negative"])
def test_tensors_that_lie_otherwise_are_copied(lies: str, tmp_path: Path) -> None:
    model, x = net(), torch.randn(2, 3, 8, 8)
    program = exported(model, x, tmp_path / "model")
    with torch.inference_mode(lies == "inference"):
        given = {
            "channels_last": lambda: x.to(memory_format=torch.channels_last),
            "sliced": lambda: torch.randn(2, 3, 16, 17)[:, :, ::2, 3:11],
            "expanded": lambda: torch.randn(1, 1, 8, 1).expand(2, 3, 8, 8),
            "unaligned": lambda: torch.randn(x.numel() + 1)[1:].view(x.shape),
            "inference": lambda: x.clone(),
            "negative": lambda: torch.complex(x, x).conj().imag,
        }[lies]()
    assert_near(program(given), by_torch(model, given))


def test_the_model_may_change_or_vanish(tmp_path: Path) -> None:
    model, x = net(), torch.randn(1, 3, 8, 8)
    wanted = by_torch(model, x)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    program = exported(model, x, tmp_path / "model")
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert "forward" not in model.__dict__
    with torch.no_grad():
        for t in model.parameters():
            t.zero_()
    assert_near(program(x), wanted)
    del model
    assert_near(program(x), wanted)


def test_several_threads_call_one_program(tmp_path: Path) -> None:
    model = net()
    given = [torch.randn(1, 3, 8, 8) for _ in range(4)]
    program = exported(model, given[0], tmp_path / "model")
    wanted = [by_torch(model, x) for x in given]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            found = program(given[number])
            if (found - wanted[number]).norm() > BOUND * wanted[number].norm():
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_that_it_cannot_take(tmp_path: Path) -> None:
    program = exported(net(), torch.randn(1, 3, 8, 8), tmp_path / "model")
    for args, words in (
        ((torch.randn(2, 3, 8, 8),), r"float32 \(2, 3, 8, 8\): exported for float32 \(1, 3, 8, 8\)"),
        ((torch.randn(1, 3, 8, 8).double(),), "float64"),
        ((torch.empty(1, 3, 8, 8, device="meta"),), "on meta"),
        ((torch.randn(1, 3, 8, 8).to_sparse(),), "torch.sparse_coo"),
        ((), "called with nothing"),
        ((torch.randn(1, 3, 8, 8), 2.0), r"2\.0: exported for"),
        (([torch.randn(1, 3, 8, 8)],), "exported for"),
    ):
        with pytest.raises(ValueError, match=words):
            program(*args)


class Draws(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(3, 4, 3), what

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        if self.what == "random":
            return y + torch.rand_like(y)
        if self.what == "data":
            return y * 2 if y.sum() > 0 else y
        if self.what == "returned":
            return y, {1: y + 1}
        return y


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Draws("random"), "draws random numbers"),
        (Draws("data"), "torch cannot trace it"),
        (Draws("returned"), "what the model returns has a dict"),
        (nn.Sequential(nn.Sigmoid()), "no convolution or linear layer"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout()).train(), "training mode"),
    ],
    ids=["random", "data", "returned", "nothing", "training"],
)
def test_models_that_cannot_be_exported(model: nn.Module, words: str, tmp_path: Path) -> None:
    model = model if words == "training mode" else model.eval()
    with pytest.raises(ExportError, match=words):
        tilewise.export(model, torch.randn(1, 3, 8, 8), tmp_path / "model", planner=First())
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    for path, words in ((tmp_path, "a folder that exists|a file"), (tmp_path / "no" / "x", "exists"), ("", "path"), (3, "path=3")):  # fmt: skip # noqa: E501
        with pytest.raises(ValueError, match=words):
            tilewise.export(net(), x, path, planner=First())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="training"):
        tilewise.export(net(), x, tmp_path / "x", training=True)  # type: ignore[call-arg]
    with pytest.raises(ExportError, match="no such file"):
        tilewise.load_exported(tmp_path / "missing")


def test_another_machine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model, x = net(), torch.randn(1, 3, 8, 8)
    tilewise.export(model, x, path, planner=First())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match="exported with environment"):
            program = tilewise.load_exported(path)
        assert_near(program(x), by_torch(model, x))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: what was there before stays, and no half-written file does."""
    path = tmp_path / "model"
    tilewise.export(net(), torch.randn(1, 3, 8, 8), path, planner=First())
    before = path.read_bytes()
    code = (
        "import resource, signal, sys, torch, tilewise\n"
        "from tests.nn.regions.kept import First, net\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "x = torch.randn(1, 3, 8, 8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "tilewise.export(net(), x, sys.argv[1], planner=First())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=False, capture_output=True, text=True, timeout=300,
        env={**__import__("os").environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode
    assert "rror" in done.stderr.strip().splitlines()[-1]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_holds_numbers_and_names(tmp_path: Path) -> None:
    """Nothing pickled, no code; its permissions are those of any new file."""
    path = tmp_path / "model"
    tilewise.export(net(), torch.randn(1, 3, 8, 8), path, planner=First())
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["tilewise"])
    assert document["schema"] == "tilewise/exported"
    assert "tests" not in json.dumps(document)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
