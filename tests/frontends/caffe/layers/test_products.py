"""Inner products, embeddings, products with an angular margin, and regions of interest, against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import layer, numbers, tops
from torch import nn

from tilewise.frontends.caffe import CaffeError


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("axis", "bias"), [(1, True), (2, False), (-1, True)])
def test_inner_product_multiplies_what_is_behind_an_axis(transpose: bool, axis: int, bias: bool) -> None:
    fields = (
        f"inner_product_param {{ num_output: 3 axis: {axis} transpose: {str(transpose).lower()} "
        f"bias_term: {str(bias).lower()} }}"
    )
    x = numbers(2, 4, 5)
    made = layer("InnerProduct", fields, x.shape)
    (y,) = tops(made, x)
    first = axis % 3
    w = made.blob(0).detach().numpy()
    rows = x.detach().numpy().reshape(*x.shape[:first], -1)
    wanted = rows @ (w if transpose else w.T) + (made.blob(1).detach().numpy() if bias else 0)
    np.testing.assert_allclose(y.detach().numpy(), wanted, atol=1e-12)
    assert torch.autograd.gradcheck(made, (x,))
    assert any(isinstance(module, nn.Linear) for module in made.modules()) is not transpose
    with pytest.raises(CaffeError, match="values behind axis"):
        made.output_shapes([(2, 4, 6)])


def test_embed_looks_rows_up() -> None:
    places = torch.tensor([[0.0, 3.0], [3.0, 1.0]]).double()
    made = layer("Embed", "embed_param { num_output: 3 input_dim: 4 }", (2, 2))
    (y,) = tops(made, places)
    w, b = (blob.detach().numpy() for blob in made.blobs)
    np.testing.assert_allclose(y.detach().numpy(), w[places.long().numpy()] + b, atol=1e-12)
    (gradient,) = torch.autograd.grad(y.sum(), made.blob(0))
    np.testing.assert_array_equal(gradient.numpy(), np.array([1, 1, 0, 2])[:, None] * np.ones(3))


@pytest.mark.parametrize(("kind", "m"), [("SINGLE", 1), ("DOUBLE", 2), ("TRIPLE", 3), ("QUADRUPLE", 4)])
def test_the_angle_to_the_own_class_counts_m_times(kind: str, m: int) -> None:
    fields = (
        f"margin_inner_product_param {{ num_output: 4 type: {kind} base: 3 gamma: 0.5 power: 1 lambda_min: 0.25 "
        "iteration: 6 }"
    )
    x, labels = numbers(5, 3), torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0]).double()
    made = layer("MarginInnerProduct", fields, (5, 3), (5,), tops=2)
    y, share = tops(made, x, labels)
    assert float(share) == max(3 * (1 + 0.5 * 6) ** -1, 0.25)
    w = made.blob(0).detach().numpy()
    w = w / np.linalg.norm(w, axis=1, keepdims=True)
    wanted = x.detach().numpy() @ w.T
    for n in range(5 if m > 1 else 0):
        own = int(labels[n])
        length = float(x[n].detach().norm())
        angle = math.acos(wanted[n, own] / length)
        k = min(math.floor(angle * m / math.pi), m - 1)
        psi = (-1) ** k * math.cos(m * angle) - 2 * k
        wanted[n, own] = (float(share) * math.cos(angle) + psi) / (1 + float(share)) * length
    np.testing.assert_allclose(y.detach().numpy(), wanted, atol=1e-9)


def test_regions_are_pooled_bin_by_bin() -> None:
    x = numbers(2, 3, 8, 9)
    regions = torch.tensor(
        [[0, 2, 1, 11, 9], [1, 0, 0, 17, 15], [0, 5, 5, 5, 5], [1, 12, 12, 40, 40], [0, -6, -6, 3, 3]]
    ).double()
    fields = "roi_pooling_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 }"
    (y,) = tops(layer("ROIPooling", fields, x.shape, (5, 5)), x, regions)
    planes = x.detach().numpy()
    for r, (image, *corners) in enumerate(regions.tolist()):
        x1, y1, x2, y2 = (math.copysign(math.floor(abs(corner) * 0.5 + 0.5), corner) for corner in corners)
        height, width = max(y2 - y1 + 1, 1) / 3, max(x2 - x1 + 1, 1) / 2
        for i, j in np.ndindex(3, 2):
            top, bottom = (int(min(max(v + y1, 0), 8)) for v in (math.floor(i * height), math.ceil((i + 1) * height)))
            left, right = (int(min(max(v + x1, 0), 9)) for v in (math.floor(j * width), math.ceil((j + 1) * width)))
            inside = planes[int(image), :, top:bottom, left:right].reshape(3, -1)
            wanted = inside.max(1) if inside.size else np.zeros(3)
            np.testing.assert_array_equal(y[r, :, i, j].detach().numpy(), wanted)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert float(gradient.sum()) == sum(int(bool(v != 0)) for v in y.detach().flatten())
    assert int((gradient != 0).sum()) <= y.numel()


@pytest.mark.parametrize(
    ("kind", "fields", "shapes", "says"),
    [
        ("InnerProduct", "", [(2, 3)], "num_output = 0"),
        ("Embed", "embed_param { num_output: 3 }", [(2,)], "input_dim = 0"),
        ("MarginInnerProduct", "margin_inner_product_param { num_output: 2 }", [(2, 3), (3,)], "one label for each"),
        ("ROIPooling", "roi_pooling_param { pooled_h: 0 pooled_w: 2 }", [(1, 1, 4, 4), (1, 5)], "pooled_h = 0"),
        ("ROIPooling", "roi_pooling_param { pooled_h: 2 pooled_w: 2 }", [(1, 1, 4, 4), (1, 4)], r"\(regions, 5\)"),
    ],
)
def test_what_does_not_fit_is_named(kind: str, fields: str, shapes: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(CaffeError, match=says):
        layer(kind, fields, *shapes).output_shapes(shapes)
