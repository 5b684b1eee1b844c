"""The algebra of problems: nested cuts give the whole, keys tell problems apart, sizes are what tensors have."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.reference import convolve
from tests.strategies import axes, problems

from tilewise.problems.base import Part, Problem, Range, Write, dense_strides, layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

Tensors = dict[str, torch.Tensor]


def narrow(tensor: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    for r in ranges:
        tensor = tensor.narrow(r.dim, r.start, r.length)
    return tensor


@st.composite
def cuts(draw: st.DrawFn, p: ConvProblem) -> tuple[str, list[int], bool]:
    """An axis of ``p``, sizes of its parts and whether results scatter; channels in groups or at their boundaries."""
    axis = draw(st.sampled_from(("batch", "groups", "in_channels", "out_channels", *p.space)))
    scatter = p.pass_ is Pass.DGRAD and axis in p.space and draw(st.booleans())
    whole = p.extent(axis, scatter=scatter)
    marks = sorted({0, whole, *draw(st.lists(st.integers(0, whole), max_size=3))})
    return axis, [b - a for a, b in itertools.pairwise(marks)], scatter


def parts_of(p: ConvProblem, cut: tuple[str, list[int], bool]) -> tuple[Part, ...] | None:
    axis, sizes, scatter = cut
    unit = p.extent(axis) // p.groups if axis.endswith("channels") else 1
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    if any((start % unit or stop % unit) and start // unit != (stop - 1) // unit for start, stop in ends):
        with pytest.raises(ValueError, match="cuts across groups"):
            p.split(axis, sizes)
        return None
    return p.split(axis, sizes, scatter=scatter)


def compute(data: st.DataObject, p: ConvProblem, tensors: Tensors, depth: int) -> torch.Tensor:
    """The problem by the reference, cut at random down to ``depth``. Operands are views of the whole's."""
    parts = parts_of(p, data.draw(cuts(p), "cut")) if depth else None
    if parts is None:
        return convolve(p, *(tensors[role] for role in p.operands))
    out = torch.full(p.shape(p.result), 0.0 if any(q.write is not Write.SET for q in parts) else torch.nan).double()
    for part in parts:
        mine = narrow(out, part.ranges(p.result))
        if part.problem is None:
            if part.write is Write.SET:
                mine.zero_()
            continue
        views = {role: narrow(tensors[role], part.ranges(role)) for role in p.operands}
        for role in ROLES:
            shape = views[role].shape if role in views else mine.shape
            assert tuple(shape) == part.problem.shape(role)
        value = compute(data, replace(part.problem, accumulate=False), views, depth - 1)
        if part.write is Write.SET:
            mine.copy_(value)
        else:
            mine.add_(value)
    return out


@settings(max_examples=250)
@given(data=st.data(), p=problems())
def test_nested_splits_equal_the_whole(data: st.DataObject, p: ConvProblem) -> None:
    tensors = {role: torch.randn(p.shape(role), dtype=torch.float64) for role in ROLES}
    whole = convolve(p, *(tensors[role] for role in p.operands))
    got = compute(data, p, tensors, depth=2)
    torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [((), (), "contiguous"), ((4,), (1,), "contiguous"), ((4,), (0,), "view"), ((1,), (0,), "contiguous"),
     ((4, 3), (1, 4), "view"), ((2, 3, 4), (12, 1, 3), "channels_last")],
)  # fmt: skip
def test_layouts_of_tensors_of_few_axes(shape: tuple[int, ...], strides: tuple[int, ...], layout: str) -> None:
    assert layout_of(shape, strides) == layout


@settings(max_examples=150)
@given(data=st.data(), p=problems(), layouts=st.tuples(*[st.sampled_from(("contiguous", "channels_last"))] * 3))
def test_parts_tell_the_layout_and_alignment_of_their_views(
    data: st.DataObject, p: ConvProblem, layouts: tuple[str, str, str]
) -> None:
    tensors = {}
    for role, layout in zip(ROLES, layouts, strict=True):
        strides = dense_strides(p.shape(role), layout)
        tensors[role] = torch.empty_strided(p.shape(role), strides, dtype=p.torch_dtype(role), device="meta")
    (lx, lw, ly) = (layout_of(tensors[role].shape, tensors[role].stride()) for role in ROLES)
    p = replace(p, layouts=(lx, lw, ly))
    for part in parts_of(p, data.draw(cuts(p))) or ():
        if part.problem is None:
            continue
        for place, role in enumerate(ROLES):
            view = narrow(tensors[role], part.ranges(role))
            assert part.problem.layout(role) == layout_of(view.shape, view.stride())
            bytes_in = view.storage_offset() * tensors[role].element_size()
            assert bytes_in % part.problem.alignment[place] == 0


@given(p=problems(), sums=st.booleans())
def test_sums_of_parts_are_kept_in_fp32(p: ConvProblem, sums: bool) -> None:
    p = replace(p, dtype="bf16", out_dtype="bf16")
    axis = {Pass.FPROP: "in_channels", Pass.DGRAD: "out_channels", Pass.WGRAD: "batch"}[p.pass_]
    if not sums:
        axis = "out_channels" if p.pass_ is Pass.WGRAD else "batch"
    extent = p.extent(axis)
    inside = extent // p.groups if axis != "batch" else extent
    assume(inside > 1)
    part = p.split(axis, [1, *([extent - 1] if axis == "batch" or p.groups == 1 else [1] * (extent - 1))])[0]
    assert part.problem is not None
    assert part.problem.out_dtype == ("fp32" if sums else "bf16")
    assert part.problem.accumulate is sums


