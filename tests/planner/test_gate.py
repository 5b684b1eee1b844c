"""Plans from outside the process: whatever they say, results are right and limits kept, or the error is clean."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tests import toys
from tests.planner.planted import leaf, planted
from tests.planner.simulated import PROFILE
from tests.sampling import EVERY

import tilewise
from tilewise import execute, solvers
from tilewise.machine.device import environment
from tilewise.plan import Config, Measurement, Plan, PlanFormatError
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.gate import why_unfit
from tilewise.planner.remembered import place_text, plan_text
from tilewise.problems.conv.checks import errors_of
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom, WisdomWarning, rows, tables
from tilewise.wisdom.database import Database
from tilewise.wisdom.tables import Row

DEPTHWISE = parse_layer("g8mb4ic8ih20oc8kh5ph2", pass_=Pass.WGRAD)
PROBLEMS = [
    *(parse_layer(text, pass_=pass_) for text in ("mb4ic3ih9oc5kh3ph1", "g4mb2ic4ih11oc4kh5ph2") for pass_ in Pass),
    *(parse_layer("mb4ic4iw40oc6kw8sw2pw1", pass_=pass_) for pass_ in (Pass.FPROP, Pass.DGRAD)),
    parse_layer("mb4ic8ih8oc8kh1", pass_=Pass.FPROP, layout="channels_last"),
    parse_layer("mb3ic4ih8oc4kh3ph1", pass_=Pass.FPROP, dtype="bf16"),
    parse_layer("mb2ic2id6oc3kd3pd1", pass_=Pass.WGRAD),
    parse_layer("g8mb4ic8iw300oc8kw33pw16", pass_=Pass.FPROP),
]
LIMIT = 2**20
COMPILED = ["depthwise", "depthwise_fft", "fused_lowering", "winograd"]
"""Solvers whose kernels a process compiles first, which takes seconds."""
A_HANG_S = 45.0


pytestmark = pytest.mark.filterwarnings("ignore::tilewise.wisdom.WisdomWarning")


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    made = Wisdom(tmp_path / "wisdom.sqlite3")
    made.remember_profile(environment("cpu").key, PROFILE)
    return made


def check_right(plan: Plan, problem: ConvProblem, limit: int | None) -> None:
    """It computes the problem, bound to no more workspace than the limit."""
    a, b = toys.operands(problem)
    bound = execute.bind(plan, problem, a, b)
    assert limit is None or bound.workspace <= limit
    tolerance = 1e-5 if problem.dtype == "fp32" else 1.6e-2
    assert toys.distance(bound(a, b), problem.reference(a, b)) <= tolerance


SQUARE = parse_layer("mb1ic8ih32oc8kh3ph1")
WINOGRAD = next(iter(solvers.get("winograd").configs(SQUARE)), Config())


@pytest.mark.parametrize(
    ("problem", "plan", "limit"),
    [
        (DEPTHWISE, leaf(DEPTHWISE, "fft", Config(basis=(24, 1), product="pointwise")), None),
        (SQUARE, leaf(SQUARE, "winograd", Config(**{**WINOGRAD, "threads": 500}), workspace=100), 2**24),
        (DEPTHWISE, leaf(DEPTHWISE, "fft", Config()), None),
        (DEPTHWISE, leaf(DEPTHWISE, "fft", Config(basis=(10**9, 10**9), product="pointwise")), None),
        (DEPTHWISE, leaf(DEPTHWISE, "fft", Config(basis=(24, 24), product="pointwise", block=10**18)), None),
    ],
)
def test_a_config_that_is_not_offered_is_refused_before_it_is_bound(
    wisdom: Wisdom, problem: ConvProblem, plan: Plan, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, binds = Options(rigor="wisdom_only", workspace=limit), [0]
    planted(wisdom, problem, replace(options, rigor="patient"), plan)
    planner = Planner(wisdom)
    monkeypatch.setattr(execute, "bind", toys.counting(execute.bind, binds))
    with (
        pytest.warns(WisdomWarning, match=f"not made here is not used .* {plan.solver} does not offer"),
        pytest.raises(NoPlanError, match=f"was refused: {plan.solver} does not offer"),
    ):
        planner.plan(problem, options)
    assert binds == [0]
    assert any("refused" in m.reason for m in planner.explain(problem, options) if m.solver == plan.solver)


def test_planning_goes_on_with_others(wisdom: Wisdom) -> None:
    options = Options(rigor="estimate")
    plan = leaf(DEPTHWISE, "fft", Config(basis=(24, 1), product="pointwise"))
    planted(wisdom, DEPTHWISE, replace(options, rigor="patient"), plan)
    found = Planner(wisdom).plan(DEPTHWISE, options)
    assert (found.solver, found.config) != (plan.solver, plan.config)
    check_right(found, DEPTHWISE, None)


def test_optimize_and_the_models_call_are_right_over_false_wisdom() -> None:
    problem = parse_layer("g8mb4ic8ih20oc8kh5ph2", pass_=Pass.WGRAD)
    model = torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False)
    plain = torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 8, 20, 20)
    store = Wisdom()
    for rigor in ("estimate", "patient"):
        planted(store, problem, Options(rigor=rigor), leaf(problem, "fft", Config(basis=(24, 1), product="pointwise")))
    with toys.installed(without=COMPILED):
        tilewise.optimize(model, x, rigor="estimate")
        model(x).square().sum().backward()
    plain(x.double()).square().sum().backward()
    assert model.weight.grad is not None
    assert toys.distance(model.weight.grad, plain.weight.grad) <= 1e-5  # type: ignore[arg-type]


def sound(problem: ConvProblem) -> list[Plan]:
    """Plans as a search may find them: every solver's leaves, and divisions by every split."""
    found = []
    for solver in solvers.all_solvers():
        if solver.why_not(problem):
            continue
        if not isinstance(solver, solvers.Split):
            found += [leaf(problem, solver.name, c, workspace=n) for c, n in solver.offers(problem, None)][:6]
            continue
        whole = problem.extent(solver.axis_of(problem))
        for sizes in {(whole // 2, whole - whole // 2), (1,) * whole} if whole > 1 else ():
            with_parts = divided(problem, solver, sizes)
            found += [] if with_parts is None else [with_parts]
    return found


def divided(problem: ConvProblem, solver: Any, sizes: tuple[int, ...]) -> Plan | None:
    children = []
    try:
        parts = solver.children(problem, Config(sizes=sizes))
    except ValueError:
        return None
    for part in parts:
        leaves = [s for s in solvers.all_solvers() if not isinstance(s, solvers.Split)]
        able = [s for s in leaves if part.problem is not None and not s.why_not(part.problem)]
        offered = ((s, list(s.offers(part.problem, None))) for s in reversed(able))
        last = next(((s.name, offers[-1][0]) for s, offers in offered if offers), None)
        if last is None:
            return None
        children.append(leaf(part.problem, *last))
    return Plan(problem.key, solver.name, solver.version, Config(sizes=sizes), tuple(children), (1,) * len(children))


@functools.cache
def all_sound() -> list[tuple[ConvProblem, Plan]]:
    """Sound plans of every problem: found when a test asks, as they take seconds."""
    return [(problem, plan) for problem in PROBLEMS for plan in sound(problem)]


NUMBERS: list[Any] = [0, 1, 2, 3, 7, 64, 500, 2**31, 10**15, 2**63 - 1, 2**70, -1, True, False, None, 1.0, 2.5, 1e300]
VALUES: list[Any] = [*NUMBERS, "", "batched", "x" * 5000, [], [1], [24, 1], [1, 1, 1], [10**9, 10**9], [True], [-1, 5]]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[ConvProblem, dict[str, Any]]:
    """A sound plan's document with one to three things changed, anywhere in it."""
    problem, plan = draw(st.sampled_from(all_sound()))
    data = json.loads(json.dumps(plan.to_json()))
    for _ in range(draw(st.integers(1, 3))):
        nodes = [data]
        for node in nodes:
            nodes += node["children"] if isinstance(node["children"], list) else []
        node = draw(st.sampled_from(nodes))
        what = draw(st.sampled_from(("config", "config", "config", "field", "solver", "sizes", "children", "claim")))
        config = node["config"] if isinstance(node["config"], dict) else {}
        if what == "config":
            name = draw(st.sampled_from([*config, "threads", "block", "basis"]))
            change = draw(st.sampled_from(("set", "nudge", "drop")))
            if change == "drop":
                config.pop(name, None)
            elif change == "nudge" and isinstance(config.get(name), int):
                config[name] += draw(st.sampled_from((-1, 1, 3)))
            else:
                config[name] = draw(st.sampled_from(VALUES))
        elif what == "solver":
            other = draw(st.sampled_from(solvers.all_solvers()))
            node["solver"], node["version"] = other.name, other.version
            if draw(st.booleans()) and not isinstance(other, solvers.Split):
                node["children"], node["counts"] = [], []
        elif what == "field":
            name = draw(st.sampled_from(("version", "counts", "problem", "label", "format")))
            node[name] = draw(st.sampled_from([*VALUES, "\x1b[2J", DEPTHWISE.key]))
        elif what == "sizes":
            config["sizes"] = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 10**6)), max_size=6))
        elif what == "children":
            inner = draw(st.sampled_from(nodes))
            node["children"] = draw(st.sampled_from(([], [json.loads(json.dumps(inner))], node["children"] * 2)))
            node["counts"] = [draw(st.sampled_from((1, 2, 4, 10**30)))] * len(node["children"])
        else:
            name = draw(st.sampled_from(("workspace", "time_ms", "constant", "error")))
            node[name] = draw(st.sampled_from([*NUMBERS, [0.0, 0.0], [1e300, 1e30], 100]))
    return problem, data


