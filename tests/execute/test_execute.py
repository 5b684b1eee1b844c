"""Plan trees against float64: cuts of every kind, nested, over toy leaves that can do more or less by themselves."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests import toys

from tilewise import execute
from tilewise.execute import PlanMismatch, adds_bias, bind
from tilewise.execute import bound as binding
from tilewise.plan import Config, Plan
from tilewise.planner.measuring.times import peak_bytes
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass


class BiasedByAddress(toys.Addressed):
    """Adds a bias over addresses."""

    name = "biased_by_address"
    adds_bias = True


LEAVES = (
    toys.toy(name="writer"),
    toys.Addressed(),
    toys.toy(name="adder", accumulates=True, scratch=100),
    toys.toy(name="dense", writes_views=False),
    toys.toy(name="dense_adder", writes_views=False, accumulates=True, scratch=513),
    toys.toy(name="giver", own_output=True, scratch=64),
    toys.toy(name="biased", adds_bias=True, accumulates=True, scratch=64),
    toys.toy(name="biased_giver", adds_bias=True, own_output=True),
    BiasedByAddress(),
)
NAMES = tuple(solver.name for solver in LEAVES)
some = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(autouse=True, scope="module")
def _toys() -> Iterator[None]:
    with toys.installed(toys.Cut(), *LEAVES), toys.one_thread():
        yield


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    execute.release_workspaces()


def exact_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out exactly the bytes asked for, between guards that are checked when the next is taken."""
    kept: list[tuple[torch.Tensor, int, int]] = []

    def take(size: int, device: torch.device) -> torch.Tensor:
        for base, start, stop in kept:
            assert bool((base[:start] == 0x5A).all())
            assert bool((base[stop:] == 0x5A).all())
        base = torch.full((size + 1024,), 0x5A, dtype=torch.uint8)
        start = 256 - base.data_ptr() % 256
        kept[:] = [(base, start, start + size)]
        return base[start : start + size].fill_(0xFF)

    monkeypatch.setattr(binding._workspaces, "take", take)


@pytest.fixture(scope="module", autouse=True)
def _exact() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        exact_workspace(patch)
        yield
        binding._workspaces.take(0, torch.device("cpu"))  # the last one's guards


@st.composite
def trees(draw: st.DrawFn, problem: ConvProblem, cuts: int = 2) -> Plan:
    """A plan for ``problem``: a leaf, or cut along any axis with a plan for each part."""
    if not cuts or draw(st.integers(0, 3)) == 0:
        return toys.leaf(draw(st.sampled_from(NAMES)), problem)
    axis = draw(st.sampled_from(("batch", "groups", "in_channels", "out_channels", *problem.space)))
    if axis.endswith("channels") and problem.groups > 1:
        axis = "groups"  # cuts inside one group have their own test
    scatter = axis in problem.space and problem.pass_ is Pass.DGRAD and draw(st.booleans())
    sizes = draw(toys.cuts(problem.extent(axis, scatter=scatter)))
    parts = problem.split(axis, sizes, scatter=scatter)
    plans = [
        toys.leaf("writer", problem) if part.problem is None else draw(trees(part.problem, cuts - 1)) for part in parts
    ]
    config = Config(axis=axis, sizes=sizes, scatter=scatter)
    return Plan(problem.key, "cut", 1, config, tuple(plans), (1,) * len(plans))


def check(problem: ConvProblem, plan: Plan) -> None:
    """Run ``plan`` into a poisoned result and into one of its own, and compare both with float64."""
    a, b = toys.operands(problem)
    out = toys.poison(problem)
    surroundings = out.untyped_storage()
    bias = toys.bias_of(problem) if problem.bias else None
    want = toys.reference(problem, a, b, 1.0, problem.bias)
    limit = toys.DTYPE_ERROR[problem.out_dtype]
    bound = bind(plan, problem, a, b, out)
    assert bound(a, b, bias, out) is out
    assert toys.distance(out, want) <= limit
    if problem.layout(problem.result) == "view":
        flat = torch.empty(0, dtype=out.dtype).set_(surroundings)  # type: ignore[call-overload]
        assert int((flat == 7.0).sum()) >= 3 * math.prod(out.shape[:-1])
    if not problem.accumulate:
        new = bind(plan, problem, a, b)(a, b, bias)
        assert new.shape == out.shape
        assert new.dtype is out.dtype
        assert toys.distance(new, want) <= limit
        assert toys.distance(bound(a, b, bias), want) <= limit


