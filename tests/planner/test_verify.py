"""The check against float64: right results pass, each kind of wrong one is seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from tests import toys

from tilewise.plan import Config, Error, Plan
from tilewise.planner.measuring.seams import seams_of
from tilewise.planner.measuring.verify import error_limit
from tilewise.problems.conv import samples
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.checks import Compute, errors_of
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield


def right(problem: ConvProblem) -> Compute:
    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        value = problem.reference(a, b)
        if bias is not None:
            value += bias.double().view(-1, *[1] * problem.dims)
        return out.add_(value) if problem.accumulate else out.copy_(value)

    return compute


@settings(max_examples=40)
@given(toys.problems(dtypes=("fp32", "bf16", "fp16")))
def test_one_rounding_is_a_small_error(problem: ConvProblem) -> None:
    error = errors_of(problem, right(problem))
    assert error.l2 <= toys.DTYPE_ERROR[problem.out_dtype]
    assert error.spread <= 4 * toys.DTYPE_ERROR[problem.out_dtype]


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_long_sums_of_wide_data_stay_finite(pass_: Pass, dtype: str) -> None:
    axis = Axis(24, 3, before=1, after=1)
    problem = ConvProblem(pass_, 8, 96, 96, (axis, axis), dtype=dtype)
    assert errors_of(problem, right(problem)).l2 < toys.DTYPE_ERROR[dtype]


def spoilt(problem: ConvProblem, where: tuple[int | slice, ...], value: float) -> Compute:
    """Right but for ``where``: times ``value``."""
    good = right(problem)

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        result = good(a, b, bias, out)
        result[where] *= value
        return result

    return compute


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_bias_that_is_forgotten_or_added_twice_is_seen(pass_: Pass, factor: float) -> None:
    problem = replace(toys.small(pass_), bias=True)
    good = right(problem)
    assert errors_of(problem, good).l2 < 1e-6
    wrong = errors_of(problem, lambda a, b, bias, out: good(a, b, None if bias is None else factor * bias, out))
    assert wrong.l2 > 1e-2


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("groups", [1, 4])
def test_what_is_left_unwritten_anywhere_is_seen(pass_: Pass, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(samples.FLOPS, "cpu", 1.0)
    problem = toys.small(pass_, batch=12, channels=8, groups=groups)
    shape = problem.shape(problem.result)
    for index in range(0, math.prod(shape), 97):
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
        assert errors_of(problem, spoilt(problem, where, math.nan)) == Error(math.inf, math.inf)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("flops", [1.0, 3e4, 1e9])
def test_ends_of_the_filters_gradient_are_compared(groups: int, flops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(samples.FLOPS, "cpu", flops)
    problem = toys.small(Pass.WGRAD, batch=3, channels=8, groups=groups)
    assert errors_of(problem, right(problem)).l2 < 1e-6
    for channel in (0, -1) if flops > 1.0 or groups > 1 else (0,):
        assert errors_of(problem, spoilt(problem, (channel,), 1.01)).l2 > 1e-4


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_each_plan_of_a_division_is_compared(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(samples.FLOPS, "cpu", 1.0)
    problem = toys.small(pass_, batch=23, channels=2)
    sizes = (8, 8, 4, 2, 1)
    leaves = tuple(Plan(str(size), "plain", 1) for size in (8, 4, 2, 1))
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=sizes), leaves, (2, 1, 1, 1))
    for start, stop in ((0, 8), (16, 20), (20, 22), (22, 23)):
        wrong = spoilt(problem, (slice(start, stop),), 1.01)
        assert errors_of(problem, wrong, seams_of(plan)).l2 > 1e-4


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_of_a_large_image_stripes_are_compared(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends and both sides of a seam between plans, also below a division of the batch."""
    monkeypatch.setattr(samples, "WHOLE_BYTES", 0)
    monkeypatch.setattr(samples, "REFERENCE_BYTES", 1)
    problem = toys.small(pass_, batch=2, channels=2, size=30)
    leaves = tuple(Plan(name, "plain", 1) for name in ("first", "inside", "last"))
    tiles = Plan("image", "space_tile", 1, Config(sizes=(1, 10, 10, 8, 1)), leaves, (1, 3, 1))
    plan = Plan(problem.key, "micro_batch", 1, Config(sizes=(1, 1)), (tiles,), (2,))
    assert errors_of(problem, right(problem), seams_of(plan)).l2 < 1e-6
    for row in (0, 1, 28, 29):
        assert errors_of(problem, spoilt(problem, (slice(None), slice(None), row), 1.01), seams_of(plan)).l2 > 1e-4
    assert errors_of(problem, spoilt(problem, (slice(None), slice(None), 15), 1.01), seams_of(plan)).l2 < 1e-6


