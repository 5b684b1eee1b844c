"""What the planner chooses, from times and workspaces that are given: against every plan there is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests import toys
from tests.planner.every import every_division
from tests.planner.simulated import Clock, Simulated, reasons, search, simulated, torchs_own, world

from tilewise.plan import Config, Plan
from tilewise.planner.fronts import front
from tilewise.planner.options import NoPlanError
from tilewise.planner.search.known import Store
from tilewise.planner.search.trial import Trial
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Solver

Table = Mapping[int, Sequence[tuple[float, int]]]
"""By batch: (ms, bytes) of each config."""
few = settings(max_examples=10)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tabled(clock: Clock, table: Table) -> Solver:
    """A solver with one config for each column of ``table``."""
    columns = max(map(len, table.values()))
    return simulated(
        clock,
        "tabled",
        lambda p, c: table[p.batch][int(c["i"])][0],  # type: ignore[arg-type]
        bytes=lambda p, c: table[p.batch][int(c["i"])][1],
        choices=tuple(Config(i=i) for i in range(columns)),
        accumulates=True,
    )


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, Table]:
    batch, configs = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    point = st.tuples(st.integers(1, 40).map(float), st.integers(1, 9).map(lambda n: 256 * n))
    return batch, {n: [draw(point) for _ in range(configs)] for n in range(1, batch + 1)}


@few
@given(tables(), st.sampled_from(Pass), st.none() | st.integers(1, 9).map(lambda n: 256 * n))
@pytest.mark.parametrize("policy", ["undivided", "powers_of_two", "all"])
def test_a_patient_planner_finds_the_best_of_all(
    policy: str, drawn: tuple[int, Table], pass_: Pass, limit: int | None
) -> None:
    batch, table = drawn
    powers = [n for n in range(1, batch) if n & (n - 1) == 0]
    sizes = {"undivided": [], "powers_of_two": powers, "all": list(range(1, batch))}[policy]
    torchs = {n: [*points, (1000.0 * n, 0)] for n, points in table.items()}
    plans = every_division(batch, {n: torchs[n] for n in (*sizes, batch)}, limit)
    clock, problem = Clock(), toys.small(pass_, batch, channels=1, size=3)
    with world(clock, tabled(clock, table)):
        best = search(problem, rigor="patient", batch_sizes=policy, workspace=limit).best()
        points = search(problem, rigor="patient", batch_sizes=policy, workspace=limit).front()
    assert best.time_ms == pytest.approx(min(plans)[0])
    assert limit is None or best.workspace <= limit
    want = [plans[i] for i in front(plans)]
    assert [(plan.time_ms, plan.workspace) for plan in points] == [(pytest.approx(ms), ws) for ms, ws in want]
    for plan in points[:-1]:
        assert plan.error is not None
        assert plan.error.l2 < 1e-6


def mu_cudnn(clock: Clock) -> list[Solver]:
    """The paper's case: a fast algorithm whose workspace grows with the batch, a slow one that needs none."""
    return [
        simulated(clock, "fft", lambda p, c: 1.0 + p.batch, bytes=lambda p, c: 1024 * p.batch, accumulates=True),
        simulated(clock, "direct", lambda p, c: 8.0 * p.batch, accumulates=True),
    ]


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize(
    ("limit", "policy", "sizes", "ms"),
    [
        (None, "powers_of_two", None, 33.0),
        (32 * 1024, "powers_of_two", None, 33.0),
        (16 * 1024, "powers_of_two", (16, 16), 34.0),
        (11 * 1024, "powers_of_two", (8, 8, 8, 8), 36.0),
        (11 * 1024, "all", (8, 11, 11, 2), 36.0),
        (1024, "powers_of_two", (1,) * 32, 64.0),
        (1023, "powers_of_two", None, 256.0),
        (11 * 1024, "undivided", None, 256.0),
        (0, "all", None, 256.0),
    ],
)
def test_micro_batches_bring_a_fast_algorithm_under_the_limit(
    clock: Clock, pass_: Pass, limit: int | None, policy: str, sizes: tuple[int, ...] | None, ms: float
) -> None:
    problem = toys.small(pass_, 32, channels=1, size=3)
    with world(clock, *mu_cudnn(clock)):
        plan = search(problem, workspace=limit, batch_sizes=policy).best()
    if policy == "all" and sizes:
        assert plan.time_ms <= ms  # of several equally good divisions
    else:
        assert plan.time_ms == pytest.approx(ms)
        assert plan.config.get("sizes") == sizes
    assert limit is None or plan.workspace <= limit


