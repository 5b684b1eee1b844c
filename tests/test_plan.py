"""Configs, plans and sizes as text and JSON: what is written is read back, what is malformed is named."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tilewise.plan import (
    DEEPEST,
    UNIT_FORGOTTEN,
    UNITS,
    Config,
    Error,
    Plan,
    PlanFormatError,
    format_bytes,
    parse_bytes,
)
from tilewise.planner.options import BATCH_SIZES, RIGORS, Options

names = st.text(min_size=1, max_size=8)
texts = st.text(max_size=12)
sizes = st.integers(0, 2**63 - 1)
numbers = st.floats(0, 1e18)
values = (
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts | st.booleans()
) | st.lists(st.integers(), max_size=4).map(tuple)  # fmt: skip
configs = st.dictionaries(names | st.just("self"), values, max_size=4).map(lambda items: Config(**items))
errors = st.none() | st.builds(Error, numbers, numbers)


def plans(children: st.SearchStrategy[tuple[Plan, ...]]) -> st.SearchStrategy[Plan]:
    return st.builds(
        lambda parts, counts, **rest: Plan(children=parts, counts=tuple(counts[: len(parts)]), **rest),
        children,
        st.lists(st.integers(1, 99), min_size=3, max_size=3),
        problem=texts,
        solver=texts,
        version=st.integers(0, 99),
        config=configs,
        time_ms=numbers | st.just(math.nan),
        host_ms=st.none() | numbers,
        load=st.none() | st.floats(0, 1),
        workspace=sizes,
        constant=sizes,
        error=errors,
        label=texts,
    )


leaves = plans(st.just(()))
trees = st.recursive(leaves, lambda inner: plans(st.lists(inner, min_size=1, max_size=3).map(tuple)), max_leaves=5)


@given(configs)
def test_configs_round_trip(config: Config) -> None:
    for again in (Config.from_key(config.key), Config.from_json(json.loads(json.dumps(config.to_json())))):
        assert again == config
        assert hash(again) == hash(config)
        assert again.key == config.key
        assert [type(value) for value in again.values()] == [type(value) for value in config.values()]


def test_configs_are_mappings_in_order_of_names() -> None:
    config = Config(product="batched", basis=(32, 32))
    assert dict(config) == {"basis": (32, 32), "product": "batched"}
    assert list(config) == ["basis", "product"]
    assert str(config) == "basis=32x32 product=batched"
    assert repr(config) == "Config(basis=(32, 32), product='batched')"
    assert len(config) == 2
    assert config.get("tile") is None
    assert config != {"basis": (32, 32), "product": "batched"}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {"a": None},
        {"a": {}},
        {"a": [1, True]},
        {"a": [1.5]},
        {"a": ["x"]},
        {"a": math.nan},
        {"a": -math.inf},
        {3: 4},
    ],
)
def test_malformed_configs_are_refused(data: object) -> None:
    with pytest.raises(PlanFormatError):
        Config.from_json(data)


@pytest.mark.parametrize(
    "text", ["", "{", "nonsense", '{"a":NaN}', '{"a":1e999}', "[" * 10**5, '{"a":' + "9" * 5000 + "}"]
)
def test_malformed_config_text_is_refused(text: str) -> None:
    with pytest.raises(PlanFormatError):
        Config.from_key(text)


@given(st.text(max_size=30))
def test_any_text_is_a_config_or_refused(text: str) -> None:
    with contextlib.suppress(PlanFormatError):
        assert isinstance(Config.from_key(text), Config)


@given(trees)
def test_plans_round_trip(plan: Plan) -> None:
    text = json.dumps(plan.to_json(), allow_nan=False)
    again = Plan.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert str(again) == str(plan)
    if all(math.isfinite(node.time_ms) for node in nodes(plan)):
        assert again == plan
        assert hash(again) == hash(plan)


def nodes(plan: Plan) -> list[Plan]:
    return [plan, *(node for child in plan.children for node in nodes(child))]


@given(trees)
def test_leaves_are_those_without_children(plan: Plan) -> None:
    assert list(plan.leaves()) == [node for node in nodes(plan) if node.leaf]


GOOD = Plan(
    "p", "s", 1, Config(a=1), (Plan("q", "t", 2),), (3,), 1.5, 10, 20, Error(1e-7, 1e-6), "l", 0.1, 0.2
).to_json()
MAY_BE_ABSENT = ("time_ms", "host_ms", "load", "error")
JUNK = [None, True, -1, 1.5, "x", [], [1], {}, {"a": 1}, [[]], math.nan, math.inf, 10**400, [None, None]]


@pytest.mark.parametrize("name", sorted(GOOD.keys() - {"busy"}))  # which is not read
def test_every_entry_of_a_plan_is_looked_at(name: str) -> None:
    """Junk is refused by the name of its entry, or was a value that may be there."""
    refused = 0
    for junk in JUNK:
        try:
            plan = Plan.from_json({**GOOD, name: junk})
            named = bool(json.dumps(plan.to_json(), allow_nan=False))
        except PlanFormatError as error:
            refused += 1
            named = name in str(error)
        assert named or name == "children"
    assert refused >= 6


@pytest.mark.parametrize("name", sorted(GOOD.keys() - {"busy"}))
def test_entries_other_than_times_load_and_error_must_be_there(name: str) -> None:
    rest = {key: value for key, value in GOOD.items() if key != name}
    if name in MAY_BE_ABSENT:
        assert Plan.from_json(rest)
    else:
        with pytest.raises(PlanFormatError, match=name):
            Plan.from_json(rest)


def test_a_plan_of_an_earlier_version_does_not_know_the_hosts_time() -> None:
    told = {"host_ms", "load", "busy"}
    plan = Plan.from_json({key: value for key, value in GOOD.items() if key not in told})
    assert (plan.time_ms, plan.device_ms, plan.host_ms, plan.load, plan.busy) == (1.5, 1.5, None, None, False)
    assert hash(plan) == hash(Plan.from_json(plan.to_json()))
    assert plan == Plan.from_json(plan.to_json())


@pytest.mark.parametrize(("device", "load", "busy"), [
    ("cpu", 0.09, False), ("cpu", 0.11, True), ("cuda:NVIDIA H100 80GB HBM3", 0.7, False),
    ("cuda:NVIDIA H100 80GB HBM3", 0.8, True), ("cpu", None, False),
])  # fmt: skip
def test_a_plan_says_that_the_host_was_busy(device: str, load: float | None, busy: bool) -> None:
    plan = Plan(f"conv fprop fp32 {device}", "fft", 1, time_ms=2.5, load=load)
    assert plan.busy is busy is plan.to_json()["busy"]
    assert ("2.500 ms (busy)" in str(plan)) is busy


@given(
    st.recursive(
        st.sampled_from(JUNK), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(GOOD)), inner)
    )
)
def test_any_document_is_a_plan_or_refused(data: Any) -> None:
    for document in (data, {**GOOD, **data} if isinstance(data, dict) else data):
        with contextlib.suppress(PlanFormatError):
            assert isinstance(Plan.from_json(document), Plan)


def test_children_may_not_nest_without_end() -> None:
    plan = Plan("p", "s", 1).to_json()
    for _ in range(DEEPEST - 1):
        plan = {**plan, "children": [plan], "counts": [1]}
    assert Plan.from_json(plan)
    with pytest.raises(PlanFormatError, match="nested"):
        Plan.from_json({**plan, "children": [plan], "counts": [1]})


def test_a_plan_prints_as_a_tree() -> None:
    fft = Plan("c", "fft", 1, Config(basis=(32, 32)), time_ms=2.9, workspace=51275366, label="basis=32x32 @64")
    winograd = Plan("c", "winograd", 1, Config(f=4), time_ms=3.1, workspace=42991616)
    plan = Plan(
        "p", "micro_batch", 1, Config(sizes=(64,) * 4), (fft, winograd), (3, 1), 12.1, 51275366, 0, Error(2e-7, 1e-6),
        "256 = 3x64 + 64",
    )  # fmt: skip
    assert str(plan).splitlines() == [
        "micro_batch 256 = 3x64 + 64  12.100 ms  48.9 MiB  err 2e-07",
        "  fft basis=32x32 @64         2.900 ms  48.9 MiB",
        "  winograd f=4                3.100 ms  41.0 MiB",
    ]
    assert str(replace(winograd, time_ms=math.nan, workspace=0)) == "winograd f=4  not timed  0 B"


@given(st.integers(0, 2**62))
def test_bytes_as_numbers_stay(size: int) -> None:
    assert parse_bytes(size) == size


@given(st.integers(0, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_bytes_with_units(number: int, unit: str, space: str, lower: bool) -> None:
    text = f" {number}{space}{unit.lower() if lower else unit} "
    assert parse_bytes(text) == number * UNITS[unit]


def test_bytes_in_fractions() -> None:
    assert parse_bytes("0.5 GiB") == 2**29
    assert parse_bytes("1.5KB") == 1500
    assert parse_bytes("4194304") == 2**22
    assert parse_bytes(str(UNIT_FORGOTTEN)) == UNIT_FORGOTTEN
    assert parse_bytes("1e3") == 1000
    assert parse_bytes("0") == 0


@pytest.mark.parametrize(
    "size", ["64 MB?", "", " ", "MiB", "-1", "-1MiB", "nan", "inf GiB", "1e308GiB", "1e400", "64 megs", "0x10",
             "64MiB MiB", "64", " 4096 ", str(UNIT_FORGOTTEN - 1), "64M", "0.5 g", -1, True, None, 1.5, [64], b"64MiB"],
)  # fmt: skip
def test_unreadable_sizes_name_the_argument_and_the_value(size: object) -> None:
    with pytest.raises(ValueError, match=r"^budget=") as raised:
        parse_bytes(size, "budget")  # type: ignore[arg-type]
    assert repr(size) in str(raised.value)


@pytest.mark.parametrize("size", [2**63, 10**5000, "1e30MiB", "9" * 300, -(10**5000)], ids=range(5))
def test_sizes_that_no_file_holds_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"^budget=.*(at most 2\^63 - 1 bytes would do|must not be negative)"):
        parse_bytes(size, "budget")  # type: ignore[arg-type]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_bytes(text) >= 0


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 51275366, 2**31)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "48.9 MiB",
        "2.0 GiB",
    ]


def test_options_take_sizes_as_text() -> None:
    assert Options(workspace="64MiB").workspace == 64 * 2**20  # type: ignore[arg-type]
    assert Options(workspace=0).workspace == 0
    assert Options().workspace is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("workspace", "64 MB?"),
        ("workspace", -1),
        ("batch_sizes", "some"),
        ("batch_sizes", None),
        ("rigor", "exhaustive"),
        ("error_limit", 0.0),
        ("error_limit", -1e-5),
        ("error_limit", math.nan),
        ("error_limit", "small"),
        ("error_limit", True),
        ("deterministic", "yes"),
        ("strict", 1),
    ],
)
def test_bad_options_are_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}="):
        Options(**{argument: value})  # type: ignore[arg-type]


def test_every_choice_is_an_option() -> None:
    for batch_sizes in BATCH_SIZES:
        for rigor in RIGORS:
            assert Options(batch_sizes=batch_sizes, rigor=rigor)
