"""Matrix products as problems: keys, cuts, sizes, notation, and a check that finds what is wrong."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.products import fill, memory_of, products

from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.base import Part, Problem, Seams, Write, layout_of, narrow
from tilewise.problems.gemm.checks import compared_lines, errors_of
from tilewise.problems.gemm.notation import format_product, looks_like_product, parse_product, product_name
from tilewise.problems.gemm.problem import ROLES, GemmProblem
from tilewise.problems.kinds import from_key
from tilewise.problems.operands import make_operands, make_result


@st.composite
def cuts(draw: st.DrawFn, p: GemmProblem) -> tuple[Part[GemmProblem], ...]:
    """The parts of a cut of ``p`` along any axis."""
    axis = draw(st.sampled_from(p.cut_axes))
    whole = p.extent(axis)
    marks = sorted({0, whole, *draw(st.lists(st.integers(0, whole), max_size=3))})
    return p.split(axis, [b - a for a, b in itertools.pairwise(marks)])


def compute(data: st.DataObject, p: GemmProblem, tensors: dict[str, torch.Tensor], depth: int) -> torch.Tensor:
    """The product by its reference, cut at random down to ``depth``; operands are views of the whole's."""
    if not depth:
        return p.reference(tensors["a"], tensors["b"])
    parts = data.draw(cuts(p))
    sums = any(part.write is not Write.SET for part in parts)
    out = torch.full(p.shape("c"), 0.0 if sums else math.nan, dtype=torch.float64)
    for part in parts:
        assert part.problem is not None
        views = {role: narrow(tensors[role], part.ranges(role)) for role in "ab"}
        mine = narrow(out, part.ranges("c"))
        for role, view in (*views.items(), ("c", mine)):
            assert tuple(view.shape) == part.problem.shape(role)
        value = compute(data, part.problem, views, depth - 1)
        mine.add_(value) if sums else mine.copy_(value)
    return out


@settings(max_examples=100)
@given(data=st.data(), p=products())
def test_nested_splits_equal_the_whole(data: st.DataObject, p: GemmProblem) -> None:
    tensors = {role: torch.randn(p.shape(role), dtype=torch.float64) for role in "ab"}
    torch.testing.assert_close(compute(data, p, tensors, 2), p.reference(*tensors.values()), rtol=1e-9, atol=1e-9)


@settings(max_examples=150)
@given(data=st.data(), p=products())
def test_parts_tell_the_layout_rows_and_alignment_of_their_views(data: st.DataObject, p: GemmProblem) -> None:
    tensors = {role: memory_of(p, role)[0] for role in ROLES}
    for part in data.draw(cuts(p)):
        child = part.problem
        assert child is not None
        for place, role in enumerate(ROLES):
            view = narrow(tensors[role], part.ranges(role))
            told = layout_of(view.shape, view.stride())
            if child.layout(role) == "contiguous":
                assert view.is_contiguous()
            elif child.batch == 0:
                assert told == "view"
                assert view.stride()[0] == child.leading[place]
            offset = (view.storage_offset() - tensors[role].storage_offset()) * view.element_size()
            assert offset % child.alignment[place] == 0


ALTERED: dict[str, Any] = {
    "m": 9, "n": 9, "k": 9, "op": "TN", "batch": 3, "dtype": "bf16", "out_dtype": "fp16", "precision": "tf32",
    "activation": "silu",
    "bias": True, "accumulate": True, "leading": (0, 12, 0), "alignment": (16, 4, 16), "device": "cuda:Some GPU",
}  # fmt: skip


def test_a_key_holds_every_field_and_is_read_back() -> None:
    p = GemmProblem(4, 5, 6)
    others = [p, *(replace(p, **{field.name: ALTERED[field.name]}) for field in fields(GemmProblem))]
    assert len({other.key for other in others}) == len(fields(GemmProblem)) + 1
    assert all(from_key(other.key) == other for other in others)