ALTERED: dict[str, object] = {
    "pass_": Pass.WGRAD,
    "batch": 7,
    "in_channels": 8,
    "out_channels": 8,
    "groups": 1,
    "dtype": "bf16",
    "out_dtype": "fp16",
    "precision": "tf32",
    "bias": True,
    "activation": "leaky_relu:0.01",
    "residual": True,
    "accumulate": True,
    "constant_weight": True,
    "checked_weight": True,
    "layouts": ("channels_last", "contiguous", "contiguous"),
    "alignment": (16, 4, 16),
    "device": "cuda:Some GPU",
}


def test_a_key_holds_every_field() -> None:
    p = ConvProblem(Pass.FPROP, 2, 4, 4, (Axis(9, 3), Axis(9, 3)), 2)
    keys = {p.key}
    for field in fields(ConvProblem):
        if field.name != "axes":
            beside = {"constant_weight": True} if field.name == "checked_weight" else {}
            keys.add(replace(p, **{field.name: ALTERED[field.name]}, **beside).key)
    for field in fields(Axis):
        axis = replace(p.axes[0], **{field.name: {"size": 12, "before": 1, "after": 1}.get(field.name, 2)})
        keys |= {replace(p, axes=(axis, p.axes[1])).key, replace(p, axes=(p.axes[1], axis)).key}
    assert len(keys) == 1 + (len(fields(ConvProblem)) - 1) + 2 * len(fields(Axis))


@given(first=problems(), second=problems())
def test_equal_keys_mean_equal_problems(first: ConvProblem, second: ConvProblem) -> None:
    assert (first.key == second.key) == (first == second)
    assert isinstance(first, Problem)


@settings(max_examples=200)
@given(axis=axes(longest=16))
def test_an_axis_tells_which_inputs_outputs_read(axis: Axis) -> None:
    reads = [
        {j * axis.stride - axis.before + r * axis.dilation for r in range(axis.kernel)} & set(range(axis.size))
        for j in range(axis.out)
    ]
    for start in range(axis.out):
        for stop in range(start + 1, axis.out + 1):
            read = set().union(*reads[start:stop])
            found = axis.reading(start, stop)
            assert read <= (set(range(found[0], found[1])) if found else set())
            if found:
                assert found[2].out == stop - start
                assert found[2].size == found[1] - found[0]
    for start in range(axis.size):
        found = axis.writing(start, start + 1)
        writers = {j for j in range(axis.out) if start in reads[j]}
        assert writers <= (set(range(found[0], found[1])) if found else set())


@given(p=problems())
def test_sizes_flops_and_bytes(p: ConvProblem) -> None:
    taps = 1
    for axis in p.axes:
        taps *= axis.kernel * axis.out
    assert p.flops == 2 * p.batch * p.out_channels * p.in_channels // p.groups * taps
    moved = sum(torch.empty(p.shape(role), dtype=p.torch_dtype(role), device="meta").nbytes for role in ROLES)
    assert p.bytes == moved
    assert replace(p, accumulate=True).bytes == moved + p.nbytes(p.result)
    if all(a.before == a.after >= 0 for a in p.axes) and p.pass_ is Pass.FPROP:
        kind = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[p.dims - 1]
        out = kind(
            torch.empty(p.shape("x"), device="meta"), torch.empty(p.shape("w"), device="meta"), None,
            tuple(a.stride for a in p.axes), tuple(a.before for a in p.axes), tuple(a.dilation for a in p.axes),
            p.groups,
        )  # fmt: skip
        assert tuple(out.shape) == p.shape("y")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch=0"),
        ({"in_channels": 5}, "in_channels=5 is not a multiple of groups=2"),
        ({"axes": ()}, "axes: 0 given"),
        ({"dtype": "fp64"}, "dtype='fp64'"),
        ({"precision": "bf16x3"}, "precision='bf16x3'"),
        ({"layouts": ("nchw",) * 3}, "layouts has 'nchw'"),
        ({"bias": True, "pass_": Pass.WGRAD}, "WGRAD has no bias"),
        ({"constant_weight": True, "pass_": Pass.WGRAD}, "WGRAD computes the weight"),
    ],
)
def test_what_makes_no_problem_is_named(change: dict[str, object], text: str) -> None:
    p = ConvProblem(Pass.FPROP, 2, 4, 4, (Axis(9, 3),), 2)
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        replace(p, **change)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0, 3), "size=0"),
        ((5, 0), "kernel=0"),
        ((5, 3, 0), "stride=0"),
        ((5, 3, 1, 0), "dilation=0"),
        ((5, 3, 1, 1, -3, -2), "crops away all 5 inputs"),
        ((5, 3, 1, 3), "reaches over 7 inputs"),
    ],
)
def test_what_makes_no_axis_is_named(values: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Axis(*values)


@pytest.mark.parametrize(
    ("axis", "sizes", "text"),
    [
        ("batch", [1, 2], "sum to batch=4"),
        ("batch", [4, 0], "must be positive"),
        ("h", [1, 1], "axis='h'"),
        ("in_channels", [3, 3], "cuts across groups of 2"),
    ],
)
def test_what_makes_no_split_is_named(axis: str, sizes: list[int], text: str) -> None:
    p = ConvProblem(Pass.FPROP, 4, 6, 6, (Axis(9, 3),), 3)
    with pytest.raises(ValueError, match=text):
        p.split(axis, sizes)


def test_only_dgrad_scatters() -> None:
    p = ConvProblem(Pass.FPROP, 4, 6, 6, (Axis(9, 3),), 3)
    with pytest.raises(ValueError, match="only DGRAD along space scatters"):
        p.split("w", [3, 4], scatter=True)


def test_16_bit_operands_have_one_precision() -> None:
    p = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(3, 3),), dtype="bf16", precision="tf32")
    assert p.precision == "ieee"