@pytest.mark.parametrize(("batch", "sizes"), [(100, (64, 32, 4)), (37, (32, 4, 1)), (63, (32, 16, 8, 4, 2, 1))])
def test_what_large_parts_leave_is_planned_too(clock: Clock, batch: int, sizes: tuple[int, ...]) -> None:
    """Small parts are slow, and without them none of the large ones would do."""
    fast = simulated(clock, "fast", lambda p, c: 20.0 + p.batch, bytes=lambda p, c: 1024 * p.batch)
    slow = simulated(clock, "slow", lambda p, c: 40.0 * p.batch)
    with world(clock, fast, slow):
        plan = search(toys.small(batch=batch, channels=1, size=3), workspace=(batch - 1) * 1024).best()
        assert plan.config["sizes"] == sizes


def test_a_front_without_a_limit_goes_down_to_no_workspace(clock: Clock) -> None:
    """mu-cuDNN III-C1: the desirable set is what a network's budget is divided by, so all of it is looked for."""
    with world(clock, *mu_cudnn(clock)):
        points = search(toys.small(batch=32, channels=1, size=3)).front()
    assert [(plan.time_ms, plan.workspace) for plan in points] == [
        (pytest.approx(32.0 + 32 / n), 1024 * n) for n in (32, 16, 8, 4, 2, 1)
    ] + [(256.0, 0)]


