"""Schedules as values and files: what is written is read back, and whatever else is read is refused by name."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import toys

from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.planner import Options, Schedule, ScheduleError
from tilewise.planner.schedules.results import Layer, LayerResult, PassResult, RunTimes
from tilewise.problems.conv.problem import ConvProblem, Pass

timed = st.floats(1e-6, 1e6)
times = st.none() | timed
sizes = st.integers(0, 2**40)
words = st.text(st.characters(codec="utf-8"), max_size=12)
names = words.filter(bool)
configs = st.dictionaries(
    st.sampled_from(("basis", "sizes", "order")),
    st.integers(0, 99) | st.booleans() | words | st.just((3, 4)),
    max_size=3,
).map(lambda values: Config(**values))
errors = st.none() | st.builds(Error, st.floats(0, 1), st.floats(0, 1))
measurements = st.builds(Measurement, names, st.integers(0, 9), configs, times, st.none() | sizes, errors, words, times,
                         times)  # fmt: skip


def plans(key: str) -> st.SearchStrategy[Plan]:
    leaf = st.builds(
        Plan, st.just(key), names, st.integers(0, 9), configs, time_ms=st.floats(0, 1e6), workspace=sizes,
        constant=sizes, error=errors, label=words,
    )  # fmt: skip
    divided = st.lists(leaf, min_size=1, max_size=2).map(
        lambda parts: Plan(key, "micro_batch", 1, Config(sizes=(1,)), tuple(parts), (1,) * len(parts))
    )
    return leaf | divided


@st.composite
def results(draw: st.DrawFn, index: int) -> LayerResult:
    found = []
    for pass_ in draw(st.lists(st.sampled_from(list(Pass)), unique=True, max_size=3)):
        # Batches tell the layers' problems apart, as a problem has one plan.
        problem = draw(toys.problems(passes=(pass_,), dtypes=("fp32", "bf16"), batch=(index + 1, index + 1)))
        plan = draw(st.none() | plans(problem.key))
        fronts, tried = st.lists(plans(problem.key), max_size=2), st.lists(measurements, max_size=2)
        front, candidates = (draw(st.none() | entries.map(tuple)) for entries in (fronts, tried))
        runs = draw(st.none() | st.builds(RunTimes, st.integers(1, 99), timed, timed))
        found.append(PassResult(problem, plan, draw(words), draw(times), draw(times), front, candidates, runs=runs))
    left = "" if found else draw(words)
    layer_names = tuple(draw(st.lists(names, min_size=1, max_size=3)))
    return LayerResult(Layer(layer_names, tuple(p.problem for p in found), draw(st.booleans()), left), tuple(found))


BUDGET = {
    "policy": "arena", "total": 100, "used": 90, "least": 10,
    "segments": [{"layer": "conv", "pass": "fprop", "workspace": 90, "time_ms": 1.5}],
    "program": {"variables": 3, "rows": 2, "solve_ms": 0.5, "optimal": True, "method": "milp"},
}  # fmt: skip
STEP = {
    "limit": None, "peak": 9, "least": 4,
    "moments": [{"layer": "conv", "pass": "wgrad", "alive": 3, "result": 2, "workspace": 1}],
}  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    options = st.builds(
        Options, st.none() | sizes, st.sampled_from(("undivided", "all")), st.sampled_from(("measure", "patient")),
        st.booleans(), st.none() | st.floats(1e-9, 1), st.booleans(),
    )  # fmt: skip
    layers = tuple(draw(results(index)) for index in range(draw(st.integers(0, 3))))
    return Schedule(
        draw(names), "cpu", draw(names), draw(options), draw(st.integers(1, 512)), "fp32", "ieee", "contiguous", layers,
        draw(st.sampled_from((None, BUDGET))), draw(st.sampled_from((None, STEP, {**STEP, "limit": 12}))),
    )  # fmt: skip


def example() -> Schedule:
    """One of each thing that a document may hold."""
    problem = toys.small(Pass.FPROP, layouts=("channels_last", "contiguous", "contiguous"))
    part = toys.small(Pass.FPROP, batch=4)
    child = Plan(part.key, "gemm", 1, Config(order="patches"))
    divided = Plan(
        problem.key, "micro_batch", 1, Config(sizes=(4, 4)), (child,), (2,), time_ms=1.5, workspace=64,
        error=Error(1e-7, 2e-7), label="8 = 2x4",
    )  # fmt: skip
    tried = Measurement("fft", 3, Config(basis=8), None, 100, Error(1e-3, 1e-2), "error 1e-3 over the limit", 2.0)
    one = PassResult(problem, divided, "", 3.0, 1.5, (divided,), (tried,), runs=RunTimes(7, 1.25, 1.5))
    other = PassResult(toys.small(Pass.WGRAD), None, "nothing fits")
    layer = Layer(("a", "b.0"), (problem, other.problem))
    left = LayerResult(Layer(("c",), (), True, "computes in float64"), ())
    layers = (LayerResult(layer, (one, other)), left)
    return Schedule(
        "net",
        "cpu",
        "device=cpu torch=2",
        Options(64),
        8,
        "fp32",
        "ieee",
        "contiguous",
        layers,
        BUDGET,
        STEP,
        rates={"bytes_per_second": 2e10, "flops_per_second": 1e12},
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("written") / "schedule.json"
    example().save(path)
    return path.read_text("utf-8")


@given(made=schedules())
@settings(max_examples=60)
def test_what_is_saved_is_loaded(made: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    made.save(path)
    assert Schedule.load(path) == made


@pytest.mark.parametrize("limit", [1, 2**63, 10**300, 5e-324, 1.7e308])
def test_every_error_limit_is_saved_and_loaded(limit: float, tmp_path: Path) -> None:
    made = replace(example(), options=Options(error_limit=limit))
    made.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == made


@pytest.mark.parametrize("limit", [math.inf, math.nan, 10**400, 10**5000, -1, True, "1e-5"], ids=range(7))
def test_error_limits_that_no_file_holds_are_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"^error_limit.*a positive number would do"):
        Options(error_limit=limit)


def test_one_of_each(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    assert Schedule.load(str(tmp_path / "s.json")) == example()


@given(
    made=toys.problems(dtypes=("fp32", "bf16", "fp16")), device=st.sampled_from(("cpu", "cuda:NVIDIA H100 80GB HBM3"))
)
def test_problems_are_read_back_from_their_keys(made: ConvProblem, device: str) -> None:
    whole = replace(made, device=device, out_dtype="fp32", alignment=(16, 8, 2))
    assert ConvProblem.from_key(whole.key) == whole
    for wrong in (
        whole.key[:-1] if device == "cpu" else whole.key[1:],
        whole.key + "\n",
        whole.key.replace("mb", "mb0"),
    ):
        with pytest.raises(ValueError, match="problem"):
            ConvProblem.from_key(wrong)


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**62, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "../../x",
    "k" * 10**6, [], {}, [[]], [1, 2], {"format": 1}, "fprop", "cpu", "tilewise/plan", {"../x": "../x"}, b"bytes",
)  # fmt: skip


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document but the whole."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


PLACES = list(places(example().to_json()))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@given(data=st.data())
@settings(max_examples=400)
def test_a_changed_document_is_a_schedule_or_the_error(data: st.DataObject) -> None:
    document = copy.deepcopy(example().to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        path = PLACES[data.draw(st.integers(0, len(PLACES) - 1))]
        try:
            parent = at(document, path[:-1])
            old = parent[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(parent, dict | list):
            continue  # text that took the place of a list
        other = PLACES[data.draw(st.integers(0, len(PLACES) - 1))]
        change = data.draw(st.sampled_from(("junk", "delete", "swap", "nest", "twice")))
        if change == "junk":
            parent[path[-1]] = copy.deepcopy(JUNK[data.draw(st.integers(0, len(JUNK) - 1))])
        elif change == "delete":
            del parent[path[-1]]
        elif change == "nest":
            parent[path[-1]] = [old] if data.draw(st.booleans()) else {"children": old}
        elif change == "twice" and isinstance(parent, list):
            parent.append(copy.deepcopy(old))
        else:
            try:
                parent[path[-1]] = copy.deepcopy(at(document, other))
            except (KeyError, IndexError, TypeError):
                continue
    found = outcome(lambda: Schedule.from_json(document))
    if isinstance(found, Schedule):
        assert Schedule.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def outcome(read: Callable[[], Schedule]) -> Schedule | str:
    """The schedule, or the text of the one error there may be."""
    try:
        return read()
    except ScheduleError as error:
        text = str(error)
    assert text.isprintable()
    assert len(text) < 2000
    return text


@given(data=st.data())
@settings(max_examples=200)
def test_damaged_bytes_are_a_schedule_or_the_error(
    data: st.DataObject, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(text.encode())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "s.json").write_bytes(raw)
    found = outcome(lambda: Schedule.load(folder / "s.json"))
    assert isinstance(found, Schedule) or "s.json" in found
    assert os.listdir(folder) == ["s.json"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 90_000 + "1" + "}" * 90_000, "nested too deeply"),
        ('{"schema": ' + "[" * 200 + "]" * 200 + "}", "more than 100 deep"),
        ('{"schema": NaN}', "NaN"),
        ('{"schema": 1e999}', "number inf"),
        ('{"schema": ' + "9" * 5000 + "}", "not JSON"),
        ('{"schema": ' + "9" * 50 + "}", "63 bits"),
        ('{"schema": "\\ud800"}', "surrogates"),
        ("", "not JSON"),
        ("[]", "schedule="),
        ('{"schema": "tilewise/time", "version": 1}', "schema='tilewise/time'"),
        ('{"schema": "tilewise/plan", "version": 99}', "version=99: expected at most 2; a newer tilewise wrote this"),
        ('{"schema": "tilewise/plan", "version": true}', "version=True"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_what_is_none_says_why(content: str | bytes, names: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ScheduleError, match=r"s\.json") as raised:
        Schedule.load(path)
    assert names in str(raised.value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("layers.0.passes.0.plan.problem", "conv", "layers[0].passes[0].plan.problem='conv'"),
        ("layers.0.passes.0.plan.workspace", -1, "layers[0].passes[0].plan: workspace"),
        ("layers.0.passes.0.framework_ms", 0.0, "layers[0].passes[0].framework_ms=0.0"),
        ("layers.0.passes.0.problem.key", "k" * 10**6, "layers[0].passes[0].problem.key='kkk"),
        ("layers.0.passes.0.candidates.0.error.l2", "x", "layers[0].passes[0].candidates[0].error.l2='x'"),
        ("layers.0.passes.0.candidates.0.estimate_ms", -1, "layers[0].passes[0].candidates[0].estimate_ms=-1"),
        ("layers.0.names", [], "layers[0].names=[]"),
        ("device", "cuda:H100", "a problem of device 'cuda:H100'"),
        ("options.rigor", "magic", "rigor='magic': one of estimate"),
        ("options.workspace", "1MiB", "options.workspace='1MiB'"),
        ("budget.policy", "greedy", "budget.policy='greedy': expected one of arena, paper_wd"),
        ("budget.segments.0.pass", "forward", "budget.segments[0].pass='forward'"),
        ("step_memory.moments.0.alive", 1.5, "step_memory.moments[0].alive=1.5"),
    ],
)
def test_errors_name_field_value_and_what_would_do(place: str, value: object, said: str) -> None:
    document = copy.deepcopy(example().to_json())
    *parents, last = (int(word) if word.isdigit() else word for word in place.split("."))
    at(document, tuple(parents))[last] = value
    with pytest.raises(ScheduleError) as raised:
        Schedule.from_json(document)
    assert said in str(raised.value)


def test_unknown_fields_are_ignored_and_those_added_later_may_be_missing() -> None:
    document = copy.deepcopy(example().to_json())
    document["future"] = document["layers"][0]["future"] = document["layers"][0]["passes"][0]["future"] = {"a": [1]}
    for name in ("budget", "step_memory", "summary"):
        del document[name]
    del document["options"]["strict"]
    del document["layers"][0]["passes"][0]["candidates"][0]["estimate_ms"]
    found = Schedule.from_json(document)
    assert found.layers == example().layers
    assert found.budget is found.step_memory is None


def test_a_document_of_version_1_names_the_memory_of_a_step_step() -> None:
    document = copy.deepcopy(example().to_json())
    assert document["version"] == 2
    old = document | {"version": 1, "step": document.pop("step_memory")}
    assert Schedule.from_json(old) == example()
    old["step"]["peak"] = -1
    with pytest.raises(ScheduleError, match=r"step\.peak=-1"):
        Schedule.from_json(old)


def test_a_problem_with_two_plans_is_refused_unless_a_step_gave_them_their_room() -> None:
    document = copy.deepcopy(example().to_json()) | {"step_memory": None}
    again = copy.deepcopy(document["layers"][0])
    again["passes"][0]["plan"]["label"] = "another"
    document["layers"].append(again)
    with pytest.raises(ScheduleError, match=r"layers\[2\]\.passes\[0\]\.plan: another than that of layers\[0\]"):
        Schedule.from_json(document)
    own = document["layers"][0]["passes"][0]["plan"]["workspace"]
    again["passes"][0]["plan"]["workspace"] = own + 1
    found = Schedule.from_json(document | {"step_memory": example().to_json()["step_memory"]})
    problem = found.layers[0].passes[0].problem
    assert [found.layers[i].passes[0].plan.workspace for i in (0, 2)] == [own, own + 1]
    assert found.kernels[problem].plan.workspace == own


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    example().save(path)
    before = path.read_bytes()
    bad = Schedule.from_json(example().to_json())
    object.__setattr__(bad, "budget", {"total": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        bad.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.json"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ScheduleError, match="not a regular file"):
            Schedule.load(path)
    with pytest.raises(FileNotFoundError):
        Schedule.load(tmp_path / "none.json")


def test_a_file_beyond_the_limit_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "s.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ScheduleError, match="more than 67108864 bytes"):
        Schedule.load(tmp_path / "s.json")
