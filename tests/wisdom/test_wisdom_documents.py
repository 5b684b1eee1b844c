"""Wisdom as a JSON document: exports, imports, and documents that are not valid."""

from __future__ import annotations

import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from tests.wisdom.wisdom_workers import CONSTRAINTS, ENVIRONMENT, some_measurements, some_plan

from tilewise.plan import Config, Error, Measurement, Plan, PlanFormatError
from tilewise.wisdom import Wisdom, WisdomWarning, document, rows


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    return Wisdom(tmp_path / "wisdom.sqlite3")


def test_import_keeps_the_newer(wisdom: Wisdom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(into: Wisdom, second: float, time_ms: float) -> None:
        monkeypatch.setattr("time.time", lambda: second)
        into.record(ENVIRONMENT, "p", [Measurement("s", 1, Config(), time_ms)])
        into.remember(ENVIRONMENT, "p", "", Plan("p", "s", 1, time_ms=time_ms))
        into.remember_profile(ENVIRONMENT, {"bandwidth": time_ms})

    for second in (100.0, 300.0):
        record(Wisdom(tmp_path / f"{second}.sqlite3"), second, time_ms=second)
        Wisdom(tmp_path / f"{second}.sqlite3").export(tmp_path / f"{second}.json")
    record(wisdom, 200.0, time_ms=200.0)
    assert wisdom.import_(tmp_path / "100.0.json") == 0
    assert wisdom.measurements(ENVIRONMENT, "p")[0].time_ms == 200.0
    assert wisdom.import_(tmp_path / "300.0.json") == 3
    assert wisdom.measurements(ENVIRONMENT, "p")[0].time_ms == 300.0
    plan = wisdom.plan(ENVIRONMENT, "p", "")
    assert plan is not None
    assert plan.time_ms == 300.0
    assert wisdom.profile(ENVIRONMENT) == {"bandwidth": 300.0}


def test_the_document_is_as_the_manual_says(wisdom: Wisdom, tmp_path: Path) -> None:
    wisdom.record(
        ENVIRONMENT,
        "p",
        [
            Measurement(
                "fft", 1, Config(basis=(32, 32)), 1.5, 64, Error(1e-7, 2e-7), "", 2.0, None, 0.0, 0.0, 0.25, 7, 0.5
            )
        ],
    )
    wisdom.remember(ENVIRONMENT, "p", CONSTRAINTS, some_plan("p"))
    wisdom.remember_profile(ENVIRONMENT, {"bandwidth": 3e12})
    wisdom.export(tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text("utf-8"))
    (environment,) = data["environments"]
    (problem,) = environment["problems"]
    (measurement,), (plan,) = problem["measurements"], problem["plans"]
    recorded = measurement["recorded"]
    assert (data["format"], data["kind"]) == (1, "tilewise wisdom")
    assert data["written_by"].startswith("tilewise ")
    assert environment["environment"] == ENVIRONMENT
    assert environment["profile"]["values"] == {"bandwidth": 3e12}
    assert problem["problem"] == "p"
    assert measurement == {
        "solver": "fft",
        "version": 1,
        "config": {"basis": [32, 32]},
        "time_ms": 1.5,
        "workspace": 64,
        "error": [1e-7, 2e-7],
        "reason": "",
        "baseline_ms": 2.0,
        "host_ms": 0.0,
        "baseline_host_ms": 0.0,
        "dispersion": 0.25,
        "runs": 7,
        "load": 0.5,
        "busy": False,
        "recorded": recorded,
    }
    assert (plan["constraints"], plan["plan"]) == (CONSTRAINTS, some_plan("p").to_json())


def test_the_manuals_document_is_read_whole() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wisdom.md").read_text("utf-8")
    (block,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    tables, faults = document.parse(json.loads(block))
    assert faults == []
    assert {name: len(found) for name, found in tables.items()} == {"measurement": 2, "plan": 1, "profile": 1}
    assert document.compose(tables, json.loads(block)["written_by"]) == json.loads(block)


def test_a_failed_export_leaves_nothing_behind(wisdom: Wisdom, tmp_path: Path) -> None:
    wisdom.record(ENVIRONMENT, "p", some_measurements())
    (tmp_path / "x.json").mkdir()
    (tmp_path / "x.json" / "precious").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match=r"x\.json|directory"):
        wisdom.export(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        wisdom.export(tmp_path / "nowhere" / "x.json")
    assert sorted(tmp_path.rglob("*")) == before


def test_export_replaces_the_target_of_a_link(wisdom: Wisdom, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    wisdom.export(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["environments"] == []


def test_export_writes_into_a_pipe_and_leaves_it(wisdom: Wisdom, tmp_path: Path) -> None:
    wisdom.record(ENVIRONMENT, "p", some_measurements())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        wisdom.export(pipe)
        told = read.result(timeout=30)
    assert [entry["environment"] for entry in json.loads(told)["environments"]] == [ENVIRONMENT]
    assert pipe.is_fifo()
    assert [*tmp_path.glob("*.partial")] == []


def test_export_leaves_a_device_a_device(wisdom: Wisdom, tmp_path: Path) -> None:
    device = tmp_path / "null"  # of the test's own: to root every device is writable
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("")
    except PermissionError:
        pytest.skip("only root makes devices, and not on every file system")
    wisdom.export(device)
    assert device.is_char_device()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "kind='list'"),
        ("{}", "kind=None"),
        ('{"kind": "tilewise plan", "format": 1}', "kind='tilewise plan'"),
        ('{"kind": "tilewise wisdom", "format": 2}', "format=2"),
        ('{"kind": "tilewise wisdom", "format": true}', "format=True"),
        ('{"kind": "tilewise wisdom", "format": 1}', "environments"),
        ('{"kind": "tilewise wisdom", "format": NaN}', "NaN"),
        ("[" * 100_000, "nested"),
    ],
)
def test_what_is_no_document_is_an_error(wisdom: Wisdom, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(PlanFormatError, match=message) as caught:
        wisdom.import_(path)
    assert str(path) in str(caught.value)
    assert not wisdom.path.exists()


def test_a_document_that_is_no_text_or_not_there_is_an_error(wisdom: Wisdom, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFormatError, match=r"x\.json"):
        wisdom.import_(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        wisdom.import_(tmp_path / "y.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, name) for name, _ in pairs] + [place for _, inner in pairs for place in places(inner)]


@hypothesis.given(data=st.data(), replacement=JSON)
@hypothesis.settings(max_examples=100)
def test_a_document_changed_anywhere_is_read_or_refused(data: st.DataObject, replacement: Any) -> None:
    """Whatever stands at any place: one clear error, or faults noted and the other rows kept."""
    plan = rows.pack_plan("p", "c", some_plan("p"), 1.0)
    measured = [document.Row("e", "p", rows.pack_measurement(m, 1.0)) for m in some_measurements(2)]
    tables = {
        "measurement": measured,
        "plan": [document.Row("e", "p", plan)],
        "profile": [document.Row("e", "", rows.pack_profile({"b": 1.0}, 1.0))],
    }
    changed = document.compose(tables, "test")
    container, name = data.draw(st.sampled_from(places(changed)))
    container[name] = replacement
    try:
        found, _ = document.parse(changed)
    except PlanFormatError:
        return
    for row in found["measurement"]:
        rows.unpack_measurement(row.values)
    for row in found["plan"]:
        rows.unpack_plan(row.problem, row.values)
    for row in found["profile"]:
        rows.unpack_profile(row.values)


def test_bad_entries_of_a_document_are_counted_and_the_rest_kept(wisdom: Wisdom, tmp_path: Path) -> None:
    wisdom.record(ENVIRONMENT, "p", some_measurements(5))
    wisdom.remember(ENVIRONMENT, "p", CONSTRAINTS, some_plan("p"))
    data = wisdom.to_json()
    problem = data["environments"][0]["problems"][0]
    problem["measurements"][1]["time_ms"] = -1
    problem["measurements"][2]["config"] = "basis=3"
    problem["plans"][0]["plan"]["children"] = 7
    (tmp_path / "x.json").write_text(json.dumps(data))
    other = Wisdom(tmp_path / "other.sqlite3")
    with pytest.warns(
        WisdomWarning, match="3 rows not valid and ignored; the first: measurement: time_ms=-1"
    ) as caught:
        assert other.import_(tmp_path / "x.json") == 3
    assert len(caught) == 1
    assert len(other.measurements(ENVIRONMENT, "p")) == 3
