"""Spatial tiles: parts that add up to the whole in every pass, plans under a limit, and images past 2^31 elements."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests import toys
from tests.planner.simulated import PROFILE, Clock, reasons, search, simulated, world
from tests.planner.test_limits import MIB, right, slack, taken
from tests.sampling import some
from torch import nn

import tilewise
from tilewise import Options, Planner, Schedule, execute, solvers
from tilewise.execute import bind
from tilewise.machine.device import device_name, environment
from tilewise.plan import Config, Plan
from tilewise.planner.schedules.follow import follow
from tilewise.problems.base import Write, dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_operand, make_result
from tilewise.solvers import Solver, Split
from tilewise.wisdom import Wisdom

found = solvers.get("space_tile")
assert isinstance(found, Split)
space_tile = found
LEAVES = (
    toys.toy(name="writer"),
    toys.toy(name="dense_adder", writes_views=False, accumulates=True, scratch=513),
    toys.toy(name="giver", own_output=True, scratch=64),
)
drawn = settings(max_examples=some(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield
    execute.release_workspaces()


@pytest.fixture(scope="module")
def wisdom(tmp_path_factory: pytest.TempPathFactory) -> Wisdom:
    return Wisdom(tmp_path_factory.mktemp("wisdom") / "wisdom.db")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tiled(problem: ConvProblem, size: int, leaf: str) -> Plan:
    """A plan by tiles of ``size``."""
    sizes = space_tile.cut(problem, size)
    plans = []
    for part in space_tile.children(problem, Config(sizes=sizes)):
        own = problem if part.problem is None else part.problem
        plans.append(toys.leaf(leaf, own))
    return Plan(problem.key, "space_tile", space_tile.version, Config(sizes=sizes), tuple(plans), (1,) * len(plans))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ConvProblem, int]:
    """A problem that can be cut and a size of its tiles, which may be smaller than the kernel and need not divide."""
    problem = draw(toys.problems(dtypes=("fp32", "bf16")).filter(lambda p: not space_tile.why_not(p)))
    return problem, draw(st.integers(1, problem.extent(space_tile.axis_of(problem))))


@drawn
@given(cases(), st.sampled_from([leaf.name for leaf in LEAVES]))
def test_tiles_give_the_whole(case: tuple[ConvProblem, int], leaf: str) -> None:
    """The leaf checks the alignment that it was promised of every tile."""
    problem, size = case
    with toys.installed(*LEAVES):
        a, b = toys.operands(problem)
        out = toys.poison(problem)
        bias = toys.bias_of(problem) if problem.bias else None
        bind(tiled(problem, size, leaf), problem, a, b, out)(a, b, bias, out)
    want = toys.reference(problem, a, b, 1.0, problem.bias)
    assert toys.distance(out, want) <= toys.DTYPE_ERROR[problem.out_dtype]


@drawn
@given(cases(), st.sampled_from((1, 2, 5)))
def test_tiles_inside_are_one_problem(case: tuple[ConvProblem, int], times: int) -> None:
    """Of a long axis: all but the rows that meet padding and what is left over, where tiles keep the stride's phase."""
    problem, _ = case
    long = replace(problem.axes[0], size=problem.axes[0].size + 60)
    problem = replace(problem, axes=(long, *problem.axes[1:]))
    size = problem.axes[0].stride * times
    parts = space_tile.children(problem, Config(sizes=space_tile.cut(problem, size)))
    kinds = Counter(part.problem for part in parts)
    child = space_tile.child(problem, size)
    assert kinds[child] >= max(kinds.values()) - 1
    before = before_of(problem)
    inside = [part.problem for n, part in starts(problem, size) if before <= n < before + (len(parts) // 3) * size]
    assert set(inside) <= {child}
    if problem.axes[0].stride == 1 and long.reach <= 20 and problem.layouts == ("contiguous",) * 3:
        assert child.axes[0].before == child.axes[0].after  # which torch and cuDNN ask for


def starts(problem: ConvProblem, size: int) -> list[tuple[int, object]]:
    sizes = space_tile.cut(problem, size)
    parts = space_tile.children(problem, Config(sizes=sizes))
    return list(zip(itertools.accumulate(sizes, initial=0), parts, strict=False))


def before_of(problem: ConvProblem) -> int:
    """By the definition: the first row that reads, or is read, as it would be without an end."""
    axis = problem.axes[0]
    if problem.pass_ is Pass.DGRAD:
        return max(0, axis.reach - 1 - axis.before)
    return max(0, -(-axis.before // axis.stride))


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_sizes_fall_and_keep_the_phase_of_the_stride(pass_: Pass, stride: int) -> None:
    axis = Axis(1000, 3, stride, before=1, after=1)
    problem = ConvProblem(pass_, 2, 4, 4, (axis, axis))
    sizes = list(space_tile.sizes(problem, "powers_of_two"))
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) >= 7
    assert max(sizes) < problem.extent("h")
    if pass_ is Pass.DGRAD:
        assert all(size % stride == 0 for size in sizes if size >= stride)
    assert list(space_tile.sizes(problem, "undivided")) == []


def test_a_single_row_is_not_divided() -> None:
    problem = ConvProblem(Pass.FPROP, 2, 4, 4, (Axis(3, 3), Axis(9, 3)))
    assert space_tile.why_not(problem) == ["one place along h cannot be divided"]


@pytest.mark.parametrize("pass_", Pass)
def test_only_the_filters_gradient_is_summed(pass_: Pass) -> None:
    problem = toys.small(pass_, dtype="bf16")
    parts = space_tile.children(problem, Config(sizes=space_tile.cut(problem, 2)))
    sums = pass_ is Pass.WGRAD
    assert {part.write for part in parts} == {Write.ADD if sums else Write.SET}
    assert {part.problem.out_dtype for part in parts if part.problem} == {"fp32" if sums else "bf16"}


def rowwise(clock: Clock, name: str = "rows", **traits: object) -> Solver:
    """Fast, in one KiB for each row of each image; a row that meets padding takes none."""
    return simulated(
        clock,
        name,
        lambda p, c: 0.01 + 0.1 * p.batch * p.axes[0].size,
        bytes=lambda p, c: 1024 * p.batch * p.axes[0].size,
        accumulates=True,
        **traits,  # type: ignore[arg-type]
    )


IMAGE = toys.small(batch=1, channels=2, size=40)


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("accumulate", [False, True])
def test_tiles_bring_a_fast_algorithm_under_the_limit(clock: Clock, pass_: Pass, accumulate: bool) -> None:
    problem = replace(IMAGE, pass_=pass_, accumulate=accumulate)
    with world(clock, rowwise(clock), space_tile):
        plan = search(problem, workspace=16 * 1024).best()
        assert plan.solver == "space_tile"
        assert plan.workspace <= 16 * 1024
        assert {leaf.solver for leaf in plan.leaves()} == {"rows"}
        assert plan.time_ms < 7.0  # the whole by torch takes 1000
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert "space_tile 40 = 1 + " in plan.tree()


def test_the_sum_of_16_bit_tiles_counts_as_workspace(clock: Clock) -> None:
    problem = replace(IMAGE, pass_=Pass.WGRAD, dtype="bf16", out_dtype="bf16")
    with world(clock, rowwise(clock), space_tile):
        plan = search(problem, workspace=16 * 1024).best()
        sums = execute.carved(4 * problem.shape("w")[0] * problem.shape("w")[1] * 9)
        assert plan.workspace == max(leaf.workspace for leaf in plan.leaves()) + sums
        assert search(problem, workspace=sums - 1).best().solver == "aten"


def test_tiles_of_an_image_of_a_micro_batch(clock: Clock) -> None:
    """Which is the best way here: what the solver takes grows with the square of the batch."""
    rows = simulated(
        clock,
        "rows",
        lambda p, c: 0.01 + 0.1 * p.batch * p.axes[0].size,
        bytes=lambda p, c: 1024 * p.batch**2 * p.axes[0].size,
        accumulates=True,
    )
    problem = toys.small(batch=3, channels=2, size=40)
    with world(clock, rows, space_tile):
        plan = search(problem, workspace=16 * 1024).best()
        assert (plan.solver, plan.children[-1].solver) == ("micro_batch", "space_tile")
        assert {leaf.solver for leaf in plan.leaves()} == {"rows"}
        assert plan.workspace <= 16 * 1024


def test_what_blocks_the_batch_itself_is_tried_on_tiles_of_all_images(clock: Clock) -> None:
    problem = toys.small(batch=3, channels=2, size=40)
    with world(clock, rowwise(clock, blocks_itself=True), space_tile):
        plan = search(problem, workspace=16 * 1024).best()
        assert plan.solver == "space_tile"
        assert {leaf.solver for leaf in plan.leaves()} == {"rows"}
    with world(clock, rowwise(clock), space_tile):
        other = search(problem, workspace=16 * 1024)
        assert other.best().solver == "micro_batch"
    assert reasons(other.log)["space_tile"] == "not tried: micro-batches come first, and then tiles of one image"


def test_a_solver_that_the_border_defies_is_replaced_there(clock: Clock) -> None:
    def unsupported(self: Solver, p: ConvProblem) -> list[str]:
        return [] if p.axes[0].before == p.axes[0].after else ["uneven padding"]

    slow = simulated(clock, "slow", lambda p, c: 5.0 * p.axes[0].size, bytes=lambda p, c: 256, accumulates=True)
    with world(clock, rowwise(clock, unsupported=unsupported), slow, space_tile):
        plan = search(IMAGE, workspace=16 * 1024).best()
    assert plan.solver == "space_tile"
    names = [child.solver for child in plan.children]
    assert (names[0], names[-1]) == ("slow", "slow")
    assert set(names[1:-1]) == {"rows"}


def test_a_wrong_tile_is_lost(clock: Clock) -> None:
    """One that computes the rows at the border alone is found when the whole is checked."""

    def compute(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return p.reference(a, b) * (1.0 if p.axes[0].before else 1.01)

    with world(clock, rowwise(clock, compute=compute), space_tile):
        chosen = search(IMAGE, workspace=16 * 1024)
        assert chosen.best().solver == "aten"
    assert any(m.solver == "space_tile" and "over the limit" in m.reason for m in chosen.log)


def test_why_there_are_no_tiles(clock: Clock) -> None:
    with world(clock, rowwise(clock)):
        search(IMAGE).best()
    whole = clock.runs.pop(("rows", 1))
    with world(clock, rowwise(clock), space_tile):
        free = search(IMAGE)
        free.best()
        assert clock.runs[("rows", 1)] == whole, "no tile was run"
    said = reasons(free.log)["space_tile"]
    assert said == "not tried: the workspace limit kept nothing out, and one image has less than 2^31 elements"
    slow = simulated(clock, "slow", lambda p, c: 2000.0, bytes=lambda p, c: 1 << 20)
    with world(clock, slow, space_tile):
        bounded = search(IMAGE, workspace=1024)
        bounded.best()
    said = reasons(bounded.log)["space_tile"]
    assert said == "not tried: nothing that the workspace limit kept out is estimated to be faster"
    with world(clock, rowwise(clock), space_tile):
        tight = search(IMAGE, workspace=100)
        tight.best()
    assert reasons(tight.log)["space_tile"].startswith("no division could be computed; parts of 1: ")
    assert "needs 3.0 KiB of workspace, the limit is 100 B" in reasons(tight.log)["space_tile"]


def test_wisdom_remembers_a_plan_of_tiles(clock: Clock, tmp_path: Path) -> None:
    options = Options(workspace=16 * 1024)
    planner = Planner(Wisdom(tmp_path / "wisdom.db"))
    planner.wisdom.remember_profile(environment("cpu").key, PROFILE)
    with world(clock, rowwise(clock), space_tile):
        made = planner.plan(IMAGE, options)
        before = clock.now_ms
        again = Planner(Wisdom(tmp_path / "wisdom.db"))
        assert again.plan(IMAGE, replace(options, rigor="wisdom_only")) == made
        assert clock.now_ms == before
        assert made.solver == "space_tile"


def test_a_schedule_of_tiles_is_followed(clock: Clock, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 40, 40)
    options = Options(workspace=16 * 1024)
    planner = Planner(Wisdom(tmp_path / "wisdom.db"))
    planner.wisdom.remember_profile(environment("cpu").key, PROFILE)

    class Tiling(Planner):
        """By hand: torch's time in a world that stands still would be none."""

        def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
            return tiled(problem, 10, "rows")

    with toys.installed(rowwise(clock)):
        layer = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))
        model = tilewise.optimize(layer, x.requires_grad_(), workspace=16 * 1024, planner=Tiling())
        tilewise.schedule(model).save(tmp_path / "schedule.json")
    with world(clock, rowwise(clock), space_tile):
        read = Schedule.load(tmp_path / "schedule.json")
        problems = list(read.kernels)
        assert len(problems) >= 2
        for problem in problems:
            followed = follow(read, problem, options, planner)
            assert followed.note == ""
            assert followed.plan is not None
            assert followed.plan.solver == "space_tile"
            wrong = replace(followed.plan, config=Config(sizes=(39, 2)))
            assert "which is not the whole" in _followed(read, problem, wrong, options, planner)
            assert "the problem's" in _followed(read, problem, wrong_part(followed.plan), options, planner)


def wrong_part(plan: Plan) -> Plan:
    """With the plan of a part at the border in the place of one inside."""
    first, second, *rest = plan.children
    return replace(plan, children=(second, first, *rest), counts=plan.counts)


def _followed(read: Schedule, problem: ConvProblem, plan: Plan, options: Options, planner: Planner) -> str:
    layers = []
    for result in read.layers:
        passes = (replace(p, plan=plan if p.problem == problem else p.plan) for p in result.passes)
        layers.append(replace(result, passes=tuple(passes)))
    return follow(replace(read, layers=tuple(layers)), problem, options, planner).note


@pytest.mark.slow
@pytest.mark.parametrize("pass_", Pass)
def test_a_limit_is_kept_where_no_leaf_keeps_it(wisdom: Wisdom, pass_: Pass) -> None:
    axis = Axis(200, 3, before=1, after=1)
    problem = ConvProblem(pass_, 1, 32, 32, (axis, axis))
    limit = 4 * MIB
    lowering = solvers.get("lowering_type1")
    assert min(n for _, n in lowering.offers(problem, limit)) > limit
    # Without torch's own: whether that keeps a limit depends on what memory the process holds from before.
    names = {"lowering_type1", "space_tile", "micro_batch"}
    with toys.installed(without=[s.name for s in solvers.all_solvers() if s.name not in names]):
        plan = Planner(wisdom).plan(problem, Options(workspace=limit))
        assert plan.solver == "space_tile"
        assert plan.workspace <= limit
        assert right(plan, problem) < 1e-5
        assert taken(plan, problem) <= limit + slack(problem)


def huge(pass_: Pass, **changes: object) -> ConvProblem:
    """One image of 2.15e9 elements."""
    axis = Axis(46400, 3, 1024, before=1, after=1)
    problem = ConvProblem(pass_, 1, 1, 2, (axis, axis), dtype="bf16", layouts=("contiguous",) * 3)
    return replace(problem, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_", Pass)
def test_past_2_31_elements_tiles_can_be_counted_in_32_bits(pass_: Pass) -> None:
    problem = huge(pass_, in_channels=2)
    assert space_tile.idle(problem) == ""
    assert space_tile.idle(replace(problem, axes=(replace(problem.axes[0], size=20000), problem.axes[1])))
    sizes = space_tile.sizes(problem, "powers_of_two")
    assert len(sizes) > 3
    for size in sizes[:3]:
        child = space_tile.child(problem, size)
        assert all(torch.Size(child.shape(role)).numel() < 2**31 for role in ROLES)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", Pass)
def test_tiles_lie_where_they_should_past_2_31_elements(pass_: Pass, layout: str) -> None:
    problem = huge(pass_, in_channels=2, layouts=(layout,) * 3)
    memory = {
        role: torch.empty_strided(
            problem.shape(role), dense_strides(problem.shape(role), layout), dtype=problem.torch_dtype(role),
            device="meta",
        )
        for role in ROLES
    }  # fmt: skip
    parts = space_tile.children(problem, Config(sizes=space_tile.cut(problem, 1024 if pass_ is Pass.DGRAD else 1)))
    last = [part for part in parts if part.problem is not None][-1]
    assert last.problem is not None
    x = memory["x"]
    for r in last.ranges("x"):
        x = x.narrow(r.dim, r.start, r.length)
    assert tuple(x.shape) == last.problem.shape("x")
    first = last.ranges("x")[0].start
    assert first > 44000
    assert x.storage_offset() == first * 46400 * (2 if layout == "channels_last" else 1)
    end = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    assert 2**31 < end < 2 * 46400**2


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])
def test_tiles_are_read_past_2_31_elements(pass_: Pass) -> None:
    """Memory that nobody wrote is zero and takes none; the data lies in single rows, some of them past 2^31."""
    problem = huge(pass_)
    x = torch.from_numpy(np.zeros(46400**2, np.int16)).view(torch.bfloat16).view(problem.shape("x"))
    generator = torch.Generator().manual_seed(0)
    rows = (0, 1023, 1024, 45055, 45056)
    for row in rows:
        x[0, 0, row].normal_(generator=generator)
    w, y = (torch.randn(problem.shape(role), generator=generator).bfloat16() for role in ("w", "y"))
    patches = torch.stack([_taps(x, i) for i in range(46)])  # (outputs along h, taps, outputs along w)
    if pass_ is Pass.FPROP:
        want = torch.einsum("itj,ot->oij", patches, w.double().flatten(1)).unsqueeze(0)
    else:
        want = torch.einsum("itj,oij->ot", patches, y[0].double()).view(problem.shape("w"))
    with toys.installed(*LEAVES):
        operands = (x, w) if pass_ is Pass.FPROP else (x, y)
        got = bind(tiled(problem, 1, "writer"), problem, *operands)(*operands)
    assert float(want[..., -1:].norm()) > 0
    assert toys.distance(got, want) < toys.DTYPE_ERROR["bf16"]


def _taps(x: torch.Tensor, i: int) -> torch.Tensor:
    """What output row ``i`` reads of ``huge``: (9, 46) in float64."""
    wanted = range(1024 * i - 1, 1024 * i + 2)
    lines = [x[0, 0, row].double() if row >= 0 else torch.zeros(46400).double() for row in wanted]
    padded = [torch.cat([line.new_zeros(1), line, line.new_zeros(1)]) for line in lines]
    return torch.stack([line[k : k + 45 * 1024 + 1 : 1024] for line in padded for k in range(3)])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", Pass)
def test_a_sample_past_2_31_elements_on_a_gpu(tmp_path: Path, pass_: Pass, layout: str) -> None:
    axis = Axis(5800, 3, before=1, after=1)
    problem = ConvProblem(
        pass_, 1, 64, 64, (axis, axis), dtype="bf16", layouts=(layout,) * 3, device=device_name("cuda")
    )
    limit = 1 << 30
    plan = Planner(Wisdom(tmp_path / "wisdom.db")).plan(problem, Options(workspace=limit))
    assert plan.workspace <= limit
    generator = torch.Generator("cuda").manual_seed(3)
    a, b = (make_operand(problem, role, generator, wide=False) for role in problem.operands)
    out = make_result(problem)
    bound = bind(plan, problem, a, b, out)
    bound(a, b, None, out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    bound(a, b, None, out)
    torch.cuda.synchronize()
    new = problem.nbytes(problem.result) if plan.solver == "aten" else 0
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= limit + new
    assert bool(out.isfinite().all())
    if pass_ is Pass.WGRAD:
        got, want = out[:1].double(), torch.zeros(1, 64, 3, 3, dtype=torch.float64, device="cuda")
        for start in range(0, 5800, 200):
            stripe = _rows(a, start, 200).double().transpose(0, 1)
            want += nn.functional.conv2d(stripe, b[:, :1, start : start + 200].double()).transpose(0, 1)
    else:
        got, want = _sampled(problem, a, b, out, (0, 2899, 5792))
    assert float((got - want).norm() / want.norm()) < toys.DTYPE_ERROR["bf16"]


def _rows(x: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """Rows of an image with one row and column more at every side, zero beyond its ends."""
    first, last = max(0, start - 1), min(x.shape[2], start + rows + 1)
    return nn.functional.pad(x[:, :, first:last], (1, 1, first - start + 1, start + rows + 1 - last))


def _sampled(
    problem: ConvProblem, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, places: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows at each of ``places``, and the same in float64. An input's gradient is the mirrored correlation."""
    weight = w.double()
    if problem.pass_ is Pass.DGRAD:
        weight = weight.flip(2, 3).transpose(0, 1)
    got = torch.cat([out[:, :, place : place + 8] for place in places], 2).double()
    want = torch.cat([nn.functional.conv2d(_rows(a, place, 8).double(), weight) for place in places], 2)
    return got, want