def test_rows_of_a_large_image_that_read_nothing_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "WHOLE_BYTES", 0)
    monkeypatch.setattr(samples, "REFERENCE_BYTES", 1)
    problem = toys.small(batch=1, channels=2, size=30)
    problem = replace(problem, axes=(replace(problem.axes[0], before=9), problem.axes[1]))
    assert errors_of(problem, right(problem)).l2 < 1e-6

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        result = right(problem)(a, b, bias, out)
        result[:, :, 1] = 1.0
        return result

    assert errors_of(problem, compute).l2 > 1e-3


def test_a_filters_gradient_is_compared_in_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "REFERENCE_BYTES", 4000)
    problem = toys.small(Pass.WGRAD, batch=2, channels=4, size=30)
    assert errors_of(problem, right(problem)).l2 < 1e-6
    assert errors_of(problem, spoilt(problem, (0,), 1.01)).l2 > 1e-4


def test_setting_where_it_should_add_is_seen() -> None:
    for pass_ in Pass:
        problem = toys.small(pass_, accumulate=True)
        assert errors_of(problem, right(problem)).l2 < 1e-6
        assert errors_of(problem, right(replace(problem, accumulate=False))).l2 > 1e-2


def test_an_error_beside_an_outlier_shows_in_the_spread() -> None:
    problem = toys.small(batch=2)

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        value = problem.reference(a, b)
        return out.copy_(value + 1e-7 * value.abs().max())

    error = errors_of(problem, compute)
    assert error.l2 < 1e-5
    assert error.spread > 10 * error.l2


def test_limits_follow_the_coarser_type() -> None:
    problem = toys.small()

    def own() -> Error:
        return Error(1e-2, 5e-2)

    def never() -> Error:
        raise AssertionError

    large = Error(1.0, 1.0)
    assert error_limit(problem, None, large, never) == (1e-5, 1e-5)
    assert error_limit(problem, 1e-7, large, never) == (1e-7, 1e-7)
    assert error_limit(replace(problem, dtype="bf16", out_dtype="fp32"), None, large, own) == (2e-2, 1e-1)
    for changes, floor in (
        ({"precision": "tf32"}, 1e-3),
        ({"dtype": "fp16", "out_dtype": "fp16"}, 1e-3),
        ({"dtype": "bf16", "out_dtype": "fp32"}, 8e-3),
        ({"out_dtype": "bf16"}, 8e-3),
    ):
        asked = replace(problem, **changes)  # type: ignore[arg-type]
        assert error_limit(asked, None, Error(floor, floor), never) == (floor, floor)
        for found in (large, Error(0.0, 1.0), Error(math.inf, math.inf)):
            assert error_limit(asked, None, found, lambda: Error(0.0, 0.0)) == (floor, floor)
            assert error_limit(asked, None, found, lambda: Error(math.inf, math.inf)) == (floor, floor)
            assert error_limit(asked, None, found, lambda: Error(0.1, 0.2)) == (0.2, 0.4)


@settings(max_examples=40)
@given(toys.problems(dtypes=("fp32", "bf16", "fp16")))
def test_tensors_are_what_the_problem_says(problem: ConvProblem) -> None:
    for wide in (False, True):
        tensors = *make_operands(problem, wide=wide), make_result(problem)
        for role, tensor in zip((*problem.operands, problem.result), tensors, strict=True):
            assert tuple(tensor.shape) == problem.shape(role)
            assert tensor.dtype is problem.torch_dtype(role)
            assert problem.layout(role) == "view" or tensor.is_contiguous() or problem.layout(role) == "channels_last"
        assert all(torch.isfinite(tensor).all() for tensor in tensors[:2])
        first = make_operands(problem, wide=wide)[0]
        assert torch.equal(first, tensors[0])


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_tensors_are_aligned_as_promised_and_no_better(alignment: int) -> None:
    problem = toys.small(dtype="bf16", alignment=(alignment,) * 3)
    for tensor in (*make_operands(problem), make_result(problem)):
        assert tensor.data_ptr() % alignment == 0
        assert alignment == 16 or tensor.data_ptr() % (2 * alignment) != 0


@pytest.mark.parametrize("pass_", Pass)
def test_depthwise_kernels_of_many_taps_are_compared_too(pass_: Pass) -> None:
    axis = Axis(30, 11, before=7, after=8)  # results at the edges meet nothing but padding
    problem = ConvProblem(pass_, 2, 6, 6, (axis, axis), 6)
    error = errors_of(problem, right(problem))
    assert error.l2 < 1e-6
    assert error.spread < 1e-6
    where = (slice(None), slice(None), 4) if pass_ is Pass.WGRAD else (-1, slice(None), 15)
    wrong = errors_of(problem, spoilt(problem, where, 1 + 1e-3))
    assert wrong.l2 > 1e-5
    assert wrong.spread > 1e-5
