"""Plans made and run for real: what they take, and that they give what they should."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import toys

from tilewise import execute, solvers
from tilewise.execute import bind
from tilewise.machine.allocations import most_alive, recorded
from tilewise.machine.device import device_name
from tilewise.machine.torch_state import fp32_precision
from tilewise.plan import Config, Plan, format_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.measuring.times import NOISE, peak_bytes
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import Run
from tilewise.wisdom import Wisdom

KIB, MIB = 2**10, 2**20


def slack(problem: ConvProblem) -> int:
    """Bytes by which calls differ: a freed block that leaves no room for the next stays resident beside it, or not."""
    return 2 * NOISE + max(problem.nbytes(role) for role in ROLES)


AXIS = Axis(20, 3, before=1, after=1)
LAYER = ConvProblem(Pass.FPROP, 12, 16, 24, (AXIS, AXIS))


@pytest.fixture(scope="module")
def wisdom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wisdom") / "wisdom.sqlite3"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield
    execute.release_workspaces()


def taken(plan: Plan, problem: ConvProblem) -> int:
    """Bytes at the peak of a call beyond operands and result, by our own count: workspaces are given back before."""
    a, b = make_operands(problem)
    out = make_result(problem)
    bound = bind(plan, problem, a, b, out)
    if a.is_cuda:
        bound(a, b, None, out)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        bound(a, b, None, out)
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)

    def call() -> torch.Tensor:
        execute.release_workspaces()
        return bound(a, b, None, out)

    # The heap settles in the first calls: glibc moves its threshold for fresh pages as large results are freed.
    return min(peak_bytes(call, a.device) for _ in range(6))


def planned(planner: Planner, problem: ConvProblem, options: Options) -> Plan | None:
    """A plan, or ``None`` when the reasons of all solvers say why there is none."""
    try:
        return planner.plan(problem, options)
    except NoPlanError as error:
        reasons = str(error)
    assert all(f"\n  {solver.name} " in reasons for solver in solvers.solving(problem)), reasons
    return None


def right(plan: Plan, problem: ConvProblem) -> float:
    a, b = make_operands(problem, seed=5)
    out = make_result(problem)
    with fp32_precision(problem.device_type, "conv", problem.precision):  # which torch's own choice heeds
        result = bind(plan, problem, a, b, out)(a, b, None, out)
    return toys.distance(result, problem.reference(a, b))


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize(
    ("limit", "policy"),
    [
        (None, "undivided"),
        (2 * MIB, "powers_of_two"),
        (700 * KIB, "undivided"),
        (700 * KIB, "all"),
        (300 * KIB, "powers_of_two"),
        (0, "powers_of_two"),
    ],
)
def test_a_limit_is_a_limit(wisdom: Path, pass_: Pass, limit: int | None, policy: str) -> None:
    problem = replace(LAYER, pass_=pass_)
    plan = planned(Planner(Wisdom(wisdom)), problem, Options(workspace=limit, batch_sizes=policy))
    if plan is None:
        assert limit is not None
        return
    assert right(plan, problem) < 1e-5
    if limit is not None:
        assert plan.workspace <= limit
        allowed = limit + problem.nbytes(problem.result) * (plan.solver == "aten")  # its result is a new tensor
        assert taken(plan, problem) <= allowed + slack(problem), format_bytes(limit)
    if policy == "undivided":
        assert "sizes" not in plan.config


class Hiding(toys.Plain):
    """Declares nothing, and takes what no allocator of torch's hands out and nobody writes."""

    name = "hiding"

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        run = super().bind(p, c, a, b, out)

        def hiding(*tensors: torch.Tensor | None) -> torch.Tensor:
            np.empty(256 * MIB, dtype=np.uint8)
            return run(*tensors)

        return hiding


@pytest.mark.slow
def test_what_a_solver_hides_counts(tmp_path: Path) -> None:
    toys.in_fresh_process(count_what_a_solver_hides, tmp_path / "wisdom.sqlite3")