@given(first=products(), second=products())
def test_equal_keys_mean_equal_problems(first: GemmProblem, second: GemmProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert isinstance(first, Problem)
    assert GemmProblem.from_key(first.key) == first


@pytest.mark.parametrize(
    "key",
    [
        "gemm NN fp32 ieee b0m0n5k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m4n5k6 a:6,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m4n5k6 a:3,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m4n5k6 a:0,3b:0,16c:0,16 cpu",
        "gemm NN fp64 ieee b0m4n5k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NX fp32 ieee b0m4n5k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m04n5k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m4000000000n5000000000k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NN bf16 tf32 b0m4n5k6 a:0,16b:0,16c:0,16 cpu",
        "gemm NN fp32 ieee b0m4n5k6 a:0,16b:0,16c:0,16 cpu\n",
        "gemm",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_key(key)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"m": 0}, "m=0: must be at least 1"),
        ({"batch": -1}, "batch=-1"),
        ({"op": "NC"}, "op='NC': one of NN, NT, TN, TT would do"),
        ({"dtype": "fp64"}, "dtype='fp64': one of fp32, bf16, fp16 would do"),
        ({"leading": (2, 0, 0)}, "rows of a have 6 elements"),
        ({"leading": (6,)}, "one number for each of a, b and c"),
    ],
)
def test_values_that_make_no_product_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        GemmProblem(**{"m": 4, "n": 5, "k": 6, **values})


def test_a_dense_matrix_has_one_name() -> None:
    p = GemmProblem(4, 5, 6)
    assert replace(p, leading=(6, 5, 5)) == p
    assert replace(p, m=1, leading=(9, 0, 9)).leading == (0, 0, 0)
    assert replace(p, batch=2, leading=(6, 0, 0)).layout("a") == "view"
    with pytest.raises(ValueError, match="axis='batch': one of rows, columns, depth would do"):
        p.extent("batch")
    with pytest.raises(ValueError, match="must be positive and sum to depth=6"):
        p.split("depth", (2, 2))


@given(p=products())
def test_examples_lie_as_the_problem_says(p: GemmProblem) -> None:
    for role, tensor in zip(ROLES, (*make_operands(p), make_result(p)), strict=True):
        assert tensor.stride() == p.strides(role)
        assert tensor.shape == p.shape(role)
        if p.layout(role) == "view" and p.shape(role)[-2] > 1:
            assert tensor.stride(-2) == p.leading[ROLES.index(role)]


@given(p=products())
def test_sizes_flops_and_bytes(p: GemmProblem) -> None:
    products = max(1, p.batch)
    assert p.flops == 2 * products * p.m * p.n * p.k
    assert p.bytes == 4 * products * (p.m * p.k + p.k * p.n + p.m * p.n)
    assert replace(p, accumulate=True).bytes == p.bytes + 4 * products * p.m * p.n


