"""Pooling, against loops over windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.frontends.caffe.layers.nets import Float64, gradients_agree, layer, numbers, tops

from tilewise.frontends.caffe.errors import CaffeError

FEW = settings(max_examples=25)
SIZES = st.fixed_dictionaries(
    {
        "size": st.tuples(st.integers(1, 11), st.integers(1, 11)),
        "kernel": st.tuples(st.integers(1, 5), st.integers(1, 5)),
        "stride": st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "pad": st.tuples(st.integers(0, 4), st.integers(0, 4)),
        "floor": st.booleans(),
    }
)


def window_starts(size: int, kernel: int, stride: int, pad: int, any_pad: bool, floor: bool) -> list[int]:
    """Where Caffe's windows begin along one axis."""
    round_ = math.floor if floor else math.ceil
    count = round_((size + 2 * pad - kernel) / stride) + 1
    if any_pad and (count - 1) * stride >= size + pad:
        count -= 1
    return [place * stride - pad for place in range(count)]


def fields(windows: dict[str, Any], pool: str) -> str:
    (kh, kw), (sh, sw), (ph, pw) = windows["kernel"], windows["stride"], windows["pad"]
    mode = "round_mode: FLOOR" if windows["floor"] else ""
    return (
        f"pooling_param {{ pool: {pool} kernel_h: {kh} kernel_w: {kw} stride_h: {sh} stride_w: {sw} "
        f"pad_h: {ph} pad_w: {pw} {mode} }}"
    )