def check_used_well(wisdom: Wisdom, problem: ConvProblem, options: Options, within_s: float = A_HANG_S) -> None:
    """A plan that is right within the limit, or the documented error; and no hang."""
    begun = time.monotonic()
    with contextlib.suppress(NoPlanError):
        plan = Planner(wisdom).plan(problem, options)
        check_right(plan, problem, options.workspace)
        assert plan.label.isprintable()
    assert time.monotonic() - begun < within_s


@hypothesis.given(mutated(), st.sampled_from((None, 0, 2**14, LIMIT)))
@hypothesis.settings(
    max_examples=300 if EVERY else 60, suppress_health_check=list(hypothesis.HealthCheck), derandomize=not EVERY
)
def test_a_mutated_plan_is_right_or_refused(case: tuple[ConvProblem, dict[str, Any]], limit: int | None) -> None:
    problem, data = case
    with toys.one_thread():
        store = Wisdom()
        options = Options(workspace=limit, rigor="wisdom_only")
        planted(store, problem, replace(options, rigor="measure"), data)
        check_used_well(store, problem, options)
        store.forget()


@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=60 if EVERY else 2, suppress_health_check=list(hypothesis.HealthCheck), derandomize=not EVERY
)
def test_mutated_measurements_are_no_harm(data: st.DataObject) -> None:
    """All that wisdom knows of a problem and its parts is false: times, memory, errors, reasons, torch's own, rates."""
    problem = data.draw(st.sampled_from(PROBLEMS))
    numbers = st.sampled_from((0.0, 1e-300, 1e-9, 0.5, 1e9, 1e300))
    found = []
    for solver in solvers.all_solvers():
        for kind in (problem, *(replace(problem, batch=n) for n in (1, 2))):
            if solver.why_not(kind) or isinstance(solver, solvers.Split):
                continue
            for config, _ in list(solver.offers(kind, None))[:4]:
                lost = data.draw(st.sampled_from(("", "", "", "is unwanted")))
                error = data.draw(st.sampled_from((None, [0.0, 0.0], [1e300, 1e300])))
                values = (
                    solver.name, solver.version, config.key, data.draw(numbers),
                    data.draw(st.sampled_from((0, 1, 2**62))), *(error or (None, None)), lost, data.draw(numbers), 1.0,
                )  # fmt: skip
                told = (
                    data.draw(numbers),
                    data.draw(numbers),
                    data.draw(numbers),
                    3,
                    data.draw(st.sampled_from((None, 1.0))),
                )
                found.append(Row(environment("cpu").key, kind.key, (*values, *told)))
    store = Wisdom()
    Database(store.path).write(lambda db: tables.insert(db, "measurement", found))
    rates = {name: data.draw(st.sampled_from((1e-300, 1.0, 1e300))) for name in PROFILE}
    store.remember_profile(environment("cpu").key, rates)
    limit = data.draw(st.sampled_from((None, 2**14, LIMIT)))
    rigor = data.draw(st.sampled_from(("measure", "estimate", "wisdom_only") if EVERY else ("estimate",)))
    options = Options(workspace=limit, rigor=rigor, batch_sizes="powers_of_two")
    with toys.installed(without=[] if EVERY else COMPILED):
        check_used_well(store, problem, options, 5 * A_HANG_S)  # all is measured anew, on a machine that may be busy
        for plan in Planner(store).front(problem, options):
            check_right(plan, problem, limit)
    store.forget()