def test_a_16_bit_sum_counts_as_workspace(clock: Clock) -> None:
    """Parts that fit beside no sum do not fit beside one: smaller ones are looked for."""
    problem = toys.small(Pass.WGRAD, 32, channels=8, dtype="bf16")
    sums = 8 * 8 * 9 * 4
    with world(clock, *mu_cudnn(clock)):
        for limit, part in ((16 * 1024 + sums, 16), (16 * 1024 + sums - 1, 8)):
            plan = search(problem, workspace=limit).best()
            assert plan.config["sizes"] == (part,) * (32 // part)
            assert plan.workspace == 1024 * part + sums
        plan = search(problem, workspace=sums).best()
        assert plan.solver == "direct"


def test_planning_is_short_where_parts_cannot_gain(clock: Clock) -> None:
    with world(clock, *mu_cudnn(clock)):
        search(toys.small(batch=32, channels=1, size=3)).best()
        assert {batch for name, batch in clock.runs if name == "fft"} <= {32, 16}
        assert {batch for name, batch in clock.runs if name == "direct"} <= {32}


def test_estimates_choose_without_measuring_what_loses(clock: Clock) -> None:
    with world(clock, *mu_cudnn(clock)):
        found = search(toys.small(batch=32, channels=1, size=3), rigor="estimate", workspace=11 * 1024)
        plan = found.best()
        assert plan.config["sizes"] == (8, 8, 8, 8)
        assert {batch for name, batch in clock.runs if name == "fft"} == {8}
        assert ("direct", 32) not in clock.runs
        assert reasons(found.log)["direct"] == "not run: estimated 256.000 ms"
        assert plan.time_ms == pytest.approx(36.0)


def test_torchs_choice_must_keep_the_limit(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 1.0, bytes=lambda p, c: 2048)
    other = simulated(clock, "other", lambda p, c: 50.0)
    with world(clock, own, other):
        found = search(toys.small(), workspace=1024, batch_sizes="undivided")
        assert found.best().solver == "other"
        assert reasons(found.log)["aten"] == "took 2.0 KiB of workspace when run, the limit is 1.0 KiB"
    with world(clock, own), pytest.raises(NoPlanError, match=r"aten : took 2\.0 KiB"):
        search(toys.small(), workspace=1024, batch_sizes="undivided").best()


def test_determinism_is_a_constraint(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 1.0, deterministic=False)
    loose = simulated(clock, "loose", lambda p, c: 0.5, deterministic=False)
    strict = simulated(clock, "strict", lambda p, c: 50.0)
    for rigor in ("estimate", "measure", "patient"):
        with world(clock, own, loose, strict):
            found = search(toys.small(), deterministic=True, batch_sizes="undivided", rigor=rigor)
            assert found.best().solver == "strict"
            assert reasons(found.log) == {
                "aten": "is not deterministic",
                "loose": "is not deterministic",
                "micro_batch": "batch_sizes=undivided",
            }
            assert search(toys.small(), batch_sizes="undivided", rigor=rigor).best().solver == "loose"


def off_by(share: float) -> object:
    """A value that is wrong by ``share`` everywhere."""
    return lambda p, a, b: p.reference(a, b) * (1 + share)


def spoilt_beside_outliers(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A small share of the largest value, everywhere: as an FFT spreads its rounding."""
    value = p.reference(a, b)
    return value + 1e-8 * value.abs().max()


def test_an_error_limit_is_a_constraint(clock: Clock) -> None:
    rough = simulated(clock, "rough", lambda p, c: 1.0, compute=off_by(5e-6))
    fine = simulated(clock, "fine", lambda p, c: 50.0)
    store = Store(lambda p: {})
    with world(clock, rough, fine):
        found = search(toys.small(), store, batch_sizes="undivided", error_limit=1e-6)
        assert found.best().solver == "fine"
        assert reasons(found.log)["rough"] == "error 5.0e-06 over the limit 1.0e-06"
        # What is remembered is the error, not that it was too much for one user.
        plan = search(toys.small(), store, batch_sizes="undivided").best()
        assert plan.solver == "rough"
        assert plan.error is not None
        assert plan.error.l2 == pytest.approx(5e-6, rel=0.1)
        again = search(toys.small(), store, batch_sizes="undivided", error_limit=1e-6)
        clock.runs.clear()
        assert again.best().solver == "fine"
        assert ("rough", 8) not in clock.runs


def test_an_error_limit_holds_for_torch_too(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 1.0, compute=off_by(1e-4))
    fine = simulated(clock, "fine", lambda p, c: 50.0)
    with world(clock, own, fine):
        found = search(toys.small(), batch_sizes="undivided", error_limit=1e-5)
        assert found.best().solver == "fine"
        assert reasons(found.log)["aten"] == "error 1.0e-04 over the limit 1.0e-05"
        assert search(toys.small(), batch_sizes="undivided").best().solver == "aten"  # nothing was asked for


def test_strict_bounds_what_an_outlier_spreads(clock: Clock) -> None:
    spread = simulated(clock, "spread", lambda p, c: 1.0, compute=spoilt_beside_outliers)
    fine = simulated(clock, "fine", lambda p, c: 50.0)
    with world(clock, spread, fine):
        plan = search(toys.small(), batch_sizes="undivided").best()
        assert plan.solver == "spread"
        assert plan.error is not None
        assert plan.error.spread > 10 * plan.error.l2
        found = search(toys.small(), batch_sizes="undivided", strict=True, error_limit=plan.error.spread / 2)
        assert found.best().solver == "fine"
        assert "beside an outlier over the limit" in reasons(found.log)["spread"]


def wrong_values() -> dict[str, object]:
    return {
        "zero": lambda p, a, b: torch.zeros(p.shape(p.result)),
        "nan": lambda p, a, b: torch.full(p.shape(p.result), math.nan),
        "one element": _one_element,
        "last image": _last_image,
    }


def _one_element(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    value = p.reference(a, b)
    value.view(-1)[-1] = math.inf
    return value


def _last_image(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    value = p.reference(a, b)
    value[-1] = 0.0
    return value


@pytest.mark.slow
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("name", wrong_values())
@pytest.mark.parametrize("limit", [None, 11 * 1024])
def test_a_wrong_solver_is_lost_at_every_size(clock: Clock, pass_: Pass, name: str, limit: int | None) -> None:
    """It is the fastest whole and in parts: the divisions of right solvers are found all the same."""
    wrong = simulated(clock, "wrong", lambda p, c: 0.1 * p.batch, compute=wrong_values()[name], accumulates=True)
    with world(clock, wrong, *mu_cudnn(clock)):
        found = search(toys.small(pass_, 32, channels=2, size=3), workspace=limit)
        plan = found.best()
        assert {leaf.solver for leaf in plan.leaves()} == {"fft"}
        assert plan.time_ms == pytest.approx(33.0 if limit is None else 36.0)
        assert "over the limit" in reasons(found.log)["wrong"]
        points = search(toys.small(pass_, 32, channels=2, size=3), workspace=limit).front()
        assert "wrong" not in {leaf.solver for point in points for leaf in point.leaves()}


def test_a_solver_that_is_wrong_in_parts_alone_loses_them(clock: Clock) -> None:
    def value(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return p.reference(a, b) * (2.0 if p.batch == 8 else 1.0)

    odd = simulated(clock, "odd", lambda p, c: 0.9 + p.batch, bytes=lambda p, c: 1024 * p.batch, compute=value)
    with world(clock, odd, *mu_cudnn(clock)):
        plan = search(toys.small(batch=32, channels=2, size=3), workspace=11 * 1024).best()
        assert {leaf.solver for leaf in plan.leaves()} == {"fft"}
        assert plan.config["sizes"] == (8, 8, 8, 8)


def raising(error: BaseException) -> object:
    def compute(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise error

    return compute


ERRORS = [
    RuntimeError("no kernel image"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    MemoryError(),
    AssertionError("never happens"),
    KeyError("engine"),
    ZeroDivisionError("division by zero"),
    OSError("library not found"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_solver_that_raises_is_lost_with_its_reason(clock: Clock, error: Exception) -> None:
    broken = simulated(clock, "broken", lambda p, c: 0.1, compute=raising(error))
    with world(clock, broken, *mu_cudnn(clock)):
        found = search(toys.small(batch=32, channels=1, size=3), workspace=11 * 1024)
        assert found.best().time_ms == pytest.approx(36.0)
        reason = reasons(found.log)["broken"]
    kind = "out of memory" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else type(error).__name__
    assert kind in reason
    assert str(error).splitlines()[:1] == [] or str(error).splitlines()[0] in reason


@pytest.mark.parametrize("method", ["unsupported", "configs", "workspace", "cost", "bind", "hidden_workspace"])
def test_a_solver_that_raises_in_any_method_is_lost(clock: Clock, method: str) -> None:
    def fail(self: Simulated, *args: object) -> None:
        raise LookupError(f"in {method}")

    kind: type[Solver] = type("Bad", (Simulated,), {"clock": clock, "name": "bad", method: fail})
    with world(clock, kind(), *mu_cudnn(clock)):
        for rigor in ("estimate", "measure"):
            found = search(toys.small(batch=32, channels=1, size=3), workspace=11 * 1024, rigor=rigor)
            assert found.best().time_ms == pytest.approx(36.0)
            if method != "bind" or rigor == "measure":
                assert f"in {method}" in reasons(found.log)["bad"]


def test_a_plan_that_fails_only_when_whole_is_lost(clock: Clock) -> None:
    """Its trial was fine; run beside torch, or checked, it raises."""
    for limit in (3, 4, 5, 6, 7):
        calls = [0]

        def compute(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, calls=calls, limit=limit) -> torch.Tensor:  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] > limit:
                raise torch.OutOfMemoryError("late")
            return p.reference(a, b)

        late = simulated(clock, "late", lambda p, c: 0.1, compute=compute)
        fine = simulated(clock, "fine", lambda p, c: 0.11)
        with world(clock, late, fine):
            found = search(toys.small(batch=1), batch_sizes="undivided")
            assert found.best().solver == "fine"
            assert "late" in reasons(found.log)["late"]


def test_the_reasons_of_all_are_told_when_none_is_left(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 1.0, bytes=lambda p, c: 1 << 20)
    solvers = [
        simulated(clock, "big", lambda p, c: 1.0, bytes=lambda p, c: 4096 * p.batch),
        simulated(clock, "broken", lambda p, c: 1.0, compute=raising(RuntimeError("no kernel"))),
        simulated(clock, "loose", lambda p, c: 1.0, deterministic=False),
        simulated(clock, "picky", lambda p, c: 1.0, dtypes=frozenset({"fp16"})),
        simulated(clock, "wrong", lambda p, c: 1.0, compute=off_by(0.5)),
    ]
    with world(clock, own, *solvers), pytest.raises(NoPlanError) as raised:
        search(toys.small(), workspace=1024, deterministic=True).best()
    lines = str(raised.value).splitlines()
    least = "undivided, the least that a solver needs is 32.0 KiB"
    assert lines[0] == f"no plan for {toys.small().key} under 1.0 KiB of workspace; {least}:"
    assert lines[1].startswith("  big : needs 32.0 KiB of workspace")  # the least comes first, the other reasons last
    assert lines[2].startswith("  aten : took 1.0 MiB of workspace")
    told = "\n".join(lines[1:])
    for text in (
        "aten : took 1.0 MiB of workspace",
        "big : needs 32.0 KiB of workspace",
        "broken : raised RuntimeError: no kernel",
        "loose : is not deterministic",
        "picky : takes fp16, not fp32",
        "wrong : error 5.0e-01 over the limit",
        "micro_batch : no division could be computed; parts of 1:",
        "big: needs 4.0 KiB of workspace",
    ):
        assert text in told
    assert len(lines) == len(set(lines))


def test_a_solver_that_takes_more_than_it_declares_is_held_to_the_limit(clock: Clock) -> None:
    greedy = simulated(clock, "greedy", lambda p, c: 0.1, bytes=lambda p, c: 16)
    fine = simulated(clock, "fine", lambda p, c: 5.0)
    from tilewise.planner.search import benchmark

    with world(clock, greedy, fine), pytest.MonkeyPatch.context() as patch:
        taken = {0.1: 5000}

        def peak(call: object, *_: object, **__: object) -> int:
            start = clock.now_ms
            call()  # type: ignore[operator]
            return taken.get(round(clock.now_ms - start, 3), 0)

        patch.setattr(benchmark, "peak_bytes", peak)
        found = search(toys.small(batch=1), workspace=4096)
        assert found.best().solver == "fine"
        assert reasons(found.log)["greedy"] == "took 4.9 KiB of workspace when run, the limit is 4.0 KiB"


def test_nothing_known_is_measured_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(lambda p: {})
    problem = toys.small(batch=32, channels=1, size=3)
    count = [0]
    monkeypatch.setattr(Trial, "measure", toys.counting(Trial.measure, count))
    with world(clock, *mu_cudnn(clock)):
        first = search(problem, store, workspace=11 * 1024).best()
        assert count[0] > 3
        count[0] = 0
        again = search(problem, store, workspace=11 * 1024).best()
    assert again.config == first.config
    assert count[0] == 0


def test_the_chosen_plan_prints_what_runs(clock: Clock) -> None:
    with world(clock, *mu_cudnn(clock)):
        plan = search(toys.small(batch=12, channels=1, size=3), workspace=8 * 1024).best()
    assert [line.split("  err")[0] for line in str(plan).splitlines()] == [
        "micro_batch 12 = 8 + 4  14.000 ms  8.0 KiB",
        "  fft @8                 9.000 ms  8.0 KiB",
        "  fft @4                 5.000 ms  4.0 KiB",
    ]


def test_a_problem_of_one_image_is_not_divided(clock: Clock) -> None:
    with world(clock, *mu_cudnn(clock)):
        found = search(toys.small(batch=1), workspace=1)
        assert found.best().solver == "direct"
        assert reasons(found.log)["micro_batch"] == "a batch of 1 cannot be divided"


def test_a_problem_that_torch_cannot_do_has_a_plan(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 1.0, unsupported=lambda self, p: ["no crops"])
    with world(clock, own, *mu_cudnn(clock)):
        found = search(toys.small(batch=4, channels=1, size=3))
        assert found.best().solver == "fft"
        assert reasons(found.log)["aten"] == "no crops"


def test_layouts_and_alignment_are_planned_for(clock: Clock) -> None:
    base = toys.small(batch=4, channels=4)
    with world(clock, *mu_cudnn(clock)):
        for problem in (
            replace(base, accumulate=True),
            replace(base, layouts=("channels_last", "contiguous", "channels_last")),
            replace(base, layouts=("view", "view", "view")),
            replace(base, alignment=(4, 8, 4)),
            replace(base, dtype="bf16", out_dtype="fp32"),
        ):
            plan = search(problem).best()
            assert plan.solver == "fft"
            assert isinstance(plan, Plan)
            assert plan.problem == problem.key