@given(p=products())
def test_notation_is_read_back(p: GemmProblem) -> None:
    dense = replace(p, leading=(0, 0, 0))
    assert parse_product(format_product(p), op=p.op) == dense
    assert looks_like_product(format_product(p))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3x4:5x6", "rows of the left operand have 4 numbers and columns of the right one 5"),
        ("2x3x4:4x6", "sizes of the batch differ"),
        ("2x3x4:5x4x6", "sizes of the batch differ"),
        ("0x3x4:0x4x6", "a batch of 0"),
        ("0x4:4x6", "m=0"),
        ("3x4:", "not MxK:KxN"),
        ("3:4", "not MxK:KxN"),
        ("9999999999x9999999999:9999999999x9", "beyond any memory"),
    ],
)
def test_notation_that_is_no_product(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_product(text)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_notation_of_bias_and_activation(activation: str, bias: bool) -> None:
    words = "+bias" * bias + f"+{activation}" * (activation != "none")
    p = parse_product(f'2x3:3x4{words}n"a name"')
    assert p == GemmProblem(2, 4, 3, bias=bias, activation=activation)
    assert product_name(format_product(p, "a name")) == "a name"
    assert parse_product(format_product(p)).activation == activation
    assert parse_product("2x3:3x4", bias=bias, activation=activation) == p
    with pytest.raises(ValueError, match="one activation would do"):
        parse_product("2x3:3x4+relu+gelu")
    with pytest.raises(ValueError, match=r"with \+bias or an activation"):
        parse_product("2x3:3x4+softmax")


def test_a_product_that_accumulates_has_no_activation() -> None:
    with pytest.raises(ValueError, match="activation='relu': none would do"):
        GemmProblem(2, 3, 4, activation="relu", accumulate=True)
    with pytest.raises(ValueError, match="activation='softmax': one of none, relu"):
        GemmProblem(2, 3, 4, activation="softmax")


def test_keys_without_an_activation_are_as_they_were() -> None:
    key = "gemm NT fp32 ieee b0m2n3k4 a:0,16b:0,16c:0,16 bias cpu"
    assert GemmProblem(2, 3, 4, "NT", bias=True).key == key
    assert GemmProblem.from_key(key).activation == "none"
    with pytest.raises(ValueError, match="not a problem's key"):
        GemmProblem.from_key(key.replace("bias", "bias none"))


def test_notation_of_batches_and_names() -> None:
    p = parse_product('2x3x4x5:2x3x5x7n"attention"', op="NT", dtype="bf16", bias=True)
    assert (p.batch, p.m, p.n, p.k, p.op, p.dtype, p.bias) == (6, 4, 7, 5, "NT", "bf16", True)
    assert product_name('3x4:4x2n"head"') == "head"
    assert format_product(p, "head") == '6x4x5:6x5x7n"head"'
    assert not any(looks_like_product(text) for text in ("resnet50", "mb2ic3oc4ih8kh3", "model.py:net", "3x:"[:2]))


def exact(p: GemmProblem) -> Any:
    """A function that computes ``p`` in float64 and rounds once."""

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> torch.Tensor:
        added = p.reference(a, b) + (0 if bias is None else bias.double())
        return c.copy_(added + c if p.accumulate else added)

    return run


@settings(max_examples=40)
@given(p=products(), bias=st.booleans(), accumulate=st.booleans())
def test_the_check_passes_what_is_right(p: GemmProblem, bias: bool, accumulate: bool) -> None:
    p = replace(p, bias=bias, accumulate=accumulate)
    error = errors_of(p, exact(p))
    assert error.l2 < 2e-7
    assert error.spread < 2e-7


@settings(max_examples=60)
@given(data=st.data(), p=products(), flaw=st.sampled_from(("nan", "value", "unset", "bias")))
def test_the_check_finds_one_wrong_number(data: st.DataObject, p: GemmProblem, flaw: str) -> None:
    place = tuple(data.draw(st.integers(0, n - 1)) for n in p.shape("c"))
    p = replace(p, bias=flaw == "bias")
    right = exact(p)

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> torch.Tensor:
        kept = c[place].clone()
        right(a, b, None if flaw == "bias" else bias, c)
        if flaw == "value":
            c[place] = c[place] * 1.001 + 1
        elif flaw != "bias":
            c[place] = math.nan if flaw == "nan" else kept
        return c

    error = errors_of(p, run)
    assert error.l2 > 1e-5 or error.spread > 1e-6


def test_large_products_are_compared_at_ends_seams_and_between() -> None:
    p = GemmProblem(2048, 4096, 2048)
    seams = Seams({"rows": (1000,)}, parted=True)
    rows, columns = compared_lines(p, "rows", seams), compared_lines(p, "columns", seams)
    assert {0, 999, 1000, 2047} <= set(rows)
    assert {0, 4095} <= set(columns)
    assert len(rows) <= 16
    assert len(columns) <= 32


@pytest.mark.parametrize("op", ["NN", "TT"])
def test_a_reference_in_pieces_is_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = GemmProblem(9, 11, 13, op, bias=True)
    monkeypatch.setattr("tilewise.problems.gemm.checks.REFERENCE_BYTES", 400)
    assert errors_of(p, exact(p)).l2 < 2e-7


def test_values_are_filled_alike() -> None:
    assert torch.equal(fill(torch.empty(3), 1), fill(torch.empty(3), 1))