@pytest.mark.parametrize("error", [KeyError, OverflowError, MemoryError, RecursionError, torch.OutOfMemoryError])
@pytest.mark.parametrize("when", ["bound", "run"])
def test_whatever_is_raised_is_a_lost_candidate(wisdom: Wisdom, error: type[Exception], when: str) -> None:
    def fail(*_: Any) -> Any:
        raise error("so")

    raising = toys.toy(name="raising", **{"bind" if when == "bound" else "compute": fail})
    problem = toys.small(batch=2)
    with toys.installed(raising):
        planted(wisdom, problem, Options(), leaf(problem, "raising", Config()))
        with pytest.warns(WisdomWarning, match=f"raised {error.__name__}"):
            plan = Planner(wisdom).plan(problem, Options(rigor="estimate"))
        assert plan.solver != "raising"


def test_a_front_with_a_false_plan_is_found_anew(wisdom: Wisdom) -> None:
    problem, options = toys.small(batch=2), Options(rigor="estimate", workspace=LIMIT)
    false = leaf(problem, "fft", Config(basis=(24, 1)), workspace=1)
    for place in range(2):
        values = place_text(place, options), json.dumps(false.to_json()), 1.0
        row = Row(environment("cpu").key, problem.key, values)
        Database(wisdom.path).write(lambda db, row=row: tables.insert(db, "plan", [row]))  # type: ignore[misc]
    with pytest.warns(WisdomWarning, match="fft does not offer"):
        points = Planner(wisdom).front(problem, options)
    assert points
    for plan in points:
        check_right(plan, problem, LIMIT)