@some
@given(st.data())
def test_any_tree_gives_the_reference(data: st.DataObject) -> None:
    problem = data.draw(toys.problems())
    check(problem, data.draw(trees(problem)))


def biased(accumulate: bool = False, **changes: Any) -> ConvProblem:
    return replace(toys.small(batch=4), bias=True, accumulate=accumulate, **changes)


def divided(problem: ConvProblem, axis: str, sizes: tuple[int, ...], names: Sequence[str]) -> Plan:
    parts = problem.split(axis, sizes)
    leaves = tuple(toys.leaf(name, part.problem) for name, part in zip(names, parts, strict=True) if part.problem)
    return Plan(problem.key, "cut", 1, Config(axis=axis, sizes=sizes), leaves, (1,) * len(leaves))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("axis", "names", "adds"),
    [
        ("batch", ("biased", "biased_giver"), True),
        ("h", ("biased_by_address", "biased_by_address"), True),
        ("batch", ("biased", "writer"), False),
        ("out_channels", ("biased", "biased"), False),
        ("in_channels", ("biased", "biased"), False),
    ],
)
def test_a_bias_is_added_once_where_results_are_written(
    axis: str, names: Sequence[str], adds: bool, accumulate: bool
) -> None:
    """By the leaves where each writes results that no other does, with all channels; else after all of them."""
    problem = biased(accumulate)
    extent = problem.extent(axis)
    plan = divided(problem, axis, (extent - 1, 1), names)
    assert adds_bias(plan, problem) == adds
    check(problem, plan)


@pytest.mark.parametrize("name", ["writer", "biased", "biased_by_address", "biased_giver"])
def test_a_bias_in_any_form(name: str) -> None:
    """Strided, of another type, or none."""
    problem = biased(dtype="bf16", out_dtype="bf16")
    a, b = toys.operands(problem)
    bound = bind(toys.leaf(name, problem), problem, a, b)
    bias = toys.bias_of(problem)
    want = toys.reference(problem, a, b, 1.0, True)
    for given_bias in (bias, bias.double().repeat_interleave(2)[::2]):
        assert toys.distance(bound(a, b, given_bias), want) <= toys.DTYPE_ERROR["bf16"]
    assert toys.distance(bound(a, b), toys.reference(problem, a, b, 1.0)) <= toys.DTYPE_ERROR["bf16"]


def test_a_bias_of_another_length_is_refused() -> None:
    problem = biased()
    a, b = toys.operands(problem)
    bound = bind(toys.leaf("biased", problem), problem, a, b)
    with pytest.raises(ValueError, match=r"bias of \(1,\) on cpu"):
        bound(a, b, torch.ones(1))


@some
@given(st.data())
def test_sums_of_16_bit_parts_lose_nothing(data: st.DataObject) -> None:
    """A tree's result is as near to float64 as one rounding: sums over parts are kept in fp32."""
    problem = data.draw(toys.problems(dtypes=("bf16", "fp16")))
    check(problem, data.draw(trees(problem)))


def test_256_micro_batches_in_bf16() -> None:
    axis = Axis(5, 3, before=1, after=1)
    problem = ConvProblem(Pass.WGRAD, 256, 2, 3, (axis,), dtype="bf16")
    a, b = (t.abs() for t in toys.operands(problem))  # all of one sign: bf16 sums would stop growing
    part = problem.split("batch", (1,) * 256)[1].problem
    assert part is not None
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(1,) * 256), (toys.leaf("writer", part),), (256,))
    out = toys.poison(problem)
    bind(plan, problem, a, b, out)(a, b, None, out)
    assert toys.distance(out, problem.reference(a, b)) < 4e-3


@some
@given(st.data())
def test_channels_are_cut_inside_one_group(data: st.DataObject) -> None:
    problem = data.draw(toys.problems())
    axis = data.draw(st.sampled_from(("in_channels", "out_channels")))
    unit = problem.extent(axis) // problem.groups
    sizes = [size for _ in range(problem.groups) for size in data.draw(toys.cuts(unit))]
    plans = []
    for part in problem.split(axis, sizes):
        assert part.problem is not None
        plans.append(toys.leaf(data.draw(st.sampled_from(NAMES)), part.problem))
    config = Config(axis=axis, sizes=tuple(sizes))
    check(problem, Plan(problem.key, "cut", 1, config, tuple(plans), (1,) * len(plans)))


