"""Convolutions and their relatives, against loops over every product."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.frontends.caffe.layers.nets import Float64, gradients_agree, layer, numbers, tops
from torch import nn

from tilewise.frontends.caffe.errors import CaffeError

FEW = settings(max_examples=15)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))
    each = lambda least, most: tuple(draw(st.integers(least, most)) for _ in range(axes))  # noqa: E731
    kernel, dilation, pad = each(1, 3), each(1, 2), each(0, 2)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = tuple(max(1, span - 2 * p) + draw(st.integers(0, 3)) for span, p in zip(spans, pad, strict=True))
    group = draw(st.integers(1, 2))
    return {
        "kernel": kernel, "dilation": dilation, "pad": pad, "stride": each(1, 3), "group": group,
        "shape": (draw(st.integers(1, 2)), group * draw(st.integers(1, 2)), *sizes),
        "num_output": group * draw(st.integers(1, 2)), "bias_term": draw(st.booleans()),
    }  # fmt: skip


def fields(p: dict[str, Any]) -> str:
    repeated = {"kernel_size": p["kernel"], "dilation": p["dilation"], "pad": p["pad"], "stride": p["stride"]}
    text = " ".join(f"{name}: {value}" for name, values in repeated.items() for value in values)
    bias = str(p["bias_term"]).lower()
    return f"convolution_param {{ num_output: {p['num_output']} group: {p['group']} bias_term: {bias} {text} }}"


def places(p: dict[str, Any], output: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Where in the larger of both tensors a product of an output's place and a filter's place lies."""
    steps = zip(output, kernel, p["stride"], p["dilation"], p["pad"], strict=True)
    return tuple(o * s + k * d - pad for o, k, s, d, pad in steps)


@FEW
@given(convolutions())
def test_convolution_is_its_sum_of_products(p: dict[str, Any]) -> None:
    made = layer("Convolution", fields(p), p["shape"])
    x = numbers(*p["shape"])
    (found,) = tops(made, x)
    weight, data = made.blob(0).detach().numpy(), x.detach().numpy()
    inside, outside = p["shape"][1] // p["group"], p["num_output"] // p["group"]
    wanted: Float64 = np.zeros(found.shape)
    for n, c, i in itertools.product(range(p["shape"][0]), range(p["num_output"]), range(inside)):
        source = data[n, c // outside * inside + i]
        for output in np.ndindex(*found.shape[2:]):
            for kernel in np.ndindex(*p["kernel"]):
                place = places(p, output, kernel)
                if all(0 <= a < size for a, size in zip(place, source.shape, strict=True)):
                    wanted[(n, c, *output)] += source[place] * weight[(c, i, *kernel)]
    if p["bias_term"]:
        wanted += made.blob(1).detach().numpy().reshape(-1, *[1] * len(p["kernel"]))
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


@FEW
@given(convolutions())
def test_deconvolution_scatters_every_product(p: dict[str, Any]) -> None:
    spans = [d * (k - 1) + 1 for k, d in zip(p["kernel"], p["dilation"], strict=True)]
    sizes = p["shape"][2:]
    steps = zip(sizes, spans, p["stride"], p["pad"], strict=True)
    assume(all(s * (n - 1) + span - 2 * pad >= 1 for n, span, s, pad in steps))
    made = layer("Deconvolution", fields(p), p["shape"])
    x = numbers(*p["shape"])
    (found,) = tops(made, x)
    weight, data = made.blob(0).detach().numpy(), x.detach().numpy()
    inside, outside = p["shape"][1] // p["group"], p["num_output"] // p["group"]
    assert weight.shape == (p["shape"][1], outside, *p["kernel"])
    wanted: Float64 = np.zeros(found.shape)
    for n, c, o in itertools.product(range(p["shape"][0]), range(p["shape"][1]), range(outside)):
        target = wanted[n, c // inside * outside + o]
        for source in np.ndindex(*sizes):
            for kernel in np.ndindex(*p["kernel"]):
                place = places(p, source, kernel)
                if all(0 <= a < size for a, size in zip(place, target.shape, strict=True)):
                    target[place] += data[(n, c, *source)] * weight[(c, o, *kernel)]
    if p["bias_term"]:
        wanted += made.blob(1).detach().numpy().reshape(-1, *[1] * len(p["kernel"]))
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


@FEW
@given(convolutions())
def test_columns_times_filters_are_a_convolution(p: dict[str, Any]) -> None:
    if len(p["kernel"]) != 2:
        p = {**p, **{name: (p[name] * 2)[:2] for name in ("kernel", "dilation", "pad", "stride")}}
        p["shape"] = (*p["shape"][:2], 6, 7)
    x = numbers(*p["shape"])
    single = {**p, "group": 1, "bias_term": False}
    convolved = layer("Convolution", fields(single), p["shape"])
    (wanted,) = tops(convolved, x)
    (columns,) = tops(layer("Im2col", fields(single), p["shape"]), x)
    found = torch.einsum("ok,nkhw->nohw", convolved.blob(0).flatten(1), columns)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_several_bottoms_go_through_the_same_filters() -> None:
    made = layer(
        "Convolution", "convolution_param { num_output: 2 kernel_size: 3 }", (1, 2, 5, 5), (3, 2, 5, 5), tops=2
    )
    x, y = numbers(1, 2, 5, 5), numbers(3, 2, 5, 5)
    first, second = tops(made, x, y)
    torch.testing.assert_close(torch.cat([first, second]), made.get_submodule("conv")(torch.cat([x, y])))


def test_axes_before_the_channels_are_batch() -> None:
    made = layer("Convolution", "convolution_param { num_output: 2 kernel_size: 3 axis: 2 }", (2, 3, 4, 5, 6))
    x = numbers(2, 3, 4, 5, 6)
    (found,) = tops(made, x)
    assert found.shape == (2, 3, 2, 3, 4)
    torch.testing.assert_close(found.flatten(0, 1), made.get_submodule("conv")(x.flatten(0, 1)))


def test_a_planner_finds_torchs_own_modules() -> None:
    made = layer("Convolution", "convolution_param { num_output: 2 kernel_size: 3 }", (1, 2, 5, 5))
    assert [type(module) for module in made.modules()][1:] == [nn.Conv2d]


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("num_output: 2", (1, 2, 5, 5), "kernel_size is not given"),
        ("num_output: 2 kernel_size: 0", (1, 2, 5, 5), "kernel_size"),
        ("num_output: 0 kernel_size: 1", (1, 2, 5, 5), "num_output = 0"),
        ("num_output: 3 kernel_size: 1 group: 2", (1, 2, 5, 5), "group = 2"),
        ("num_output: 2 kernel_size: 1 stride: 0", (1, 2, 5, 5), "stride"),
        ("num_output: 2 kernel_size: 7", (1, 2, 5, 5), "larger"),
        ("num_output: 2 kernel_size: [1, 1, 1]", (1, 2, 5, 5), "2 axes"),
        ("num_output: 2 kernel_h: 1 kernel_w: 1", (1, 2, 5), "two axes"),
        ("num_output: 4000000000 kernel_size: 9", (1, 2, 9, 9), "more than"),
        ('num_output: 2 kernel_size: 1 weight_filler { type: "wild" }', (1, 2, 5, 5), "wild"),
    ],
)
def test_fields_that_do_not_fit_are_named(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CaffeError, match=message):
        layer("Convolution", f"convolution_param {{ {text} }}", shape, random=False).output_shapes([shape])