def test_numbers_of_another_type_are_another_config() -> None:
    problem = toys.small(batch=8)
    solver = solvers.get("fft")
    config = next(c for c, _ in solver.offers(problem, None) if "block" in c)
    for other in (float(config["block"]), True):  # type: ignore[arg-type]
        plan = leaf(problem, "fft", Config(**{**config, "block": other}))
        assert "does not offer" in why_unfit(plan, problem, Options())
    assert why_unfit(leaf(problem, "fft", config), problem, Options()) == ""


def test_what_is_too_large_is_refused_unread(wisdom: Wisdom) -> None:
    problem = replace(toys.small(), batch=20_000)
    child = leaf(replace(problem, batch=1), "aten", Config()).to_json()
    data = {**leaf(problem, "micro_batch", Config(sizes=(1,) * 20_000)).to_json(), "counts": [1] * 20_000}
    data["children"] = [child] * 20_000
    with pytest.raises(PlanFormatError, match="more than 4096"):
        Plan.from_json(data)
    planted(wisdom, problem, Options(), data)
    with pytest.warns(WisdomWarning, match=r"plan=.* characters, at most 4194304 would do"):
        assert wisdom.plan(environment("cpu").key, problem.key, plan_text(Options())) is None
    deep = {**child, "children": [child] * 3000, "counts": [1] * 3000}
    with pytest.raises(PlanFormatError, match="more than 4096"):
        Plan.from_json({**deep, "children": [deep, deep], "counts": [1, 1]})
    with pytest.raises(rows.RowError, match="characters"):
        rows.pack_plan(problem.key, "x" * 5000, leaf(problem, "aten", Config()), 1.0)
    kept = rows.pack_measurement(Measurement("aten", 1, Config(), reason="y" * 10**6), 1.0)
    assert len(kept[7]) == rows.LONGEST["reason"]


