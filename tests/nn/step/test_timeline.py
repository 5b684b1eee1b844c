"""The time line of a step as a file: whole, with tilewise's ranges, and no memory kept for it."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn
from torch.profiler import profile

import tilewise


def planned(**options: Any) -> tuple[nn.Module, torch.Tensor]:
    """A planned model and its input."""
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.randn(3, 2, 8, 8)
    tilewise.optimize(model, x, planner=Dividing(), goal="passes", **options)
    return model, x


def names(document: dict[str, Any]) -> list[str]:
    return [event["name"] for event in document["traceEvents"] if event.get("ph") == "X"]


def test_a_training_step(tmp_path: Path) -> None:
    model, _x = planned()
    before = [p.clone() for p in model.parameters()]
    path = tilewise.summary(model).trace(tmp_path / "step.json")
    assert path == tmp_path / "step.json"
    document = json.loads(path.read_text("utf-8"))
    found = names(document)
    for name in ("0 forward", "0 grad_weight", "2 forward", "2 grad_input", "2 grad_weight"):
        assert found.count(f"tilewise: {name} micro_batch") == 1
    assert any(name.startswith("aten::") for name in found)
    assert document["tilewise"]["layers"]["layers_by_plan"] == 2
    assert document["tilewise"]["step"]["reason"] == "goal='passes'"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step.json"]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_forward_a_step_of_ones_own_and_a_compressed_file(tmp_path: Path) -> None:
    model, x = planned(training=False)
    report = tilewise.summary(model)
    found = names(json.loads(report.trace(tmp_path / "a.json").read_text("utf-8")))
    assert not any("grad" in name for name in found if name.startswith("tilewise:"))
    calls = []
    path = report.trace(str(tmp_path / "b.json.gz"), step=lambda m: calls.append(m(x[:2])))
    assert calls
    assert "aten::relu" in names(json.loads(gzip.decompress(path.read_bytes())))


def test_a_file_that_is_there_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    model, x = planned()
    path = tmp_path / "step.json"
    path.write_text("mine")

    def fails(_: nn.Module) -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        tilewise.summary(model).trace(path, x, step=fails)
    assert path.read_text() == "mine"
    tilewise.summary(model).trace(path, x)
    assert json.loads(path.read_text("utf-8"))["traceEvents"]


def test_inputs_are_not_kept_alive(tmp_path: Path) -> None:
    model, x = planned()
    report, gone = tilewise.summary(model), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="example_inputs=None: the inputs that optimize was given are gone"):
        report.trace(tmp_path / "a.json")
    report.trace(tmp_path / "a.json", torch.randn(2, 2, 8, 8))
    del model
    gc.collect()
    with pytest.raises(ValueError, match="model: it is gone"):
        report.trace(tmp_path / "a.json", torch.randn(2, 2, 8, 8))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (5, "file=5: a path such as 'tilewise-trace.json' would do"),
        ("", "file='': a path"),
        ("step.txt", "file='step.txt': a name that ends in .json or .json.gz would do"),
        ("nowhere/at/all/a.json", "there is no folder 'nowhere/at/all'"),
    ],
)
def test_files_that_cannot_be(file: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, _x = planned()
    with pytest.raises(ValueError, match=r"file=") as caught:
        tilewise.summary(model).trace(file)
    assert said in str(caught.value)


def test_what_else_is_refused(tmp_path: Path) -> None:
    model, x = planned()
    report = tilewise.summary(model)
    with pytest.raises(ValueError, match=r"step=5: a function of \(model\), or None, would do"):
        report.trace(tmp_path / "a.json", x, step=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"example_inputs=\[\]"):
        report.trace(tmp_path / "a.json", [])
    with profile(), pytest.raises(RuntimeError, match="another profiler is running; end it first"):
        report.trace(tmp_path / "a.json")
    with tilewise.enabled() as session, pytest.raises(ValueError, match="trace: this report is of no model"):
        session.report().trace(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())