def count_what_a_solver_hides(path: Path) -> None:
    own = solvers.baseline(ConvProblem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solvers, "all_solvers", lambda: (own, Hiding()))
        for pass_ in Pass:
            problem = toys.small(pass_, batch=2)
            with pytest.raises(NoPlanError) as raised:
                Planner(Wisdom(path)).plan(problem, Options(workspace=64 * MIB, exclude=("aten",)))
            told = re.search(
                r"hiding.*took ([0-9.]+) MiB of workspace when run, the limit is 64.0 MiB", str(raised.value)
            )
            assert told is not None, raised.value
            assert float(told[1]) > 255
            front = Planner(Wisdom(path)).front(problem, Options(exclude=("aten",)))
            (hidden,) = (plan for plan in front if plan.solver == "hiding")
            assert hidden.workspace > 255 * MIB


GROUPED = ConvProblem(Pass.DGRAD, 6, 16, 8, (Axis(22, 4), Axis(22, 4)), 2)
"""torch takes 84 KB in every call."""


@pytest.mark.parametrize("problem", [GROUPED, LAYER, replace(LAYER, pass_=Pass.WGRAD)], ids=str)
@pytest.mark.parametrize("limit", [0, 16 * KIB, 100_000, NOISE - 1])
def test_under_a_small_limit_only_what_can_be_counted_runs(problem: ConvProblem, limit: int, tmp_path: Path) -> None:
    plan = planned(Planner(Wisdom(tmp_path / "wisdom.sqlite3")), problem, Options(workspace=limit, rigor="measure"))
    with pytest.raises(NoPlanError, match=r"aten : .*took .* of workspace when run.*, the limit is"):
        Planner(Wisdom(tmp_path / "wisdom.sqlite3")).plan(problem, Options(workspace=limit, exclude=tuple(EXACT)))
    if plan is None:
        return
    assert {leaf.solver for leaf in plan.leaves()} <= EXACT
    a, b = make_operands(problem)
    out = make_result(problem)
    bound = bind(plan, problem, a, b, out)
    assert bound.workspace <= limit
    bound(a, b, None, out)
    assert most_alive(recorded(lambda: bound(a, b, None, out))) <= limit - bound.workspace


def test_what_may_not_show_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoPlanError, match=r"128.0 KiB of it for what may not show, the limit is 100.0 KiB"):
        Planner(Wisdom(tmp_path / "wisdom.sqlite3")).plan(GROUPED, Options(workspace=100 * KIB, exclude=tuple(EXACT)))


EXACT = {solver.name for solver in solvers.all_solvers() if solver.exact_memory}


@pytest.mark.parametrize("pass_", Pass)
def test_every_point_of_a_front_takes_no_more_than_it_says(wisdom: Path, pass_: Pass) -> None:
    problem = replace(LAYER, pass_=pass_)
    points = Planner(Wisdom(wisdom)).front(problem)
    assert points
    for plan in points:
        assert right(plan, problem) < 1e-5
        assert taken(plan, problem) <= plan.workspace + problem.nbytes(problem.result) + slack(problem)


@pytest.mark.parametrize("pass_", Pass)
def test_a_deterministic_plan_gives_the_same_bits(wisdom: Path, pass_: Pass) -> None:
    problem = replace(LAYER, pass_=pass_)
    plan = Planner(Wisdom(wisdom)).plan(problem, Options(workspace=MIB, deterministic=True))
    a, b = make_operands(problem)
    bound = bind(plan, problem, a, b)
    first = bound(a, b).clone()
    assert all(torch.equal(bound(a, b), first) for _ in range(5))