@some
@given(st.data())
def test_micro_batches_of_uneven_sizes(data: st.DataObject) -> None:
    problem = data.draw(toys.problems(batch=(2, 7), dtypes=("fp32", "bf16")))
    sizes = data.draw(toys.cuts(problem.batch).filter(lambda sizes: len(sizes) > 1))
    parts = [part.problem for part in problem.split("batch", sizes)]
    plans = [toys.leaf(data.draw(st.sampled_from(NAMES)), part) for part in parts if part is not None]
    check(problem, Plan(problem.key, "micro_batch", 1, Config(sizes=sizes), tuple(plans), (1,) * len(plans)))


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_without_data_leave_zeros(pass_: Pass, accumulate: bool, first: bool, name: str) -> None:
    """Padding wider than the kernel: some outputs read padding alone, some inputs are read by none."""
    edge = (5, 0) if first else (0, 5)
    axis = Axis(6, 2, 4, 1, *edge) if pass_ is Pass.DGRAD else Axis(4, 2, 1, 1, *edge)
    problem = ConvProblem(pass_, 2, 2, 3, (axis,), accumulate=accumulate)
    sizes = (1,) * problem.extent("w")
    parts = problem.split("w", sizes)
    assert any(part.problem is None for part in parts)
    plans = tuple(toys.leaf(name, part.problem or problem) for part in parts)
    check(problem, Plan(problem.key, "cut", 1, Config(axis="w", sizes=sizes), plans, (1,) * len(plans)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_problem_of_padding_alone(accumulate: bool) -> None:
    problem = ConvProblem(Pass.FPROP, 2, 2, 3, (Axis(1, 1, 4, 1, 3, 4),), accumulate=accumulate)
    parts = problem.split("w", (1, 1))
    assert [part.problem for part in parts] == [None, None]
    plans = (toys.leaf("writer", problem),)
    check(problem, Plan(problem.key, "cut", 1, Config(axis="w", sizes=(1, 1)), plans, (2,)))


@pytest.mark.parametrize("pass_", Pass)
def test_aten_gives_the_type_asked_for(pass_: Pass) -> None:
    """Its result has the operands' type, also where a sum of parts wants fp32."""
    problem = toys.small(pass_, batch=3, dtype="bf16", out_dtype="fp32")
    a, b = toys.operands(problem)
    result = bind(toys.leaf("aten", problem), problem, a, b)(a, b)
    assert result.dtype is torch.float32
    assert toys.distance(result, problem.reference(a, b)) < toys.DTYPE_ERROR["bf16"]


@pytest.mark.parametrize("pass_", Pass)
def test_threads_share_a_bound_plan(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_workspaces", binding.Workspaces())
    problem = toys.small(pass_, batch=6)
    a, b = toys.operands(problem)
    part = problem.split("batch", (3, 3))[0].problem
    assert part is not None
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(3, 3)), (toys.leaf("dense_adder", part),), (2,))
    bound = bind(plan, problem, a, b)
    inputs = [(a * n, b) for n in range(1, 5)]
    wants = [problem.reference(x, y) for x, y in inputs]
    wrong: list[float] = []
    barrier = threading.Barrier(len(inputs))

    def work(x: torch.Tensor, y: torch.Tensor, want: torch.Tensor) -> None:
        barrier.wait()
        wrong.extend(error for _ in range(20) if (error := toys.distance(bound(x, y), want)) > 2e-6)

    threads = [threading.Thread(target=work, args=(*pair, want)) for pair, want in zip(inputs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_workspaces_are_aligned_kept_and_given_back() -> None:
    workspaces = binding.Workspaces()
    cpu = torch.device("cpu")
    for size in (1, 1000, 12345, 7):
        taken = workspaces.take(size, cpu)
        assert taken.numel() >= size
        assert taken.data_ptr() % 256 == 0
    assert workspaces.take(12345, cpu) is workspaces.take(5, cpu)
    workspaces.release()
    assert workspaces.buffer.numel() == 0


def test_touched_workspaces_are_resident() -> None:
    workspaces, cpu, mib = binding.Workspaces(), torch.device("cpu"), 2**20

    def use() -> None:
        workspaces.take(40 * mib, cpu)[: 40 * mib].fill_(1)

    workspaces.touch(10 * mib)
    assert peak_bytes(lambda: workspaces.touch(40 * mib), cpu) > 29 * mib
    assert peak_bytes(use, cpu) < mib
    workspaces.release()
    assert peak_bytes(use, cpu) > 39 * mib


@pytest.mark.parametrize("name", ["adder", "dense_adder", "giver"])
def test_a_plan_runs_in_and_out_of_inference_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_workspaces", binding.Workspaces())
    problem = toys.small(Pass.WGRAD, dtype="bf16")
    a, b = toys.operands(problem)
    part = problem.split("batch", (4, 4))[0].problem
    assert part is not None
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(4, 4)), (toys.leaf(name, part),), (2,))
    bound = bind(plan, problem, a, b)
    with torch.inference_mode():
        first = bound(a, b)
    assert torch.equal(bound(a, b), first)


def test_workspace_is_the_largest_part_and_the_sums() -> None:
    problem = toys.small(Pass.WGRAD, batch=8, dtype="bf16")
    a, b = toys.operands(problem)
    part = problem.split("batch", (4, 4))[0].problem
    assert part is not None
    sums = -(-problem.nbytes("w") * 2 // 256) * 256
    for name, temporary, scratch in (("adder", 0, 100), ("writer", sums, 0), ("dense_adder", 0, 513)):
        plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(4, 4)), (toys.leaf(name, part),), (2,))
        assert bind(plan, problem, a, b).workspace == sums + temporary + scratch


