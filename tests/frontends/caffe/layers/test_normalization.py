"""Layers that normalise, scale and shift, against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frontends.caffe.layers.nets import gradients_agree, layer, numbers, tops

from tilewise.frontends.caffe.errors import CaffeError

SHAPE = (3, 4, 5, 6)


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([1, 3, 5, 9]), st.sampled_from([0.5, 0.75]), st.sampled_from([1.0, 2.0]))
def test_lrn_divides_by_the_squares_of_neighbouring_channels(channels: int, size: int, beta: float, k: float) -> None:
    x = numbers(2, channels, 3, 2)
    made = layer("LRN", f"lrn_param {{ local_size: {size} alpha: 0.5 beta: {beta} k: {k} }}", (2, channels, 3, 2))
    (found,) = tops(made, x)
    data = x.detach().numpy()
    wanted = np.empty_like(data)
    for c in range(channels):
        near = data[:, max(0, c - size // 2) : c + size // 2 + 1]
        wanted[:, c] = data[:, c] / (k + 0.5 / size * (near**2).sum(1)) ** beta
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


def test_lrn_within_a_channel_takes_the_mean_square_of_a_window() -> None:
    x = numbers(2, 3, 5, 4)
    fields = "lrn_param { local_size: 3 alpha: 0.5 beta: 0.75 k: 7 norm_region: WITHIN_CHANNEL }"
    made = layer("LRN", fields, (2, 3, 5, 4))
    (found,) = tops(made, x)
    data = x.detach().numpy()
    padded = np.pad(data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    for n, c, i, j in np.ndindex(*data.shape):
        mean = (padded[n, c, i : i + 3, j : j + 3] ** 2).sum() / 9
        assert found[n, c, i, j].item() == pytest.approx(data[n, c, i, j] / (1 + 0.5 * mean) ** 0.75)
    assert gradients_agree(made, [x])


def test_batchnorm_in_training_sums_statistics_and_divides_by_the_third_blob() -> None:
    made = layer(
        "BatchNorm", "batch_norm_param { moving_average_fraction: 0.5 eps: 0.25 }", SHAPE, phase="train", random=False
    )
    means, variances, factor = np.zeros(4), np.zeros(4), 0.0
    for _ in range(3):
        x = numbers(*SHAPE)
        (found,) = tops(made, x)
        data = x.detach().numpy().transpose(1, 0, 2, 3).reshape(4, -1)
        normal = (data - data.mean(1, keepdims=True)) / np.sqrt(data.var(1, keepdims=True) + 0.25)
        assert np.allclose(found.detach().numpy().transpose(1, 0, 2, 3).reshape(4, -1), normal, rtol=0, atol=1e-12)
        means, variances, factor = 0.5 * means + data.mean(1), 0.5 * variances + data.var(1, ddof=1), 0.5 * factor + 1
    for blob, wanted in zip(made.blobs, (means, variances, np.array([factor])), strict=True):
        assert np.allclose(blob.numpy(), wanted, rtol=1e-12, atol=1e-12)
        assert not blob.requires_grad
    made.eval()
    (found,) = tops(made, x)
    shape = (1, 4, 1, 1)
    wanted = (x.detach().numpy() - (means / factor).reshape(shape)) / np.sqrt(
        (variances / factor).reshape(shape) + 0.25
    )
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


def test_batchnorm_with_a_third_blob_of_zero_has_mean_and_variance_zero() -> None:
    made = layer("BatchNorm", "batch_norm_param { eps: 0.25 }", SHAPE)
    with torch.no_grad():
        made.blob(2).zero_()
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    torch.testing.assert_close(found, x / 0.5)


@pytest.mark.parametrize(
    ("fields", "phase"), [("use_global_stats: true", "train"), ("use_global_stats: false", "test")]
)
def test_batchnorm_takes_the_statistics_that_it_is_told_to(fields: str, phase: str) -> None:
    made = layer("BatchNorm", f"batch_norm_param {{ {fields} }}", SHAPE, phase=phase, random=False)  # type: ignore[arg-type]
    with torch.no_grad():
        made.blob(1).fill_(1)
        made.blob(2).fill_(1)
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    batch = F.batch_norm(x, None, None, training=True, eps=1e-5)
    if "true" in fields:
        torch.testing.assert_close(found, x / math.sqrt(1 + float(np.float32(1e-5))))
        assert made.blob(2).item() == 1
    else:
        torch.testing.assert_close(found, batch)
    assert gradients_agree(made, [x])


def test_pspnets_bn_keeps_running_statistics() -> None:
    made = layer("BN", "bn_param { momentum: 0.75 eps: 0.25 }", SHAPE, phase="train", random=False)
    assert [tuple(blob.shape) for blob in made.blobs] == [(1, 4, 1, 1)] * 4
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    data = x.detach().numpy()
    mean, variance = data.mean((0, 2, 3), keepdims=True), data.var((0, 2, 3), keepdims=True)
    assert np.allclose(found.detach().numpy(), (data - mean) / np.sqrt(variance + 0.25), rtol=0, atol=1e-12)
    assert np.allclose(made.blob(2).numpy(), 0.25 * mean, rtol=0, atol=1e-12)
    assert np.allclose(made.blob(3).numpy(), 0.75 + 0.25 * variance, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])
    made.eval()
    with torch.no_grad():
        made.blob(0).fill_(2)
        made.blob(1).fill_(3)
    (found,) = tops(made, x)
    wanted = 2 * (data - made.blob(2).numpy()) / np.sqrt(made.blob(3).numpy() + 0.25) + 3
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)


def test_segnets_bn_takes_the_batch_or_nothing() -> None:
    x = numbers(*SHAPE)
    learned = layer("BN", "bn_param { scale_filler { value: 1 } shift_filler { value: 0.5 } }", SHAPE, random=False)
    (found,) = tops(learned, x)
    torch.testing.assert_close(found, F.batch_norm(x, None, None, training=True, eps=1e-9) + 0.5)
    merged = layer("BN", "bn_param { bn_mode: INFERENCE }", SHAPE)
    (found,) = tops(merged, x)
    torch.testing.assert_close(found, x * merged.blob(0) + merged.blob(1))
    assert gradients_agree(merged, [x])


@pytest.mark.parametrize(
    ("fields", "shape"),
    [("", (4,)), ("axis: 0 num_axes: 2", (3, 4)), ("axis: -2 num_axes: -1", (5, 6)), ("num_axes: 0", ())],
)
def test_scale_and_bias_repeat_their_blob_along_other_axes(fields: str, shape: tuple[int, ...]) -> None:
    x = numbers(*SHAPE)
    scale = layer("Scale", f"scale_param {{ {fields} bias_term: true }}", SHAPE)
    bias = layer("Bias", f"bias_param {{ {fields} }}", SHAPE)
    assert [tuple(blob.shape) for blob in (*scale.blobs, *bias.blobs)] == [shape] * 3
    first = {(4,): 1, (3, 4): 0, (5, 6): 2, (): 0}[shape]
    wide = (*shape, *(1,) * (4 - first - len(shape)))
    (scaled,), (shifted,) = tops(scale, x), tops(bias, x)
    torch.testing.assert_close(scaled, x * scale.blob(0).reshape(wide) + scale.blob(1).reshape(wide))
    torch.testing.assert_close(shifted, x + bias.blob(0).reshape(wide))
    assert gradients_agree(scale, [x])
    assert gradients_agree(bias, [x])


def test_scale_and_bias_take_a_second_bottom() -> None:
    x, y = numbers(*SHAPE), numbers(3, 4)
    for kind, wanted in (("Scale", x * y[..., None, None]), ("Bias", x + y[..., None, None])):
        made = layer(kind, f"{kind.lower()}_param {{ axis: 0 }}", SHAPE, (3, 4))
        (found,) = tops(made, x, y)
        torch.testing.assert_close(found, wanted)
        assert not made.blobs
        assert gradients_agree(made, [x, y])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("divide", [False, True])
def test_mvn_has_no_mean_and_a_deviation_of_one(across: bool, divide: bool) -> None:
    text = f"mvn_param {{ across_channels: {str(across).lower()} normalize_variance: {str(divide).lower()} eps: 0.5 }}"
    made = layer("MVN", text, SHAPE)
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    rows = x.detach().numpy().reshape((3, -1) if across else (12, -1))
    wanted = rows - rows.mean(1, keepdims=True)
    if divide:
        wanted = wanted / (rows.std(1, keepdims=True) + 0.5)
    assert np.allclose(found.detach().numpy(), wanted.reshape(SHAPE), rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


def test_mvn_of_a_constant_image_is_zero_with_a_finite_gradient() -> None:
    x = torch.ones(1, 1, 2, 2, dtype=torch.float64, device="cpu", requires_grad=True)
    (found,) = tops(layer("MVN", "", (1, 1, 2, 2)), x)
    assert not found.any()
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_normalize_divides_by_the_euclidean_length(everywhere: bool, shared: bool) -> None:
    fields = f"across_spatial: {str(everywhere).lower()} channel_shared: {str(shared).lower()} eps: 0.25"
    made = layer("Normalize", f"norm_param {{ {fields} }}", SHAPE)
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    data = x.detach().numpy()
    lengths = np.sqrt((data**2).sum((1, 2, 3) if everywhere else 1, keepdims=True) + 0.25)
    wanted = data / lengths * made.blob(0).detach().numpy().reshape(1, -1, 1, 1)
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("LRN", "lrn_param { local_size: 4 }", "odd"),
        ("Scale", "scale_param { axis: 3 num_axes: 2 }", "beyond"),
        ("Bias", "bias_param { axis: 5 }", "axis = 5"),
        ("Scale", "scale_param { num_axes: -2 }", "num_axes = -2"),
    ],
)
def test_fields_that_do_not_fit_are_named(kind: str, fields: str, message: str) -> None:
    with pytest.raises(CaffeError, match=message):
        layer(kind, fields, SHAPE)
