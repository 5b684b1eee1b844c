"""Wisdom in use: what is kept comes back, by its keys, is replaced and forgotten."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from tests.wisdom.wisdom_workers import CONSTRAINTS, ENVIRONMENT, some_measurements, some_plan

from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.wisdom import Summary, Wisdom, cache_dir

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
    assert a == Summary("a", problems=3, measurements=5, lost=2, plans=1, profiled=False, newest=a.newest, busy=1)
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
