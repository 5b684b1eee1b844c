"""Separable convolutions as problems: keys, parts, the value in float64, and a check that finds faults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.separable import separables
from torch import Tensor
from torch.nn import functional

from tilewise.problems.activations import activated
from tilewise.problems.base import Write, narrow
from tilewise.problems.conv.axis import Axis
from tilewise.problems.kinds import from_key
from tilewise.problems.operands import make_operands
from tilewise.problems.separable.checks import data_of_all_kinds, errors_of
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import parted

AXIS = Axis(7, 3, 1, 1, 1, 1)
PLAIN = SeparableProblem(2, 5, 8, 6, (AXIS, AXIS), inner=("relu6", "silu"))
ALTERED: dict[str, Any] = {
    "batch": 9, "in_channels": 9, "channels": 9, "out_channels": 9, "axes": (AXIS, Axis(8, 3, 2)),
    "inner": ("none",) * 2, "activation": "leaky_relu:0.5", "residual": True, "dtype": "bf16",
    "device": "cuda:Some GPU",
}  # fmt: skip


def test_a_key_holds_every_field_and_is_read_back() -> None:
    others = [replace(PLAIN, **{name: value}) for name, value in ALTERED.items()]
    alone = {"inner": ("silu",)}
    others += [
        replace(PLAIN, expands=False, in_channels=8, **alone), replace(PLAIN, projects=False, out_channels=8, **alone),
        PLAIN,
    ]  # fmt: skip
    assert {field.name for field in fields(PLAIN)} == {*ALTERED, "expands", "projects"}
    assert len({other.key for other in others}) == len(others)
    assert all(from_key(other.key) == other for other in others)


@given(first=separables(), second=separables())
def test_equal_keys_mean_equal_problems(first: SeparableProblem, second: SeparableProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert SeparableProblem.from_key(first.key) == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fp32", "fp64"), ("mb2", "mb02"), ("mb2", "mb0"), ("pw=relu6>", ""), ("relu6", "relu7"), ("cpu", ""),
        ("kh3", "kh99"), ("none cpu", "none  residual cpu"), ("mb2", "mb99999999999999999"),
        ("pw=none", "pw=leaky_relu:1"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(old: str, new: str) -> None:
    assert old in PLAIN.key
    with pytest.raises(ValueError, match=r"."):
        from_key(PLAIN.key.replace(old, new, 1))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"axes": (AXIS,)}, "two, of height and width, would do"),
        ({"expands": False, "projects": False}, "a depthwise convolution alone is a ConvProblem"),
        ({"expands": False, "inner": ("relu",)}, "in_channels=5: without that convolution 8 would do"),
        ({"projects": False, "inner": ("relu",)}, "out_channels=6: without that convolution 8 would do"),
        ({"inner": ("relu",)}, "one function for each convolution but the last, 2, would do"),
        ({"inner": ("relu", "swish")}, "activation='swish'"),
        ({"dtype": "fp64"}, "dtype='fp64'"),
    ],
)
def test_what_is_no_problem_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **values)


def by_torch(p: SeparableProblem, x: Tensor, w: Tensor) -> Tensor:
    """The same by ``conv2d`` in float64, with filters cut out of the vector by hand."""
    place, value = 0, x.double()

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel()
        place += count
        return w[place - count : place].double().view(shape)

    functions = list(p.inner)
    if p.expands:
        value = functional.conv2d(value, take(p.channels, p.in_channels, 1, 1), take(p.channels))
        value = activated(value, functions.pop(0))
    height, width = p.axes
    value = functional.pad(value, (width.before, width.after, height.before, height.after))
    value = functional.conv2d(
        value, take(p.channels, 1, height.kernel, width.kernel), take(p.channels), (height.stride, width.stride), 0,
        (height.dilation, width.dilation), p.channels,
    )  # fmt: skip
    if p.projects:
        value = functional.conv2d(
            activated(value, functions.pop(0)), take(p.out_channels, p.channels, 1, 1), take(p.out_channels)
        )
    assert place == w.numel()
    assert not functions
    return value


@settings(max_examples=40, deadline=None)
@given(p=separables())
def test_its_value_is_that_of_convolutions_one_after_the_other(p: SeparableProblem) -> None:
    x, w = make_operands(p, 3)
    want = by_torch(p, x, w)
    assert p.shape("y") == tuple(want.shape)
    assert float((p.reference(x, w) - want).abs().max()) <= 1e-9 * max(1.0, float(want.abs().max()))
    inputs = [(p.in_channels, p.pixels[0])] * p.expands + [(p.channels, p.pixels[1])] * p.projects
    outputs = [p.channels] * p.expands + [p.out_channels] * p.projects
    products = sum(i * n * o for (i, n), o in zip(inputs, outputs, strict=True))
    taps = p.axes[0].kernel * p.axes[1].kernel
    assert p.flops == 2 * p.batch * (products + p.channels * p.pixels[1] * taps)


def test_parts_of_a_batch_make_the_whole() -> None:
    p = replace(PLAIN, batch=5)
    x, w = make_operands(p, 1)
    whole, found = p.reference(x, w), torch.full(p.shape("y"), float("nan"), dtype=torch.float64, device="cpu")
    for part in p.split("batch", (2, 3)):
        assert part.problem is not None
        assert part.write is Write.SET
        own = narrow(x, part.ranges("x")), narrow(w, part.ranges("w"))
        narrow(found, part.ranges("y")).copy_(part.problem.reference(*own))
    assert torch.equal(found, whole)
    for axis, sizes in (("channels", (5,)), ("batch", (5, 1)), ("batch", (0, 5))):
        with pytest.raises(ValueError, match=r"must be positive and sum to batch=5|is cut along"):
            p.split(axis, sizes)


def exact(p: SeparableProblem, x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
    want = p.reference(x, w)
    return activated(want if residual is None else want + residual.double(), p.activation)


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("residual", [False, True])
def test_a_check_finds_what_is_wrong(batch: int, residual: bool) -> None:
    """Of a large batch a few images are compared, and all are looked through for what is not finite."""
    p = replace(PLAIN, batch=batch, residual=residual, activation="hardswish")

    def rounded(x: Tensor, w: Tensor, _: None, y: Tensor, residual: Tensor | None = None) -> Tensor:
        return y.copy_(exact(p, x, w, residual))

    assert errors_of(p, rounded).l2 < 1e-7

    def without_a_bias(x: Tensor, w: Tensor, _: None, y: Tensor, residual: Tensor | None = None) -> Tensor:
        wrong = w.clone()
        next(iter(parted(p, wrong))).bias[3] = 0.0
        return y.copy_(exact(p, x, wrong, residual))

    assert errors_of(p, without_a_bias).l2 > 1e-3

    def unwritten(x: Tensor, w: Tensor, _: None, y: Tensor, residual: Tensor | None = None) -> Tensor:
        result = rounded(x, w, None, y, residual)
        result[-1, 1, 2, 3] = float("nan")
        return result

    assert errors_of(p, unwritten).l2 == float("inf")

    def by_one_row(x: Tensor, w: Tensor, _: None, y: Tensor, residual: Tensor | None = None) -> Tensor:
        return rounded(x, w, None, y, residual).roll(1, 2)

    assert errors_of(p, by_one_row).l2 > 0.1


def test_no_kind_of_data_saturates_everything() -> None:
    """Functions with bounds leave much of what they get: what is wrong before them shows."""
    for x, w in data_of_all_kinds(PLAIN):
        total = functional.conv2d(x, *(lambda s: (s.weight, s.bias))(next(iter(parted(PLAIN, w)))))
        assert float(((total > 0) & (total < 6)).float().mean()) > 0.1
