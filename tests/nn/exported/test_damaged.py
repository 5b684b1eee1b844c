"""Files of exported models that were damaged or written by somebody else: refused with a reason, and nothing runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tests.nn.regions.kept import First, net

import tilewise
from tilewise.nn import ExportError
from tilewise.solvers.base import SolverUnavailable

pytest.importorskip("numba")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is right."""
    path = tmp_path_factory.mktemp("exported") / "model"
    tilewise.export(net(), [{"x": X, "scale": 2.0}], path, planner=First())
    return path


def parts(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["tilewise"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def saved(path: Path, document: Any, tensors: dict[str, torch.Tensor]) -> Path:
    text = document if isinstance(document, str) else json.dumps(document)
    save_file(tensors, path, metadata={"tilewise": text})
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a document stands."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in entries:
        yield from places(inner, (*path, name))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place, or without it."""
    if not place:
        return value
    result = copy.deepcopy(document)
    inner = result
    for name in place[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return result


VALUES = [None, True, 0, 1, 7, -1, 2**63, 10**40, 0.5, "", "x", "aten::from_file", "float64", "input", [], {}, [0], ...]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_changed_document_is_refused_or_still_right(data: st.DataObject, whole: Path, tmp_path: Path) -> None:
    """Any value of the program, replaced or removed: a clear error, or a program whose results have the right shape."""
    document, tensors = parts(whole)
    place = data.draw(st.sampled_from([p for p in places(document) if "digest" not in p]), "place")
    path = saved(tmp_path / "model", changed(document, place, data.draw(st.sampled_from(VALUES), "value")), tensors)
    try:
        program = tilewise.load_exported(path)
        found = program(x=X, scale=2.0)
    except (ExportError, SolverUnavailable, ValueError, UserWarning):
        return
    except (RuntimeError, TypeError, NotImplementedError) as error:  # what torch says of arguments that do not fit
        right = any("in step" in note for note in getattr(error, "__notes__", ()))
    else:
        right = isinstance(found, torch.Tensor) or place[2:3] == ("results",)
    assert right


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 0.5, -1])
def test_a_file_that_was_cut(keep: float, whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ExportError, match="not a file that tilewise"):
        tilewise.load_exported(path)


def test_a_flipped_bit_of_a_filter(whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[-9] ^= 1
    path = tmp_path / "flipped"
    path.write_bytes(data)
    with pytest.raises(ExportError, match="not those that were exported"):
        tilewise.load_exported(path)


def step_with(document: dict[str, Any], kind: str) -> dict[str, Any]:
    steps = document["programs"][0]["program"]["steps"]
    found: dict[str, Any] = next(step for step in steps if kind in step)
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aten::from_file", "operator of torch's namespace aten|reads no tensor"),
        ("aten::relu_", "writes into an argument"),
        ("aten::no_such_operator", "operator of torch's namespace aten"),
        ("prims::mul", "operator of torch's namespace aten"),
        ("os.system", "operator of torch's namespace aten"),
        ("aten::__class__", "operator of torch's namespace aten"),
    ],
)
def test_operators_that_do_more_than_compute(name: str, words: str, whole: Path, tmp_path: Path) -> None:
    document, tensors = parts(whole)
    step_with(document, "operator")["operator"].update(name=name, out="")
    with pytest.raises(ExportError, match=words):
        tilewise.load_exported(saved(tmp_path / "model", document, tensors))


def test_a_result_that_is_smaller_than_the_plan_writes(whole: Path, tmp_path: Path) -> None:
    document, tensors = parts(whole)
    program = document["programs"][0]["program"]
    program["slots"][step_with(document, "plan")["output"]]["shape"][1] = 1
    with pytest.raises(ExportError, match="would do"):
        tilewise.load_exported(saved(tmp_path / "model", document, tensors))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 5000, '{"schema": "tilewise/plan"}', '{"schema": "tilewise/exported", "version": 2}'])  # fmt: skip # noqa: E501
def test_headers_that_are_none(text: str, whole: Path, tmp_path: Path) -> None:
    _, tensors = parts(whole)
    with pytest.raises(ExportError, match=r"header|version"):
        tilewise.load_exported(saved(tmp_path / "model", text, tensors))
    save_file(tensors, tmp_path / "bare")
    with pytest.raises(ExportError, match="holds tensors and no exported model"):
        tilewise.load_exported(tmp_path / "bare")


def test_a_plan_that_cannot_run_here(whole: Path, tmp_path: Path) -> None:
    document, tensors = parts(whole)
    told = step_with(document, "plan")
    told["plan"]["plan"]["solver"] = "no_such_solver"
    with pytest.raises((ExportError, SolverUnavailable), match="no_such_solver"):
        tilewise.load_exported(saved(tmp_path / "model", document, tensors))
