"""Local response normalization as a problem: keys, text, parts, the value in float64, and a check that finds faults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lrn import norms

from tilewise.problems.base import Write, narrow
from tilewise.problems.kinds import from_key
from tilewise.problems.lrn.checks import data_of_all_kinds, errors_of
from tilewise.problems.lrn.notation import format_lrn, looks_like_lrn, parse_lrn
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.operands import make_operands

PLAIN = LrnProblem(2, 7, (3, 5), 3)
ALTERED: dict[str, Any] = {
    "batch": 9, "channels": 9, "space": (15,), "size": 4, "alpha": 0.1, "beta": 0.5, "k": 2.0, "task": "training",
    "layout_name": "channels_last", "dtype": "bf16", "device": "cuda:Some GPU",
}  # fmt: skip


def test_a_key_holds_every_field_and_is_read_back() -> None:
    others = [PLAIN, *(replace(PLAIN, **{field.name: ALTERED[field.name]}) for field in fields(PLAIN))]
    assert len({other.key for other in others}) == len(fields(PLAIN)) + 1
    assert all(from_key(other.key) == other for other in others)


@given(first=norms(), second=norms())
def test_equal_keys_mean_equal_problems(first: LrnProblem, second: LrnProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert LrnProblem.from_key(first.key) == first


def test_one_arrangement_in_memory_is_one_problem() -> None:
    assert replace(PLAIN, channels=1, layout_name="channels_last") == replace(PLAIN, channels=1)
    assert replace(PLAIN, alpha=1, k=-0.0).key == replace(PLAIN, alpha=1.0, k=0.0).key


@pytest.mark.parametrize(
    "key",
    [
        "lrn inference fp32 contiguous n2c7s3x5 size3 alpha1e-4 beta0.75 k1.0 cpu",
        "lrn inference fp32 contiguous n2c7s3x5 size3 alpha0.0001 beta0.75 k1 cpu",
        "lrn inference fp32 contiguous n2c7s3x5 size3 alpha0.0001 beta0.75 k1e999 cpu",
        "lrn inference fp32 contiguous n2c7s3x5 size3 alpha0.0001 beta0.7.5 k1.0 cpu",
        "lrn inference fp32 contiguous n2c7s3x5 size0 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn inference fp32 contiguous n2c7s size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn inference fp32 contiguous n02c7s3x5 size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn inference fp64 contiguous n2c7s3x5 size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn inference fp32 channels_last n2c1s3x5 size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn inference fp32 contiguous n999999999c999999999s3x5 size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn forward fp32 contiguous n2c7s3x5 size3 alpha0.0001 beta0.75 k1.0 cpu",
        "lrn",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_key(key)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"size": 0}, "size=0: must be at least 1"),
        ({"space": ()}, r"space=\(\): one size or more"),
        ({"space": (3, 0)}, r"space=\(3, 0\)"),
        ({"alpha": float("nan")}, "alpha=nan: a finite number would do"),
        ({"task": "forward"}, "task='forward': one of inference, training would do"),
        ({"layout_name": "view"}, "layout_name='view'"),
        ({"dtype": "fp64"}, "dtype='fp64'"),
    ],
)
def test_values_that_make_no_normalization_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **values)


@given(p=norms(dtype="fp32", task="inference", layout_name="contiguous"))
def test_text_is_read_back(p: LrnProblem) -> None:
    text = format_lrn(p)
    assert looks_like_lrn(text)
    assert parse_lrn(text) == p


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lrn:n2c3k3", "would do"),
        ("lrn:n2c3s4k3,gamma=1", "has 'gamma'; alpha, beta or add would do"),
        ("lrn:n2c3s4k3,alpha=1,alpha=1", "has alpha twice"),
        ("lrn:n2c3s4k3,alpha=one", "alpha=one: a number would do"),
        ("lrn:n2c3s4k0", "size=0"),
    ],
)
def test_text_that_is_no_normalization_says_why(text: str, says: str) -> None:
    assert looks_like_lrn(text)
    with pytest.raises(ValueError, match=says):
        parse_lrn(text)


@settings(max_examples=10)
@given(p=norms(dtype="fp32", task="training"))
def test_the_reference_is_what_torch_computes_in_float64(p: LrnProblem) -> None:
    for operands in data_of_all_kinds(p):
        x, dy = (t.double().contiguous() for t in operands)
        x.requires_grad_()
        y = torch.nn.functional.local_response_norm(x, p.size, p.alpha, p.beta, p.k)
        want = y.detach(), torch.autograd.grad(y, x, dy)[0]
        for got, each in zip(p.reference(x.detach(), dy), want, strict=True):
            torch.testing.assert_close(got, each, rtol=1e-9, atol=1e-9 * float(each.abs().max()))


@pytest.mark.parametrize(("size", "alpha", "beta"), [(5, 1e-4, 0.75), (3, 0.5, 0.6)])
def test_the_reference_is_what_opencv_computes_for_caffes_layer(
    tmp_path: Any, size: int, alpha: float, beta: float
) -> None:
    """OpenCV's importer ignores Caffe's ``k``, so it is 1 here."""
    net = tmp_path / "lrn.prototxt"
    net.write_text(
        'input: "x" input_shape { dim: 2 dim: 7 dim: 3 dim: 5 }\n'
        'layer { name: "norm" type: "LRN" bottom: "x" top: "y"\n'
        f"  lrn_param {{ local_size: {size} alpha: {alpha} beta: {beta} }} }}\n"
    )
    p = LrnProblem(2, 7, (3, 5), size, alpha, beta)
    x = 30 * make_operands(p, 1)[0]
    caffes = cv2.dnn.readNetFromCaffe(str(net))
    caffes.setInput(np.asarray(x))
    torch.testing.assert_close(torch.from_numpy(caffes.forward()).double(), p.reference(x)[0], rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(p=norms(), data=st.data())
def test_parts_of_the_batch_are_parts_of_the_result(p: LrnProblem, data: st.DataObject) -> None:
    assert p.batch_size == p.extent("batch") == p.batch
    first = data.draw(st.integers(1, p.batch), "first")
    sizes = (first, p.batch - first) if first < p.batch else (first,)
    operands = tuple(t.double() for t in make_operands(p, 1))
    whole = p.reference(*operands)
    parts = p.split("batch", sizes)
    assert [part.problem.batch for part in parts if part.problem is not None] == list(sizes)
    for part in parts:
        assert part.problem is not None
        assert part.write is Write.SET
        taken = [narrow(t, part.ranges(role)) for role, t in zip(p.operands, operands, strict=True)]
        for role, got, of in zip(p.results, part.problem.reference(*taken), whole, strict=True):
            torch.testing.assert_close(got, narrow(of, part.ranges(role)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("axis", "sizes"), [("channels", (2,)), ("batch", (1,)), ("batch", (3, -1)), ("batch", ())])
def test_cuts_that_cannot_be_made_are_refused(axis: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be positive and sum to batch=2|is cut along 'batch'"):
        PLAIN.split(axis, sizes)


@pytest.mark.parametrize(
    "changes", [{"size": 4}, {"alpha": 1.1e-4}, {"beta": 0.751}, {"k": 1.01}], ids=lambda changes: next(iter(changes))
)
def test_the_check_finds_another_normalization(changes: dict[str, Any]) -> None:
    p = replace(PLAIN, task="training")

    def compute(*tensors: Any) -> Any:
        return tuple(t.float() for t in replace(p, **changes).reference(*tensors[:2]))

    def right(*tensors: Any) -> Any:
        return tuple(t.float() for t in p.reference(*tensors[:2]))

    assert errors_of(p, compute).l2 > 1e-4
    assert errors_of(p, right).l2 < 1e-6
    assert errors_of(p, lambda x, dy, bias, y, dx: (right(x, dy)[0], dx)).l2 == float("inf")
