"""Wisdom in use: what is kept comes back, by its keys, and travels as JSON."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from tests.wisdom_workers import CONSTRAINTS, ENVIRONMENT, some_measurements, some_plan

from tilewise.plan import Config, Error, Measurement, Plan, PlanFormatError
from tilewise.wisdom import Summary, Wisdom, WisdomWarning, cache_dir, document, rows

# Surrogates are no text, and no key or message of tilewise's holds any but by accident.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(bool)
NUMBERS = st.floats(0, 1e18)
BYTES = st.integers(0, 2**63 - 1)
VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.booleans(),
    st.lists(st.integers(), max_size=4).map(tuple),
)
CONFIGS = st.dictionaries(st.from_regex(r"[a-z]\w{0,9}", fullmatch=True), VALUES, max_size=4).map(
    lambda values: Config(**values)
)
ERRORS = st.none() | st.builds(Error, NUMBERS, NUMBERS)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    time_ms = draw(st.none() | NUMBERS)
    return Measurement(
        solver=draw(NAMES),
        version=draw(BYTES),
        config=draw(CONFIGS),
        time_ms=time_ms,
        workspace=draw(st.none() | BYTES),
        error=draw(ERRORS),
        reason=draw(NAMES if time_ms is None else TEXT),
        baseline_ms=draw(st.none() | NUMBERS),
    )


def plans(problem: st.SearchStrategy[str], depth: int = 2) -> st.SearchStrategy[Plan]:
    @st.composite
    def build(draw: st.DrawFn) -> Plan:
        children = draw(st.lists(plans(TEXT, depth - 1), max_size=3)) if depth else []
        return Plan(
            problem=draw(problem),
            solver=draw(NAMES),
            version=draw(BYTES),
            config=draw(CONFIGS),
            children=tuple(children),
            counts=tuple(draw(st.integers(1, 1000)) for _ in children),
            time_ms=draw(NUMBERS | st.just(math.nan)),
            workspace=draw(BYTES),
            constant=draw(BYTES),
            error=draw(ERRORS),
            label=draw(TEXT),
        )

    return build()


def key(m: Measurement) -> tuple[str, int, str]:
    return m.solver, m.version, m.config.key


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Wisdom:
    """One store for many examples, which forget what they kept."""
    return Wisdom(tmp_path_factory.mktemp("shared") / "wisdom.sqlite3")


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    return Wisdom(tmp_path / "wisdom.sqlite3")


@hypothesis.given(environment=NAMES, problem=NAMES, kept=st.lists(measurements(), max_size=5, unique_by=key))
@hypothesis.settings(max_examples=20)
def test_measurements_come_back(shared: Wisdom, environment: str, problem: str, kept: list[Measurement]) -> None:
    shared.forget()
    shared.record(environment, problem, kept)
    found = shared.measurements(environment, problem)
    assert sorted(found, key=key) == sorted(kept, key=key)
    assert shared.measurements(environment + "x", problem) == shared.measurements(environment, problem + "x") == []


@hypothesis.given(data=st.data(), environment=NAMES, problem=NAMES, constraints=TEXT)
@hypothesis.settings(max_examples=20)
def test_plans_come_back(shared: Wisdom, data: st.DataObject, environment: str, problem: str, constraints: str) -> None:
    shared.forget()
    plan = data.draw(plans(st.just(problem)))
    shared.remember(environment, problem, constraints, plan)
    found = shared.plan(environment, problem, constraints)
    assert found is not None
    # A time that is not a number equals nothing, so documents are compared.
    assert found.to_json() == plan.to_json()
    assert shared.plan(environment, problem, constraints + "x") is None


@hypothesis.given(
    kept=st.dictionaries(
        st.tuples(NAMES, NAMES), st.lists(measurements(), min_size=1, max_size=3, unique_by=key), max_size=4
    ),
    profiles=st.dictionaries(NAMES, st.dictionaries(NAMES, NUMBERS), max_size=2),
    data=st.data(),
)
@hypothesis.settings(max_examples=12)
def test_a_document_holds_everything(
    shared: Wisdom,
    tmp_path_factory: pytest.TempPathFactory,
    kept: dict[tuple[str, str], list[Measurement]],
    profiles: dict[str, dict[str, float]],
    data: st.DataObject,
) -> None:
    shared.forget()
    for (environment, problem), found in kept.items():
        shared.record(environment, problem, found)
        shared.remember(environment, problem, CONSTRAINTS, data.draw(plans(st.just(problem), depth=1)))
    for environment, profile in profiles.items():
        shared.remember_profile(environment, profile)
    folder = tmp_path_factory.mktemp("document")
    rows_written = shared.export(folder / "wisdom.json")
    assert rows_written == sum(map(len, kept.values())) + len(kept) + len(profiles)
    other = Wisdom(folder / "other.sqlite3")
    assert other.import_(folder / "wisdom.json") == rows_written
    assert other.to_json() == shared.to_json()
    assert other.import_(folder / "wisdom.json") == 0


def test_recording_again_replaces(wisdom: Wisdom) -> None:
    old, other = some_measurements(2)
    new = Measurement(old.solver, old.version, old.config, reason="out of memory")
    newer_version = Measurement(old.solver, old.version + 1, old.config, 1.0)
    wisdom.record(ENVIRONMENT, "p", [old, other])
    wisdom.record(ENVIRONMENT, "p", [new, newer_version])
    assert wisdom.measurements(ENVIRONMENT, "p") == [new, other, newer_version]


def test_reading_makes_no_file(wisdom: Wisdom) -> None:
    assert wisdom.measurements(ENVIRONMENT, "p") == []
    assert wisdom.plan(ENVIRONMENT, "p", "") is None
    assert wisdom.profile(ENVIRONMENT) is None
    assert wisdom.summary() == []
    assert list(wisdom.path.parent.iterdir()) == []


def test_more_keys_than_one_query_takes(wisdom: Wisdom) -> None:
    problems = [f"problem {i}" for i in range(1203)]
    wisdom.record_many(ENVIRONMENT, {problem: some_measurements(1) for problem in problems})
    wisdom.remember_many(ENVIRONMENT, "", {problem: some_plan(problem) for problem in problems})
    wisdom.record("elsewhere", problems[0], some_measurements(3))
    asked = [*problems, "unknown", problems[0]]
    found = wisdom.measurements_many(ENVIRONMENT, iter(asked))
    assert found == {**dict.fromkeys(problems, some_measurements(1)), "unknown": []}
    assert wisdom.plans_many(ENVIRONMENT, iter(asked), "").keys() == set(problems)
    assert wisdom.measurements_many(ENVIRONMENT, []) == wisdom.plans_many(ENVIRONMENT, [], "") == {}


def test_a_lost_candidate_keeps_its_reason_without_numbers_that_are_none(wisdom: Wisdom) -> None:
    config = Config(engine=3)
    wisdom.record(
        ENVIRONMENT,
        "p",
        [Measurement("cudnn", 1, config, math.inf, 5, Error(math.nan, math.inf), "wrong \udcff", math.nan)],
    )
    assert wisdom.measurements(ENVIRONMENT, "p") == [
        Measurement("cudnn", 1, config, workspace=5, reason=r"wrong \udcff")
    ]


@pytest.mark.parametrize(
    ("entry", "measurement"),
    [
        ("time_ms", Measurement("s", 1, Config(), math.nan)),
        ("time_ms", Measurement("s", 1, Config(), -1.0)),
        ("time_ms", Measurement("s", 1, Config(), -1.0, reason="lost")),
        ("time_ms", Measurement("s", 1, Config(), 10**400)),
        ("time_ms", Measurement("s", 1, Config())),
        ("error.l2", Measurement("s", 1, Config(), 1.0, 1, Error(math.nan, 0))),
        ("workspace", Measurement("s", 1, Config(), 1.0, -1)),
        ("workspace", Measurement("s", 1, Config(), 1.0, 2**63)),
        ("baseline_ms", Measurement("s", 1, Config(), 1.0, baseline_ms=math.inf)),
        ("solver", Measurement("", 1, Config(), 1.0)),
        ("solver", Measurement("\ud800", 1, Config(), 1.0)),
        ("version", Measurement("s", True, Config(), 1.0)),
        ("NaN", Measurement("s", 1, Config(a=math.nan), 1.0)),
    ],
)
def test_what_would_not_be_read_back_is_not_kept(wisdom: Wisdom, entry: str, measurement: Measurement) -> None:
    with pytest.raises(ValueError, match=entry):
        wisdom.record(ENVIRONMENT, "p", [some_measurements()[0], measurement])
    assert wisdom.measurements(ENVIRONMENT, "p") == []


def test_plans_and_profiles_that_would_not_be_read_back_are_not_kept(wisdom: Wisdom) -> None:
    with pytest.raises(ValueError, match="another"):
        wisdom.remember(ENVIRONMENT, "p", "", some_plan("another"))
    with pytest.raises(ValueError, match="plan"):
        wisdom.remember(ENVIRONMENT, "p", "", Plan("p", "s", 1, error=Error(math.inf, 0)))
    with pytest.raises(ValueError, match="bandwidth"):
        wisdom.remember_profile(ENVIRONMENT, {"bandwidth": math.inf})
    with pytest.raises(ValueError, match="environment"):
        wisdom.remember_profile("", {})
    with pytest.raises(ValueError, match="problem"):
        wisdom.record(ENVIRONMENT, "", some_measurements())
    assert wisdom.summary() == []


def test_summary(wisdom: Wisdom) -> None:
    lost = Measurement("cudnn", 1, Config(), reason="needs 2 GiB")
    wisdom.record("a", "p", [*some_measurements(3), lost])
    wisdom.record("a", "q", [lost])
    wisdom.remember("a", "r", "", some_plan("r"))
    wisdom.remember_profile("b", {"bandwidth": 1.0})
    a, b = wisdom.summary()
    assert a == Summary("a", problems=3, measurements=5, lost=2, plans=1, profiled=False, newest=a.newest)
    assert b == Summary("b", problems=0, measurements=0, lost=0, plans=0, profiled=True, newest=b.newest)
    assert 0 < a.newest <= b.newest


def forgettable(wisdom: Wisdom) -> None:
    """Per environment: 4 measurements, 2 plans and a profile."""
    for environment in ("a", "b"):
        for problem in ("fprop p", "dgrad p"):
            wisdom.record(
                environment, problem, [Measurement("fft", 1, Config(), 1.0), Measurement("gemm", 2, Config(), 1.0)]
            )
            wisdom.remember(environment, problem, "", some_plan(problem))
        wisdom.remember_profile(environment, {"bandwidth": 1.0})


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ({}, 14),
        ({"environment": "a"}, 7),
        ({"environment": "unknown"}, 0),
        ({"problem_contains": "fprop"}, 6),
        ({"problem_contains": "%"}, 0),
        ({"solver": "gemm"}, 4),
        ({"solver": "micro_batch"}, 4),
        ({"solver": "fft"}, 8),
        ({"solver": "fft", "environment": "b", "problem_contains": "dgrad"}, 2),
        ({"stale": {"fft": 1, "gemm": 2, "micro_batch": 1}}, 0),
        ({"stale": {"fft": 2, "gemm": 2}}, 8),
        ({"stale": {"gemm": 3}, "environment": "a"}, 2),
        ({"stale": {}}, 0),
        ({"stale": {"fft": 2}, "solver": "gemm"}, 0),
    ],
    ids=str,
)
def test_forget(wisdom: Wisdom, arguments: dict[str, Any], gone: int) -> None:
    forgettable(wisdom)
    assert wisdom.forget(**arguments) == gone
    left = wisdom.summary()
    assert sum(s.measurements + s.plans + s.profiled for s in left) == 14 - gone
    assert wisdom.forget(**arguments) == 0


def test_forgetting_by_problem_leaves_the_others(wisdom: Wisdom) -> None:
    forgettable(wisdom)
    wisdom.forget(problem_contains="fprop")
    assert wisdom.measurements("a", "fprop p") == []
    assert wisdom.plan("a", "fprop p", "") is None
    assert len(wisdom.measurements("a", "dgrad p")) == 2
    assert wisdom.plan("a", "dgrad p", "") is not None
    assert wisdom.profile("a") == {"bandwidth": 1.0}


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
        ENVIRONMENT, "p", [Measurement("fft", 1, Config(basis=(32, 32)), 1.5, 64, Error(1e-7, 2e-7), "", 2.0)]
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
        "recorded": recorded,
    }
    assert (plan["constraints"], plan["plan"]) == (CONSTRAINTS, some_plan("p").to_json())


def test_the_manuals_document_is_read_whole() -> None:
    text = (Path(__file__).parent.parent / "docs" / "wisdom.md").read_text("utf-8")
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


def test_the_users_own_store_lies_in_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "moved"))
    assert cache_dir() == tmp_path / "moved"
    assert Wisdom().path == tmp_path / "moved" / "wisdom.sqlite3"
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "~/moved")
    assert cache_dir() == Path.home() / "moved"
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "")
    assert cache_dir().name == "tilewise"
    assert cache_dir().is_absolute()


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wisdom = Wisdom("with ?#% in.sqlite3")
    monkeypatch.chdir("/")
    wisdom.record(ENVIRONMENT, "p", some_measurements())
    assert (tmp_path / "with ?#% in.sqlite3").exists()


def test_a_model_that_holds_wisdom_is_copied_and_pickled(wisdom: Wisdom) -> None:
    wisdom.record(ENVIRONMENT, "p", some_measurements())
    assert copy.deepcopy(wisdom) is wisdom
    loaded = pickle.loads(pickle.dumps(wisdom))
    assert loaded.path == wisdom.path
    assert loaded.measurements(ENVIRONMENT, "p") == some_measurements()


def test_importing_wisdom_is_light() -> None:
    code = "import sys, tilewise.wisdom; print(*{'sqlite3', 'torch', 'platformdirs', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
