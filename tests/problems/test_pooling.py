"""Poolings as problems: keys, notation, cuts, the value in float64, and a check that finds what is wrong."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pooling import poolings

from tilewise.problems.base import as_tuple, narrow
from tilewise.problems.kinds import from_key
from tilewise.problems.pooling.checks import KINDS, errors_of, operands_of_kind
from tilewise.problems.pooling.notation import format_pooling, parse_pooling
from tilewise.problems.pooling.problem import PoolingProblem

PLAIN = PoolingProblem("avg", 2, 3, (9, 10), (3, 3), (2, 2), (1, 1))
ALTERED: dict[str, Any] = {
    "op": "max", "batch": 5, "channels": 5, "space": (9, 12), "kernel": (4, 3), "stride": (1, 2), "padding": (0, 1),
    "ceil_mode": True, "count_include_pad": False, "divisor": 4, "task": "training", "layout_name": "channels_last",
    "dtype": "bf16", "device": "cuda:Some GPU",
}  # fmt: skip


def test_a_key_holds_every_field_and_is_read_back() -> None:
    names = [field.name for field in fields(PLAIN) if field.name != "dilation"]
    others = [PLAIN, *(replace(PLAIN, **{name: ALTERED[name]}) for name in names)]
    others.append(replace(PLAIN, op="max", dilation=(2, 1)))
    assert len({other.key for other in others}) == len(others)
    assert all(from_key(other.key) == other for other in others)


@given(first=poolings(), second=poolings())
def test_equal_keys_mean_equal_problems(first: PoolingProblem, second: PoolingProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert PoolingProblem.from_key(first.key) == first


@pytest.mark.parametrize(
    "key",
    [
        "pool",
        "pool max inference fp32 contiguous n1c1i4k2s2p0d0 cpu",
        "pool max inference fp32 contiguous n1c1i4k02s2p0d1 cpu",
        "pool max inference fp32 contiguous n1c1i4k2s2p0d1 nopad cpu",
        "pool max inference fp32 contiguous n1c1i4k2s2p0d1 ceil cpu",
        "pool max inference fp32 contiguous n1c1i4x4k2s2p0d1 cpu",
        "pool max inference fp64 contiguous n1c1i4k2s2p0d1 cpu",
        "pool min inference fp32 contiguous n1c1i4k2s2p0d1 cpu",
        "pool max inference fp32 view n1c1i4k2s2p0d1 cpu",
        "pool max inference fp32 contiguous n9999999999999c9999999999999i4k2s2p0d1 cpu",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_key(key)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"op": "min"}, "op='min': one of max, avg would do"),
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"stride": (0, 1)}, r"stride=\(0, 1\): must be at least 1"),
        ({"kernel": (3,)}, r"kernel=\(3,\): 2 numbers would do"),
        ({"padding": (2, 0)}, "from 0 to half of the kernel"),
        ({"dilation": (2, 1)}, "an average has dilation 1"),
        ({"divisor": -1}, "divisor=-1"),
        ({"space": (1, 4), "padding": (0, 0)}, "there is no result"),
        ({"op": "max", "space": (1, 1), "kernel": (2, 2), "dilation": (2, 2)}, "has no element inside"),
    ],
)
def test_values_that_make_no_pooling_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **values)


def test_fields_that_make_no_difference_have_their_defaults() -> None:
    assert replace(PLAIN, padding=(0, 0), count_include_pad=False) == replace(PLAIN, padding=(0, 0))
    assert replace(PLAIN, space=(9, 9), ceil_mode=True) == replace(PLAIN, space=(9, 9))
    assert replace(PLAIN, op="max", count_include_pad=False) == replace(PLAIN, op="max")


@given(p=poolings(dtype="fp32", task="inference", layout_name="contiguous"))
def test_text_is_read_back(p: PoolingProblem) -> None:
    assert parse_pooling(format_pooling(p)) == p


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_pool:n1c1i4", "has no k"),
        ("max_pool:n1n1c1i4k2", "has 'n' twice"),
        ("max_pool:n1c1i4k2q2", "has 'q'; one of n, c, i, k, s, p, d would do"),
        ("max_pool:n1x2c1i4k2", "one number for n"),
        ("max_pool:n999999999999999999c99i4k2", "beyond any memory"),
        ("pool:n1c1i4k2", "not max_pool or avg_pool"),
    ],
)
def test_text_that_is_no_pooling_says_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_pooling(text)


@settings(max_examples=50, deadline=None)
@given(p=poolings(dtype="fp32", layout_name="contiguous"), kind=st.sampled_from(KINDS))
def test_the_reference_is_what_torch_computes_in_float64(p: PoolingProblem, kind: str) -> None:
    if p.op == "avg" and kind == "infinite":
        kind = "equal"
    x, *dy = (t.double() for t in operands_of_kind(p, kind, 1))
    x.requires_grad_()
    dims, sizes = len(p.space), (p.kernel, p.stride, p.padding)
    if p.op == "max":
        function = getattr(torch.nn.functional, f"max_pool{dims}d")
        y = function(x, *sizes, dilation=p.dilation, ceil_mode=p.ceil_mode)
    else:
        function = getattr(torch.nn.functional, f"avg_pool{dims}d")
        divisor = {} if dims == 1 else {"divisor_override": p.divisor or None}
        y = function(x, *sizes, ceil_mode=p.ceil_mode, count_include_pad=p.count_include_pad, **divisor)
    want = (y, *(torch.autograd.grad(y, x, dy) if dy else ()))
    got = as_tuple(p.reference(*operands_of_kind(p, kind, 1)))
    assert tuple(tuple(t.shape) for t in got) == tuple(p.shape(role) for role in p.results)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), p=poolings(dtype="fp32", batch=3))
def test_parts_of_the_batch_make_the_whole(data: st.DataObject, p: PoolingProblem) -> None:
    first = data.draw(st.integers(1, 2), "first")
    operands = operands_of_kind(p, "normal", 1)
    whole = as_tuple(p.reference(*operands))
    for part in p.split("batch", (first, 3 - first)):
        assert part.problem is not None
        own = [narrow(t, part.ranges(role)) for role, t in zip(p.operands, operands, strict=True)]
        want = [narrow(t, part.ranges(role)) for role, t in zip(p.results, whole, strict=True)]
        torch.testing.assert_close(list(as_tuple(part.problem.reference(*own))), want)
    with pytest.raises(ValueError, match="must be positive and sum to batch=3"):
        p.split("batch", (1, 1))
    with pytest.raises(ValueError, match="axis='space': batch would do"):
        p.split("space", (1, 1))


@settings(max_examples=10, deadline=None)
@given(data=st.data(), p=poolings(dtype="fp32"))
def test_the_check_finds_what_is_wrong_in_any_result(data: st.DataObject, p: PoolingProblem) -> None:
    def computed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.float() for t in as_tuple(p.reference(*tensors[: len(p.operands)])))

    assert errors_of(p, computed).l2 < 1e-6
    place = data.draw(st.integers(0, len(p.results) - 1), "result")

    def wrong(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = computed(*tensors)
        results[place].add_(1e-2)
        return results

    def left_out(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = computed(*tensors)
        results[place][(-1,) * results[place].dim()] = math.nan
        return results

    assert errors_of(p, wrong).l2 > 1e-4
    assert errors_of(p, left_out).l2 == math.inf


def test_the_check_sees_where_the_gradient_of_equal_maxima_goes() -> None:
    p = PoolingProblem("max", 1, 2, (9, 9), (3, 3), (2, 2), task="training")

    def last_of_equals(x: torch.Tensor, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        y, dx = p.reference(x.flip(2, 3), dy.flip(2, 3))
        return y.flip(2, 3).float(), dx.flip(2, 3).float()

    assert errors_of(p, last_of_equals).l2 > 0.1