@pytest.mark.parametrize(
    "problem",
    [
        replace(LAYER, pass_=Pass.WGRAD, dtype="bf16", out_dtype="bf16"),
        replace(LAYER, dtype="fp16", out_dtype="fp16"),
        replace(LAYER, bias=True),
        replace(LAYER, accumulate=True),
        replace(LAYER, groups=4, pass_=Pass.DGRAD),
        replace(LAYER, layouts=("channels_last",) * 3, pass_=Pass.WGRAD),
        replace(LAYER, layouts=("view",) * 3),
        replace(LAYER, axes=(Axis(64, 5, 2, 1, 2, 2),)),
        replace(LAYER, axes=(Axis(6, 3, 1, 1, 1, 1),) * 3),
        replace(LAYER, axes=(Axis(20, 3, 2, 2, 3, 0), AXIS)),
    ],
    ids=lambda p: p.key,
)
def test_problems_of_every_kind_have_a_right_plan(wisdom: Path, problem: ConvProblem) -> None:
    plan = Planner(Wisdom(wisdom)).plan(problem, Options(rigor="estimate"))
    a, b = make_operands(problem, seed=5)
    out = toys.poison(problem)
    bias = toys.bias_of(problem) if problem.bias else None
    result = bind(plan, problem, a, b, out)(a, b, bias, out)
    assert toys.distance(result, toys.reference(problem, a, b, 1.0, problem.bias)) < toys.DTYPE_ERROR[problem.dtype] * 5


def test_no_limit_is_planned_where_memory_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.planner.measuring import times as measure

    def unknown() -> None:
        raise RuntimeError("/proc/self/clear_refs cannot be written")

    monkeypatch.setattr(measure, "reset_peak", unknown)
    problem = toys.small()
    assert Planner().plan(problem).time_ms > 0
    with pytest.raises(RuntimeError, match="workspace=None would do"):
        Planner().plan(problem, Options(workspace=MIB))


@pytest.fixture
def cuda(wisdom: Path) -> Callable[..., tuple[ConvProblem, Planner]]:
    def made(**changes: object) -> tuple[ConvProblem, Planner]:
        axis = Axis(28, 5, before=2, after=2)
        problem = ConvProblem(Pass.FPROP, 64, 64, 96, (axis, axis), device=device_name("cuda"))
        return replace(problem, **changes), Planner(Wisdom(wisdom))  # type: ignore[arg-type]

    return made


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("limit", [None, 32 * MIB, 4 * MIB, 0])
def test_a_limit_is_a_limit_on_a_gpu(
    cuda: Callable[..., tuple[ConvProblem, Planner]], pass_: Pass, limit: int | None
) -> None:
    problem, planner = cuda(pass_=pass_)
    plan = planned(planner, problem, Options(workspace=limit, error_limit=1e-5))  # torch's own choice may err by more
    if plan is None:
        assert limit == 0
        return
    assert right(plan, problem) < 1e-5
    if limit is not None and plan.solver != "aten":
        assert plan.workspace <= limit
        assert taken(plan, problem) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("general", ["none", "ieee", "tf32"])
def test_full_precision_is_full_whatever_the_flags(
    cuda: Callable[..., tuple[ConvProblem, Planner]], precision: str, general: str
) -> None:
    problem, planner = cuda(precision=precision)
    saved = torch._C._get_fp32_precision_getter("generic", "all")
    torch._C._set_fp32_precision_setter("generic", "all", general)
    try:
        plan = planner.plan(problem, Options(batch_sizes="undivided", strict=general == "ieee"))
        error = plan.error.l2 if plan.error is not None else 0.0
        assert error < (1e-5 if precision == "ieee" else 2e-3)
    finally:
        torch._C._set_fp32_precision_setter("generic", "all", saved)


@pytest.mark.gpu
def test_nothing_is_planned_in_a_capture(cuda: Callable[..., tuple[ConvProblem, Planner]]) -> None:
    problem, planner = cuda()
    unknown = replace(problem, batch=63)
    known = planner.plan(problem)
    a, b = make_operands(problem)
    bound = bind(known, problem, a, b)
    want = bound(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captured"):
            planner.plan(unknown)
        with pytest.raises(RuntimeError, match="captured"):
            planner.front(problem)
        assert planner.plan(problem) == known  # wisdom may be asked
        got = bound(a, b)
    got.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_plans_run_on_streams_and_devices_of_their_tensors(cuda: Callable[..., tuple[ConvProblem, Planner]]) -> None:
    problem, planner = cuda(pass_=Pass.WGRAD)
    plan = planner.plan(problem, Options(workspace=8 * MIB))
    a, b = make_operands(problem)
    bound = bind(plan, problem, a, b)
    want = bound(a, b)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results += [bound(a, b) for _ in range(5)]
    torch.cuda.synchronize()
    for result in results:
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-3)
