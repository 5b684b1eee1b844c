"""What a check's operands hold: every kind of values in what is compared, whatever the problem, and what each shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from tests import toys
from tests.planner.test_verify import right
from tests.sampling import some

from tilewise import execute, solvers
from tilewise.plan import Config, Error, Plan
from tilewise.planner.measuring.seams import seams_of
from tilewise.planner.measuring.verify import LIMIT
from tilewise.problems.conv import samples
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.checks import Compute, errors_of
from tilewise.problems.conv.mixtures import (
    BALANCED,
    CONSTANT,
    KINDS,
    NEEDED,
    NORMAL,
    OUTLIERS,
    SLOW,
    apply,
    end_ranks,
    mixture,
    pairs_of,
)
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import LOWERED, make_operands


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield


Values = tuple[torch.Tensor, torch.Tensor]
LARGE = ConvProblem(Pass.FPROP, 6, 8, 12, (Axis(14, 3, 1, 1, 1, 1), Axis(9, 3, 1, 1, 1, 1)))
PROBLEMS = [
    LARGE,
    replace(LARGE, batch=1),
    replace(LARGE, batch=2, in_channels=1, out_channels=1),
    replace(LARGE, in_channels=16, out_channels=16, groups=16),
    replace(LARGE, in_channels=8, out_channels=8, groups=2, axes=(Axis(40, 5, 2, 1, 2, 2),)),
    replace(LARGE, in_channels=3, out_channels=4, axes=(Axis(7, 3, 1, 1, 1, 1),) * 3),
    replace(LARGE, dtype="bf16", out_dtype="bf16"),
    replace(LARGE, dtype="fp16", out_dtype="fp16"),
    replace(LARGE, layouts=("view",) * 3),
]


def seen(problem: ConvProblem, plan: Plan | None = None) -> list[Values]:
    """The operands of every run of a check."""
    found: list[Values] = []

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        found.append((a.clone(), b.clone()))
        return right(problem)(a, b, bias, out)

    error = errors_of(problem, compute, seams_of(plan))
    assert error.l2 < toys.DTYPE_ERROR[problem.out_dtype]
    return found


def by_name(p: ConvProblem) -> str:
    return f"{p.dims}d-{p.batch}x{p.in_channels}x{p.out_channels}-{p.dtype}-{p.layouts[0]}"


each = [
    pytest.mark.sampled(6),
    pytest.mark.parametrize("pass_", Pass),
    pytest.mark.parametrize("problem", PROBLEMS, ids=by_name),
]


def everywhere(test: Callable[..., None]) -> Callable[..., None]:
    for mark in each:
        test = mark(test)
    return test


@everywhere
def test_every_operand_holds_outliers_of_each_magnitude(problem: ConvProblem, pass_: Pass) -> None:
    problem = replace(problem, pass_=pass_)
    runs = seen(problem)
    for operand in range(2):
        # Of several in one channel the largest alone would show, so that a few channels hold it alone.
        images = operand == 0 and pass_ is not Pass.WGRAD
        widths = (problem.in_channels, problem.out_channels)
        channels = widths[operand if pass_ is Pass.WGRAD else pass_ is Pass.FPROP]
        powers = OUTLIERS[problem.dtype]
        for power in powers if images else powers[: max(1, channels - 1)]:
            value = 2.0 ** (LOWERED[problem.dtype] + power)
            assert any((run[operand] == value).any() for run in runs), (operand, power)
    ordinary = runs[0]
    assert all(float(values.abs().max()) < 8 for values in ordinary)


@everywhere
def test_every_pair_of_kinds_meets_in_what_is_compared(problem: ConvProblem, pass_: Pass) -> None:
    """Seen in the operands themselves: constant planes, others whose sums are zero, waves."""
    problem = replace(problem, pass_=pass_)
    runs = seen(problem)
    for operand in range(2):
        kinds = {kind for run in runs for kind in planes(problem, run[operand], operand)}
        assert {NORMAL, CONSTANT, SLOW} <= kinds
    again = seen(problem)
    assert all(torch.equal(a, b) for one, two in zip(runs, again, strict=True) for a, b in zip(one, two, strict=True))


def planes(problem: ConvProblem, tensor: torch.Tensor, operand: int) -> set[int]:
    found = set()
    for plane in tensor.double().flatten(0, 1).flatten(1):
        steps = plane.diff()
        if plane.std() == 0:
            found.add(CONSTANT)
        elif (steps[: tensor.shape[-1] - 1] <= 1e-3).all() and 0.4 < plane.mean() < 1.6:
            found.add(SLOW)
        elif plane.min() < 0 < plane.max():
            found.add(NORMAL)
    return found


@settings(max_examples=some(24))
@given(toys.problems(dtypes=("fp32", "fp16")))
def test_kinds_are_where_the_blocks_say(problem: ConvProblem) -> None:
    for start in NEEDED[1:6:2]:
        mixed = mixture(problem, start)
        a, b = make_operands(problem, 1)
        normal = a.clone(), b.clone()
        apply(problem, (a, b), mixed)
        codes = pairs_of(problem, mixed)
        assert codes.shape == problem.shape(problem.result)[:2]
        if NORMAL not in (mixed.first[0], mixed.second[0]):
            continue
        same = codes == len(KINDS) * NORMAL + NORMAL
        got, want = problem.reference(a, b), problem.reference(*normal)
        assert torch.equal(got[same], want[same])
        assert not torch.isnan(a).any()
        assert not torch.isnan(b).any()


@pytest.mark.parametrize("pass_", Pass)
def test_a_balanced_operand_cancels_a_constant_one(pass_: Pass) -> None:
    problem = replace(LARGE, pass_=pass_, axes=(Axis(14, 3), Axis(9, 3)))
    a, b = make_operands(problem, 1)
    mixed = mixture(problem)
    apply(problem, (a, b), mixed)
    codes = pairs_of(problem, mixed)
    value, scale = problem.reference(a, b), problem.reference(a.abs(), b.abs())
    block = codes == len(KINDS) * CONSTANT + BALANCED
    assert block.any()
    inner = (...,) if pass_ is not Pass.DGRAD else (..., slice(2, -2), slice(2, -2))
    left = (value[block][inner].abs() / scale[block][inner]).max() if pass_ is not Pass.WGRAD else torch.zeros(())
    assert float(left) < 1e-5


def test_ends_come_first() -> None:
    assert end_ranks(1) == [0]
    assert end_ranks(2) == [0, 1]
    assert end_ranks(5) == [0, 2, 4, 3, 1]


def spoilt_where(problem: ConvProblem, wrong: Callable[[torch.Tensor, torch.Tensor], float]) -> Compute:
    """Right, and then every element off by a share of the root mean square."""

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        result = right(problem)(a, b, bias, out)
        return result.add_(wrong(a, b) * result.square().mean().sqrt())

    return compute


def constant_planes(tensor: torch.Tensor) -> bool:
    planes = tensor.flatten(0, 1).flatten(1)
    return bool((planes.amax(1) == planes.amin(1)).any())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("pass_", Pass)
def test_an_algorithm_that_errs_on_constants_is_seen(pass_: Pass, batch: int) -> None:
    problem = toys.small(pass_, batch=batch)
    for index in range(2):
        wrong = spoilt_where(problem, lambda *values, index=index: 1e-3 * constant_planes(values[index]))
        assert errors_of(problem, wrong).l2 > 1e-4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pass_", Pass)
def test_an_algorithm_that_rounds_at_the_largest_value_is_seen(pass_: Pass, batch: int, channels: int) -> None:
    """As a Fourier transform does. Its L2 error stays small, and the spread beside 2^20 is what tells."""
    problem = toys.small(pass_, batch=batch, channels=channels, size=12)
    for index in range(2):

        def compute(
            a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, index: int = index
        ) -> torch.Tensor:
            largest = (a, b)[index].abs().max()
            return right(problem)(a, b, bias, out).add_(2.0**-24 * largest)

        error = errors_of(problem, compute)
        assert error.l2 < 1e-5
        assert error.spread > LIMIT


@pytest.mark.parametrize("pass_", Pass)
def test_fourier_transforms_are_refused_where_spread_is_bounded(pass_: Pass) -> None:
    axes = (Axis(20, 5, 2, 1, 2, 2), Axis(24, 5, 2, 1, 2, 2))
    problem = ConvProblem(pass_, 4, 8, 12, axes)
    fft = solvers.get("fft")
    for config, _ in list(fft.offers(problem, None))[:2]:
        error = errors_of(problem, computing(Plan(problem.key, "fft", fft.version, config), problem))
        assert error.l2 < LIMIT
        assert error.spread > LIMIT


def computing(plan: Plan, problem: ConvProblem) -> Compute:
    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        return execute.bind(plan, problem, a, b, out)(a, b, bias, out)

    return compute


def test_a_plain_sum_of_smooth_values_may_drift_as_torchs_does() -> None:
    problem = toys.small(Pass.WGRAD)

    def drifting(much: float) -> Compute:
        def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
            result = right(problem)(a, b, bias, out)
            smooth = [[float(values[:, c].min()) > 0 for c in range(values.shape[1])] for values in (a, b)]
            block = torch.tensor(smooth[1])[:, None] & torch.tensor(smooth[0])
            result[block] *= 1 + much
            return result

        return compute

    assert errors_of(problem, drifting(1e-4)).l2 > 5e-5
    assert errors_of(problem, drifting(1e-4), own=drifting(1e-4)).l2 < LIMIT
    assert errors_of(problem, drifting(1e-4), own=drifting(3e-5)).l2 > 5e-5


def test_an_error_of_what_cancels_counts_beside_what_random_signs_would_give() -> None:
    """Rounded products alone: their sum is nearly zero, their rounding is not."""
    problem = toys.small(Pass.FPROP, channels=32)

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        return right(problem)(a * (1 + 2**-23), b, bias, out)

    assert errors_of(problem, compute).l2 < 1e-6


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_each_plan_of_a_division_meets_outliers_and_kinds(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(samples.FLOPS, "cpu", 1.0)
    problem = toys.small(pass_, batch=7)
    leaves = tuple(Plan(str(size), "plain", 1) for size in (4, 2, 1))
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(4, 2, 1)), leaves, (1, 1, 1))
    runs = seen(problem, plan)
    largest = 2.0 ** max(OUTLIERS["fp32"])
    held = [run[0].abs().flatten(1).amax(1) == largest for run in runs]
    assert torch.stack(held).any(0)[[0, 4, 6]].all()
    assert any(constant_planes(run[0]) for run in runs)


@pytest.mark.parametrize("pass_", Pass)
def test_what_kinds_cost(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """In products: of a large problem with a batch no more runs than before, and at most three tenths more."""
    spent = [0]
    reference = ConvProblem.reference

    def counted(self: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        spent[0] += self.flops
        return reference(self, a, b)

    problem = replace(LARGE, pass_=pass_, batch=8, in_channels=16, out_channels=16)
    monkeypatch.setitem(samples.FLOPS, "cpu", 1.0)
    monkeypatch.setattr(ConvProblem, "reference", counted)
    out = torch.zeros(problem.shape(problem.result))
    runs = [0]

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, _: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return out

    errors_of(problem, compute)
    assert runs[0] == 2
    before = 2 + 4 * 2 / (8 if pass_ is not Pass.WGRAD else 16)
    assert runs[0] + spent[0] / problem.flops <= 1.3 * before
    assert errors_of(problem, lambda a, b, bias, o: o.fill_(math.nan)) == Error(math.inf, math.inf)


HIDDEN = {
    "one channel of the result": (Pass.FPROP, (1, 2, 1, 1), Axis(12, 3), "fft"),
    "a filter with several": (Pass.DGRAD, (2, 8, 8, 8), Axis(300, 2), "winograd"),
    "a group's one channel on both sides": (Pass.WGRAD, (8, 3, 3, 3), Axis(12, 3), "fft"),
    "groups, dilated": (Pass.WGRAD, (8, 2, 2, 2), Axis(300, 2, 1, 2), "fft"),
    "a gradient where every tap meets all": (Pass.WGRAD, (2, 1, 1, 1), Axis(40, 2), "fft"),
    "long sums": (Pass.WGRAD, (3, 3, 3, 3), Axis(100, 3), "fft"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_no_outlier_hides_what_another_one_does(name: str) -> None:
    """Transforms spread rounding beside an outlier: ``strict`` does without them, however narrow the layer is."""
    pass_, (batch, into, outof, groups), axis, solver = HIDDEN[name]
    problem = ConvProblem(pass_, batch, into, outof, (axis,), groups)
    for config in solvers.get(solver).configs(problem):
        plan = Plan(problem.key, solver, solvers.get(solver).version, config)
        assert errors_of(problem, computing(plan, problem), seams_of(plan)).spread > LIMIT, config