def nested(problem: ConvProblem, names: Sequence[str]) -> Plan:
    if not names:
        return leaf(problem, "lowering_type3", next(iter(solvers.get("lowering_type3").configs(problem))))
    split: Any = solvers.get(names[0])
    sizes = split.axis_of(problem), problem.extent(split.axis_of(problem))
    config = Config(sizes=(sizes[1] // 2, sizes[1] - sizes[1] // 2))
    parts: Iterable[Any] = split.children(problem, config)
    children = tuple(nested(part.problem, names[1:]) for part in parts)
    return Plan(problem.key, split.name, split.version, config, children, (1,) * len(children))


def test_splits_nest_as_a_search_nests_them() -> None:
    problem = toys.small(batch=4, channels=32, size=8)
    assert why_unfit(nested(problem, ["micro_batch", "space_tile"]), problem, Options()) == ""
    for names, why in (
        (["space_tile", "micro_batch"], "below a split of the same level"),
        (["micro_batch", "space_tile", "output_channels"], "below 2 other splits"),
    ):
        assert why in why_unfit(nested(problem, names), problem, Options())


def test_a_plan_of_very_many_parts_is_no_candidate() -> None:
    some = leaf(toys.small(), "aten", Config())
    assert replace(some, children=(some,) * 4096, counts=(1,) * 4096).is_kept
    assert not replace(some, children=(some,) * 4097, counts=(1,) * 4097).is_kept


@pytest.mark.parametrize("rigor", ["estimate", "patient"])
def test_results_that_read_nothing_can_be_kept(wisdom: Wisdom, rigor: str, tmp_path: Path) -> None:
    """With a stride above the kernel parts of an input's gradient are zero; an FFT leaves its rounding there."""
    problem = parse_layer("g2mb2ic2ih12oc4kh3sh4ph0", pass_=Pass.DGRAD)
    others = [s.name for s in solvers.all_solvers() if s.name not in ("aten", "fft", "micro_batch")]
    with toys.installed(without=others), toys.one_thread():
        options = Options(rigor=rigor)
        found = Planner(wisdom).front(problem, options)
        assert Planner(wisdom).front(problem, options) == found
        fft = next(c for c, _ in solvers.get("fft").offers(problem, None))
        checked, reason = Planner(wisdom).confirm(problem, leaf(problem, "fft", fft), options)
        assert reason == ""
        assert checked.error is not None
        assert 1.0 <= checked.error.spread < 2.0**20  # beside outliers of 2^20; far more where nothing is read
        assert Plan.from_json(json.loads(json.dumps(checked.to_json(), allow_nan=False))) == checked
        wisdom.remember(environment("cpu").key, problem.key, "", checked)
        assert wisdom.plan(environment("cpu").key, problem.key, "") == checked
        assert "beside an outlier" in Planner(wisdom).confirm(problem, checked, replace(options, strict=True))[1]
        assert math.isfinite(checked.error.l2)


def test_what_would_run_for_very_long_is_refused_unasked() -> None:
    problem = toys.small(batch=2**15)
    one = leaf(replace(problem, batch=1), "aten", Config())
    many = Plan(problem.key, "micro_batch", 1, Config(sizes=(1,) * 2**15), (one,), (2**15,))
    assert why_unfit(many, problem, Options()) == "its plan runs more than 16384 parts"
    short = Plan("x", "aten\x1b[2J", 1)
    assert "\x1b" not in why_unfit(replace(short, problem="\x1b[2J"), problem, Options())


@pytest.mark.parametrize(("amount", "spread"), [(0.0, 0.0), (1e-12, 1.0), (0.1, 1.0)])
def test_what_stands_where_nothing_is_read_counts(amount: float, spread: float) -> None:
    """Rounding there is told by the spread; more than rounding is over the limit of the L2 error as well."""
    problem = parse_layer("mb2ic2ih9oc3kh2sh3ph0", pass_=Pass.DGRAD)

    def compute(a: torch.Tensor, b: torch.Tensor, bias: object, out: torch.Tensor) -> torch.Tensor:
        out.copy_(problem.reference(a, b))
        out[:, :, 2, 2] += amount  # the stride is 3 and the kernel 2: nothing reaches this one
        return out

    found = errors_of(problem, compute)
    assert (found.spread > 1e-5) == bool(spread)
    assert found.spread == spread or not spread
    assert (found.l2 > 1e-5) == (amount == 0.1)
