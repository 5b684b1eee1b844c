"""Layers that treat each element by itself or combine equal places, against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import Float64, gradients_agree, layer, numbers, tops

from tilewise.frontends.caffe.errors import CaffeError

SHAPE = (2, 3, 4, 5)
ONE: list[tuple[str, str, float, float, Callable[[Float64], Float64]]] = [
    ("ReLU", "", -2, 2, lambda x: np.maximum(x, 0)),
    ("ReLU", "relu_param { negative_slope: 0.25 }", -2, 2, lambda x: np.where(x > 0, x, 0.25 * x)),
    ("ReLU6", "", -4, 9, lambda x: np.clip(x, 0, 6)),
    ("ELU", "elu_param { alpha: 0.5 }", -2, 2, lambda x: np.where(x > 0, x, 0.5 * (np.exp(x) - 1))),
    ("Sigmoid", "", -4, 4, lambda x: 1 / (1 + np.exp(-x))),
    ("TanH", "", -3, 3, np.tanh),
    ("Swish", "swish_param { beta: 2 }", -3, 3, lambda x: x / (1 + np.exp(-2 * x))),
    ("AbsVal", "", -3, 3, np.abs),
    ("BNLL", "", -60, 60, lambda x: np.logaddexp(0, x)),
    ("Power", "power_param { power: 3 scale: 0.5 shift: 1 }", -2, 2, lambda x: (1 + 0.5 * x) ** 3),
    ("Power", "power_param { power: 0.5 scale: 2 shift: 1 }", 0, 2, lambda x: np.sqrt(1 + 2 * x)),
    ("Power", "power_param { scale: 2 shift: -1 }", -2, 2, lambda x: 2 * x - 1),
    ("Exp", "", -2, 2, np.exp),
    ("Exp", "exp_param { base: 2 scale: 3 shift: -1 }", -1, 1, lambda x: 2.0 ** (3 * x - 1)),
    ("Log", "log_param { scale: 2 shift: 1 }", 0, 3, lambda x: np.log(1 + 2 * x)),
    ("Log", "log_param { base: 10 }", 0.1, 3, np.log10),
    ("Clip", "clip_param { min: -0.5 max: 1.5 }", -2, 2, lambda x: np.clip(x, -0.5, 1.5)),
    ("Softmax", "", -2, 2, lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    ("Softmax", "softmax_param { axis: -1 }", -2, 2, lambda x: np.exp(x) / np.exp(x).sum(3, keepdims=True)),
    ("Dropout", "", -2, 2, lambda x: x),
    ("Dropout", "dropout_param { dropout_ratio: 0.25 scale_train: false }", -2, 2, lambda x: 0.75 * x),
]


@pytest.mark.parametrize(("kind", "fields", "least", "most", "formula"), ONE)
def test_a_layer_is_its_formula(
    kind: str, fields: str, least: float, most: float, formula: Callable[[Float64], Float64]
) -> None:
    x = numbers(*SHAPE, least=least, most=most)
    made = layer(kind, fields, SHAPE)
    (found,) = tops(made, x)
    # Fields are float32 in Caffe's messages; those here are exact in it.
    assert np.allclose(found.detach().numpy(), formula(x.detach().numpy()), rtol=1e-12, atol=1e-12)
    assert gradients_agree(made, [x])


def test_powers_without_a_slope_are_constant_even_at_zero() -> None:
    x = torch.zeros(3, dtype=torch.float64, device="cpu", requires_grad=True)
    for fields, value in (("power: 0", 1.0), ("power: 2 scale: 0 shift: 3", 9.0)):
        (found,) = tops(layer("Power", f"power_param {{ {fields} }}", (3,)), x)
        assert found.tolist() == [value] * 3
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert gradient.tolist() == [0.0] * 3


def test_a_threshold_is_passed_by_what_is_above_it() -> None:
    x = torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64, device="cpu", requires_grad=True)
    (found,) = tops(layer("Threshold", "threshold_param { threshold: 0.5 }", (3,)), x)
    assert found.tolist() == [0.0, 0.0, 1.0]
    assert not found.requires_grad


@pytest.mark.parametrize("shared", [False, True])
def test_prelu_has_a_slope_for_each_channel_or_one(shared: bool) -> None:
    made = layer("PReLU", f"prelu_param {{ channel_shared: {str(shared).lower()} }}", SHAPE)
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    slopes = made.blob(0).detach().numpy().reshape((1, -1, 1, 1))
    assert slopes.size == (1 if shared else 3)
    data = x.detach().numpy()
    assert np.allclose(found.detach().numpy(), np.where(data > 0, data, slopes * data), rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])
    assert layer("PReLU", "", SHAPE, random=False).blob(0).unique().tolist() == [0.25]


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    x = torch.ones(100, 100, dtype=torch.float64, device="cpu")
    (found,) = tops(layer("Dropout", "dropout_param { dropout_ratio: 0.25 }", (100, 100), phase="train"), x)
    assert set(found.unique().tolist()) == {0.0, 1 / 0.75}
    assert (found == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    text = "dropout_param { dropout_ratio: 0.25 scale_train: false }"
    (unscaled,) = tops(layer("Dropout", text, (100, 100), phase="train"), x)
    assert set(unscaled.unique().tolist()) == {0.0, 1.0}
    text = "dropout_param { sample_weights_test: true }"
    (sampled,) = tops(layer("Dropout", text, (100, 100), phase="test"), x)
    assert set(sampled.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("fields", "formula"),
    [
        ("", lambda a, b, c: a + b + c),
        ("eltwise_param { coeff: [1, -2, 0.5] }", lambda a, b, c: a - 2 * b + 0.5 * c),
        ("eltwise_param { operation: PROD }", lambda a, b, c: a * b * c),
        ("eltwise_param { operation: MAX }", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    ],
)
def test_eltwise_combines_equal_places(fields: str, formula: Callable[..., Float64]) -> None:
    bottoms = [x.detach().requires_grad_() for x in numbers(3, *SHAPE)]  # all different, so that no maximum is a tie
    made = layer("Eltwise", fields, SHAPE, SHAPE, SHAPE)
    (found,) = tops(made, *bottoms)
    wanted = formula(*(x.detach().numpy() for x in bottoms))
    assert np.allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert gradients_agree(made, bottoms)


def test_the_gradient_of_equal_maxima_goes_to_the_second_bottom() -> None:
    x = [torch.zeros(2, dtype=torch.float64, device="cpu", requires_grad=True) for _ in range(3)]
    (found,) = tops(layer("Eltwise", "eltwise_param { operation: MAX }", (2,), (2,), (2,)), *x)
    gradients = torch.autograd.grad(found.sum(), x)
    assert [gradient.tolist() for gradient in gradients] == [[0, 0], [1, 1], [0, 0]]


def test_axpy_scales_channels_and_adds() -> None:
    a, x, y = numbers(2, 3, 1, 1), numbers(*SHAPE), numbers(*SHAPE)
    made = layer("Axpy", "", (2, 3, 1, 1), SHAPE, SHAPE)
    (found,) = tops(made, a, x, y)
    torch.testing.assert_close(found, a * x + y)
    assert gradients_agree(made, [a, x, y])


@pytest.mark.parametrize(
    ("operation", "formula"),
    [
        ("SUM", lambda rows: rows.sum(-1)),
        ("ASUM", lambda rows: np.abs(rows).sum(-1)),
        ("SUMSQ", lambda rows: (rows**2).sum(-1)),
        ("MEAN", lambda rows: rows.mean(-1)),
    ],
)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_reduction_takes_all_axes_behind(operation: str, axis: int, formula: Callable[[Float64], Float64]) -> None:
    made = layer("Reduction", f"reduction_param {{ operation: {operation} axis: {axis} coeff: 0.5 }}", SHAPE)
    x = numbers(*SHAPE)
    (found,) = tops(made, x)
    rows = x.detach().numpy().reshape((*SHAPE[: axis % 4], -1))
    assert np.allclose(found.detach().numpy(), 0.5 * formula(rows), rtol=0, atol=1e-12)
    assert gradients_agree(made, [x])


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_argmax_gives_places_or_values_in_falling_order(values: bool, top_k: int) -> None:
    x = numbers(*SHAPE)
    fields = f"out_max_val: {str(values).lower()} top_k: {top_k}"
    data = x.detach().numpy()
    (along,) = tops(layer("ArgMax", f"argmax_param {{ {fields} axis: 1 }}", SHAPE), x)
    order = np.argsort(-data, axis=1)[:, :top_k]
    assert np.array_equal(along.numpy(), np.take_along_axis(data, order, 1) if values else order)
    (whole,) = tops(layer("ArgMax", f"argmax_param {{ {fields} }}", SHAPE), x)
    rows = data.reshape(2, -1)
    order = np.argsort(-rows, axis=1)[:, :top_k]
    parts = [order, np.take_along_axis(rows, order, 1)] if values else [order]
    assert np.array_equal(whole.numpy(), np.stack(parts, 1)[..., None])


def test_argmax_takes_the_later_of_equal_values() -> None:
    x = torch.zeros(1, 4, dtype=torch.float64, device="cpu")
    (found,) = tops(layer("ArgMax", "argmax_param { top_k: 2 }", (1, 4)), x)
    assert found.tolist() == [[[3.0, 2.0]]]


@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("top_k", [1, 2])
def test_accuracy_counts_labels_among_the_best(ignored: int | None, top_k: int) -> None:
    scores = numbers(4, 3, 2, 5)
    labels = torch.randint(0, 3, (4, 2, 5), dtype=torch.int64, device="cpu")
    text = f"accuracy_param {{ top_k: {top_k} {'' if ignored is None else f'ignore_label: {ignored}'} }}"
    made = layer("Accuracy", text, (4, 3, 2, 5), (4, 2, 5), tops=2)
    share, classes = tops(made, scores, labels.double())
    hits, counts = np.zeros(3), np.zeros(3)
    for n, i, j in np.ndindex(4, 2, 5):
        label = int(labels[n, i, j])
        if label != ignored:
            row = scores[n, :, i, j].detach().numpy()
            counts[label] += 1
            hits[label] += label in np.argsort(-row)[:top_k]
    assert share.item() == pytest.approx(hits.sum() / counts.sum())
    assert np.allclose(classes.numpy(), hits / np.maximum(counts, 1))


def test_a_class_that_scores_as_high_as_the_label_counts_as_better() -> None:
    scores = torch.zeros(1, 2, dtype=torch.float64, device="cpu")
    (share,) = tops(layer("Accuracy", "", (1, 2), (1,)), scores, scores[:, 0])
    assert share.item() == 0.0


@pytest.mark.parametrize(
    ("kind", "fields", "shapes", "message"),
    [
        ("Eltwise", "", [(2, 3), (2, 4)], "must have the same"),
        ("Eltwise", "eltwise_param { coeff: 1 }", [(2, 3), (2, 3)], "one for each"),
        ("Eltwise", "eltwise_param { coeff: [1, 1] operation: MAX }", [(2, 3), (2, 3)], "belongs to operation"),
        ("Dropout", "dropout_param { dropout_ratio: 1 }", [(2, 3)], "between 0 and 1"),
        ("Log", "log_param { base: 0 }", [(2, 3)], "base = 0"),
        ("Exp", "exp_param { base: -2 }", [(2, 3)], "base = -2"),
        ("Softmax", "softmax_param { axis: 2 }", [(2, 3)], "axis = 2"),
        ("ArgMax", "argmax_param { top_k: 4 }", [(2, 3)], "top_k = 4"),
        ("Accuracy", "accuracy_param { top_k: 4 }", [(2, 3), (2,)], "top_k = 4"),
        ("ReLU", "", [(2, 3), (2, 3)], "it has 2 bottoms; 1 would do"),
    ],
)
def test_what_does_not_fit_is_named(kind: str, fields: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(CaffeError, match=message):
        layer(kind, fields, *shapes).output_shapes(shapes)