def test_a_new_result_has_the_problems_layout() -> None:
    for layout in ("contiguous", "channels_last"):
        problem = toys.small(layouts=("contiguous", "contiguous", layout))
        a, b = toys.operands(problem)
        result = bind(toys.leaf("writer", problem), problem, a, b)(a, b)
        assert result.stride() == dense_strides(result.shape, layout)


def plan_of_halves(problem: ConvProblem) -> Plan:
    half = problem.batch // 2
    part = problem.split("batch", (half, half))[0].problem
    assert part is not None
    return Plan(problem.key, "micro_batch", 1, Config(sizes=(half, half)), (toys.leaf("adder", part),), (2,))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"problem": "conv of something else"}, "the plan is for conv of something else"),
        ({"solver": "nobody"}, "no solver named 'nobody'"),
        ({"version": 99}, "version 99, here is 1: plan again"),
        ({"config": Config(sizes=(4, 3))}, "does not cut"),
        ({"config": Config(sizes=(8, 0))}, "does not cut"),
        ({"config": Config()}, "does not cut"),
        ({"config": Config(sizes="4+4")}, "does not cut"),
        ({"counts": (3,)}, "cuts 2 parts, the plan has 3"),
        ({"counts": (10**15,)}, "cuts 2 parts, the plan has 1000000000000000"),
        ({"counts": (1, 1)}, "cuts 2 parts"),
        ({"children": (), "counts": ()}, "cuts 2 parts, the plan has 0"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, object], says: str) -> None:
    problem = toys.small()
    plan = replace(plan_of_halves(problem), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanMismatch, match=says):
        bind(plan, problem, *toys.operands(problem))


def test_a_solver_that_cannot_is_refused_with_its_reasons() -> None:
    problem = replace(toys.small(), axes=(Axis(8, 3, before=2),) * 2)
    with pytest.raises(PlanMismatch, match=r"aten cannot solve .*: ATen takes one non-negative padding"):
        bind(toys.leaf("aten", problem), problem, *toys.operands(problem))


def test_tensors_of_another_problem_are_refused() -> None:
    problem = toys.small()
    plan, (a, b), out = plan_of_halves(problem), toys.operands(problem), toys.poison(problem)
    with pytest.raises(PlanMismatch, match="x has shape"):
        bind(plan, problem, a[1:], b)
    with pytest.raises(PlanMismatch, match=r"w is torch\.float64"):
        bind(plan, problem, a, b.double())
    with pytest.raises(PlanMismatch, match="y has shape"):
        bind(plan, problem, a, b, out[:, 1:])
    with pytest.raises(PlanMismatch, match=r"y is torch\.bfloat16"):
        bind(plan, problem, a, b, out.bfloat16())
    with pytest.raises(PlanMismatch, match="x is on meta"):
        bind(plan, problem, a.to("meta"), b)
