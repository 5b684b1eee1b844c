"""Losses, against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import gradients_agree, layer, numbers, tops

from tilewise.frontends.caffe.errors import CaffeError

SHAPE = (4, 3, 2, 5)


def labels() -> torch.Tensor:
    """A label for each place of ``SHAPE``, all three classes among them, as Caffe has them: numbers with a point."""
    return torch.randint(0, 3, (4, 2, 5), dtype=torch.int64, device="cpu").to(torch.float64)


def divisor(mode: str, valid: int) -> int:
    return {"FULL": 40, "VALID": valid, "BATCH_SIZE": 4, "NONE": 1}[mode]


MODES = [
    ("", "VALID"),
    ("normalization: FULL", "FULL"),
    ("normalization: VALID", "VALID"),
    ("normalization: BATCH_SIZE", "BATCH_SIZE"),
    ("normalization: NONE", "NONE"),
    ("normalize: true", "VALID"),
    ("normalize: false", "BATCH_SIZE"),
]


@pytest.mark.parametrize(("fields", "mode"), MODES)
@pytest.mark.parametrize("ignored", [None, 1])
def test_softmax_with_loss_divides_as_it_is_told(fields: str, mode: str, ignored: int | None) -> None:
    ignore = "" if ignored is None else f"ignore_label: {ignored}"
    made = layer("SoftmaxWithLoss", f"loss_param {{ {fields} {ignore} }}", SHAPE, (4, 2, 5), tops=2)
    scores, places = numbers(*SHAPE, least=-3, most=3), labels()
    loss, softmax = tops(made, scores, places)
    data = np.exp(scores.detach().numpy())
    probabilities = data / data.sum(1, keepdims=True)
    terms = [
        -math.log(probabilities[n, int(places[n, i, j]), i, j])
        for n, i, j in np.ndindex(4, 2, 5)
        if int(places[n, i, j]) != ignored
    ]
    assert loss.item() == pytest.approx(sum(terms) / divisor(mode, len(terms)), rel=1e-12)
    assert np.allclose(softmax.detach().numpy(), probabilities, rtol=0, atol=1e-12)
    assert gradients_agree(made, [scores, places])


def test_softmax_with_loss_without_a_counted_label_is_zero() -> None:
    made = layer("SoftmaxWithLoss", "loss_param { ignore_label: 0 }", (2, 3), (2,))
    scores = numbers(2, 3)
    (loss,) = tops(made, scores, torch.zeros(2, dtype=torch.float64, device="cpu"))
    assert loss.item() == 0
    (gradient,) = torch.autograd.grad(loss, scores)
    assert not gradient.any()


def test_softmax_with_loss_takes_no_logarithm_of_less_than_the_smallest_number() -> None:
    scores = torch.tensor([[0.0, 1000.0]], dtype=torch.float64, device="cpu", requires_grad=True)
    (loss,) = tops(layer("SoftmaxWithLoss", "", (1, 2), (1,)), scores, scores.detach()[:, 0])
    assert loss.item() == pytest.approx(-math.log(1.1754943508222875e-38))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.tolist() == [[-1.0, 1.0]]


def test_segnets_class_weights_multiply_each_label() -> None:
    text = "loss_param { weight_by_label_freqs: true class_weighting: [0.5, 1, 4] normalization: NONE }"
    scores, places = numbers(3, 3), torch.arange(3, dtype=torch.float64, device="cpu")
    (loss,) = tops(layer("SoftmaxWithLoss", text, (3, 3), (3,)), scores, places)
    weights = torch.tensor([0.5, 1, 4], dtype=torch.float64, device="cpu")
    torch.testing.assert_close(loss, -(weights * scores.log_softmax(1).diagonal()).sum())


@pytest.mark.parametrize(("fields", "mode"), [("", "BATCH_SIZE"), *MODES[1:]])
@pytest.mark.parametrize("ignored", [None, 1])
def test_sigmoid_cross_entropy_divides_as_it_is_told(fields: str, mode: str, ignored: int | None) -> None:
    ignore = "" if ignored is None else f"ignore_label: {ignored}"
    made = layer("SigmoidCrossEntropyLoss", f"loss_param {{ {fields} {ignore} }}", (4, 10), (4, 10))
    scores = numbers(4, 10, least=-3, most=3)
    targets = torch.randint(0, 2, (4, 10), dtype=torch.int64, device="cpu").to(torch.float64)
    (loss,) = tops(made, scores, targets)
    s = 1 / (1 + np.exp(-scores.detach().numpy()))
    t = targets.numpy()
    terms = -(t * np.log(s) + (1 - t) * np.log(1 - s))[t != ignored]
    assert loss.item() == pytest.approx(terms.sum() / divisor(mode, terms.size), rel=1e-12)
    assert gradients_agree(made, [scores, targets])


def test_euclidean_loss_is_half_the_mean_square_of_images() -> None:
    x, y = numbers(4, 3, 2), numbers(4, 3, 2)
    made = layer("EuclideanLoss", "", (4, 3, 2), (4, 3, 2))
    (loss,) = tops(made, x, y)
    torch.testing.assert_close(loss, (x - y).square().sum() / 8)
    assert gradients_agree(made, [x, y])


@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_hinge_loss_pulls_the_label_up_and_others_down(norm: str) -> None:
    scores = numbers(5, 4, least=-2, most=2)
    places = torch.randint(0, 4, (5,), dtype=torch.int64, device="cpu")
    made = layer("HingeLoss", f"hinge_loss_param {{ norm: {norm} }}", (5, 4), (5,))
    (loss,) = tops(made, scores, places.double())
    total = 0.0
    for n, k in np.ndindex(5, 4):
        margin = max(0.0, 1 - (1 if k == int(places[n]) else -1) * float(scores[n, k].detach()))
        total += margin if norm == "L1" else margin**2
    assert loss.item() == pytest.approx(total / 5)
    assert gradients_agree(made, [scores, places.double()])


def test_multinomial_logistic_loss_takes_probabilities() -> None:
    p = numbers(5, 4, least=0.01, most=1)
    places = torch.randint(0, 4, (5,), dtype=torch.int64, device="cpu")
    made = layer("MultinomialLogisticLoss", "", (5, 4), (5,))
    (loss,) = tops(made, p, places.double())
    assert loss.item() == pytest.approx(-sum(math.log(float(p[n, int(places[n])].detach())) for n in range(5)) / 5)
    assert gradients_agree(made, [p, places.double()])


def test_infogain_loss_weights_all_classes_by_the_labels_row() -> None:
    scores, matrix, places = numbers(*SHAPE), numbers(3, 3, least=0, grad=False), labels()
    made = layer("InfogainLoss", "", SHAPE, (4, 2, 5), (3, 3))
    (loss,) = tops(made, scores, places, matrix)
    logs = scores.log_softmax(1)
    total = sum(
        float(-(matrix[int(places[n, i, j])] * logs[n, :, i, j]).sum().detach()) for n, i, j in np.ndindex(4, 2, 5)
    )
    assert loss.item() == pytest.approx(total / 40)
    assert gradients_agree(made, [scores, places, matrix])


@pytest.mark.parametrize("legacy", [False, True])
def test_contrastive_loss_draws_similar_pairs_together(legacy: bool) -> None:
    x, y = numbers(6, 3), numbers(6, 3)
    similar = torch.tensor([1, 0] * 3, dtype=torch.float64, device="cpu")
    text = f"contrastive_loss_param {{ margin: 1.5 legacy_version: {str(legacy).lower()} }}"
    made = layer("ContrastiveLoss", text, (6, 3), (6, 3), (6,))
    (loss,) = tops(made, x, y, similar)
    total = 0.0
    for n in range(6):
        square = float((x[n] - y[n]).square().sum())
        apart = max(0.0, 1.5 - square) if legacy else max(0.0, 1.5 - math.sqrt(square)) ** 2
        total += square if similar[n] else apart
    assert loss.item() == pytest.approx(total / 12)
    (gradient,) = torch.autograd.grad(loss, x)
    # Caffe adds 0.0001 to the distance by which it divides.
    for n in range(6):
        difference = (x[n] - y[n]).detach()
        distance = float(difference.norm())
        if similar[n]:
            factor = 1.0
        elif legacy:
            factor = -1.0 if distance**2 < 1.5 else 0.0
        else:
            factor = -max(0.0, 1.5 - distance) / (distance + 1e-4)
        torch.testing.assert_close(gradient[n], factor * difference / 6)


def test_contrastive_loss_of_equal_pairs_has_a_finite_gradient() -> None:
    x = numbers(2, 3)
    text = "contrastive_loss_param { margin: 1 }"
    (loss,) = tops(layer("ContrastiveLoss", text, (2, 3), (2, 3), (2,)), x, x.detach(), x.detach()[:, 0] * 0)
    (gradient,) = torch.autograd.grad(loss, x)
    assert not gradient.any()


@pytest.mark.parametrize("weights", [0, 1, 2])
def test_smooth_l1_loss_is_square_near_zero_and_straight_beyond(weights: int) -> None:
    bottoms = [numbers(4, 3, least=-2, most=2), numbers(4, 3, least=-2, most=2)]
    bottoms += [numbers(4, 3, least=0.1, most=2, grad=False) for _ in range(weights)]
    made = layer("SmoothL1Loss", "smooth_l1_loss_param { sigma: 2 }", *[(4, 3)] * len(bottoms))
    (loss,) = tops(made, *bottoms)
    total = 0.0
    for place in np.ndindex(4, 3):
        x, y, *given = (float(b[place]) for b in bottoms)
        d = abs((x - y) * (given[0] if given else 1))
        value = 2 * d * d if d < 0.25 else d - 0.125
        total += value * (given[1] if len(given) > 1 else 1)
    assert loss.item() == pytest.approx(total / 4)
    assert gradients_agree(made, bottoms)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("SoftmaxWithLoss", [(2, 3), (3,)]),
        ("EuclideanLoss", [(2, 3), (2, 4)]),
        ("HingeLoss", [(2, 3), (2, 3)]),
        ("SigmoidCrossEntropyLoss", [(2, 3), (2, 2)]),
        ("InfogainLoss", [(2, 3), (2,), (2, 2)]),
        ("ContrastiveLoss", [(2, 3), (2, 3), (3,)]),
    ],
)
def test_shapes_that_do_not_fit_are_named(kind: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(CaffeError, match="shape") as error:
        layer(kind, "", *shapes).output_shapes(shapes)
    assert f"({kind})" in str(error.value)