def drawn(windows: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The starts of the windows along both axes; draws without any, or that Caffe refuses, are left out."""
    assume(all(p < k for p, k in zip(windows["pad"], windows["kernel"], strict=True)))
    starts = [
        window_starts(n, k, s, p, max(windows["pad"]) > 0, windows["floor"])
        for n, k, s, p in zip(windows["size"], windows["kernel"], windows["stride"], windows["pad"], strict=True)
    ]
    assume(all(starts))
    # Beyond the image lies nothing to take the maximum of, and Caffe's mean divides by 0 or less there.
    assume(all(axis[-1] < n for axis, n in zip(starts, windows["size"], strict=True)))
    return starts[0], starts[1]


@FEW
@given(SIZES)
def test_maxima_and_their_places_are_those_of_a_loop(windows: dict[str, Any]) -> None:
    rows, columns = drawn(windows)
    (height, width), (kh, kw) = windows["size"], windows["kernel"]
    x = numbers(2, 3, height, width)
    planes = x.detach().numpy()
    values: Float64 = np.zeros((2, 3, len(rows), len(columns)))
    places = np.zeros_like(values)
    for image, channel, i, j in np.ndindex(*values.shape):
        top, left = rows[i], columns[j]
        plane = planes[image, channel, max(0, top) : top + kh, max(0, left) : left + kw]
        r, c = np.unravel_index(plane.argmax(), plane.shape)
        values[image, channel, i, j] = plane[r, c]
        places[image, channel, i, j] = (max(0, top) + int(r)) * width + max(0, left) + int(c)
    pooled = layer("Pooling", fields(windows, "MAX"), (2, 3, height, width), tops=2)
    found, mask = tops(pooled, x)
    assert np.array_equal(found.detach().numpy(), values)
    assert np.array_equal(mask.numpy(), places)
    (alone,) = tops(layer("Pooling", fields(windows, "MAX"), (2, 3, height, width)), x)
    assert torch.equal(alone, found)
    (gradient,) = torch.autograd.grad(alone.sum(), x)
    wanted = np.zeros((2, 3, height * width))
    for image, channel, i, j in np.ndindex(*values.shape):
        wanted[image, channel, int(places[image, channel, i, j])] += 1
    assert np.array_equal(gradient.numpy().reshape(wanted.shape), wanted)


@FEW
@given(SIZES)
def test_means_divide_by_the_window_with_its_padding_but_not_beyond(windows: dict[str, Any]) -> None:
    rows, columns = drawn(windows)
    (height, width), (kh, kw), (ph, pw) = windows["size"], windows["kernel"], windows["pad"]
    x = numbers(1, 2, height, width)
    planes = x.detach().numpy()
    wanted = np.zeros((1, 2, len(rows), len(columns)))
    for channel, i, j in np.ndindex(*wanted.shape[1:]):
        top, left = rows[i], columns[j]
        area = (min(top + kh, height + ph) - top) * (min(left + kw, width + pw) - left)
        total = planes[0, channel, max(0, top) : top + kh, max(0, left) : left + kw].sum()
        wanted[0, channel, i, j] = total / area
    pooled = layer("Pooling", fields(windows, "AVE"), (1, 2, height, width))
    (found,) = tops(pooled, x)
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(pooled, [x])


def test_a_window_that_begins_beyond_the_padding_is_left_out() -> None:
    # 7 with a kernel of 2, a stride of 3 and a padding of 1: rounded up 4 windows, and the last begins at 8.
    pooled = layer("Pooling", "pooling_param { kernel_size: 2 stride: 3 pad: 1 }", (1, 1, 7, 7))
    assert pooled.output_shapes([(1, 1, 7, 7)]) == [(1, 1, 3, 3)]
    assert pooled.output_shapes([(1, 1, 6, 6)]) == [(1, 1, 3, 3)]


@pytest.mark.parametrize("pool", ["MAX", "AVE"])
def test_global_pooling_follows_the_image(pool: str) -> None:
    pooled = layer("Pooling", f"pooling_param {{ pool: {pool} global_pooling: true }}", (2, 3, 5, 7))
    for shape in ((2, 3, 5, 7), (1, 3, 2, 9)):
        x = numbers(*shape)
        (found,) = tops(pooled, x)
        wanted = x.amax((2, 3), keepdim=True) if pool == "MAX" else x.mean((2, 3), keepdim=True)
        torch.testing.assert_close(found, wanted)


def test_stochastic_pooling_draws_in_proportion_and_tests_with_the_weighted_mean() -> None:
    text = "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"
    x = torch.tensor([[1.0, 3.0], [0.0, 4.0]], dtype=torch.float64, device="cpu").reshape(1, 1, 2, 2)
    (mean,) = tops(layer("Pooling", text, (1, 1, 2, 2)), x)
    assert mean.item() == pytest.approx(26 / 8)
    many = x.expand(4000, 1, 2, 2)
    (drawn_,) = tops(layer("Pooling", text, (4000, 1, 2, 2), phase="train"), many)
    assert set(drawn_.unique().tolist()) == {1.0, 3.0, 4.0}
    # Four standard deviations of a share of 4000 draws are 0.032 at most.
    for value, share in ((1.0, 1 / 8), (3.0, 3 / 8), (4.0, 4 / 8)):
        assert (drawn_ == value).double().mean().item() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel_size: 2 pad: 2", "less than kernel_size"),
        ("kernel_size: 0", "at least 1"),
        ("kernel_size: 2 stride: 0", "at least 1"),
        ("global_pooling: true kernel_size: 2", "takes no kernel_size"),
        ("global_pooling: true pad: 1", "pad = 0"),
        ("pool: STOCHASTIC kernel_size: 2 pad: 1", "takes none"),
        ("kernel_h: 2", "either the first alone"),
    ],
)
def test_fields_that_do_not_fit_are_named(text: str, message: str) -> None:
    with pytest.raises(CaffeError, match=message) as error:
        layer("Pooling", f"pooling_param {{ {text} }}", (1, 1, 4, 4))
    assert "layer 'it' (Pooling)" in str(error.value)


@FEW
@given(st.integers(1, 3), st.integers(8, 20), st.integers(8, 20), st.sampled_from(["MAX", "AVE"]))
def test_a_pyramid_is_its_levels_one_after_the_other(height: int, rows: int, columns: int, pool: str) -> None:
    x = numbers(2, 3, rows, columns)
    pyramid = layer("SPP", f"spp_param {{ pyramid_height: {height} pool: {pool} }}", (2, 3, rows, columns))
    (found,) = tops(pyramid, x)
    parts = []
    for level in range(height):
        kernels = [math.ceil(size / 2**level) for size in (rows, columns)]
        pads = [(k * 2**level - size + 1) // 2 for k, size in zip(kernels, (rows, columns), strict=True)]
        windows = {"kernel": kernels, "stride": kernels, "pad": pads, "floor": False}
        parts += [y.flatten(1) for y in tops(layer("Pooling", fields(windows, pool), (2, 3, rows, columns)), x)]
    torch.testing.assert_close(found.flatten(1), torch.cat(parts, 1))


def test_upsampling_puts_values_back_where_pooling_found_them() -> None:
    x = numbers(2, 3, 6, 8)
    found, places = tops(layer("Pooling", "pooling_param { kernel_size: 2 stride: 2 }", (2, 3, 6, 8), tops=2), x)
    back = layer("Upsample", "upsample_param { scale: 2 }", (2, 3, 3, 4), (2, 3, 3, 4))
    (y,) = tops(back, found, places)
    kept = y != 0
    assert torch.equal(y[kept], x[kept])
    assert int(kept.sum()) == found.numel()
    assert gradients_agree(back, [numbers(2, 3, 3, 4), places])
