"""Layers that move, cut and choose elements, against NumPy's indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import layer, numbers, tops

from tilewise.frontends.caffe import CaffeError


def same_gradient(y: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor) -> None:
    """``wanted`` says how often each element of ``x`` is in ``y``."""
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, wanted.to(gradient.dtype).expand_as(gradient))


@pytest.mark.parametrize(
    ("fields", "count", "axis", "ends"),
    [
        ("", 3, 1, [2, 4, 6]),
        ("slice_param { axis: 1 slice_point: 1 slice_point: 4 }", 3, 1, [1, 4, 6]),
        ("slice_param { axis: -2 }", 2, 2, [2, 4]),
        ("slice_param { slice_dim: 0 slice_point: 1 }", 2, 0, [1, 2]),
    ],
)
def test_slice_cuts_at_points_or_into_equal_parts(fields: str, count: int, axis: int, ends: list[int]) -> None:
    x = numbers(2, 6, 4, 3)
    found = tops(layer("Slice", fields, (2, 6, 4, 3), tops=count), x)
    for part, wanted in zip(found, np.split(x.detach().numpy(), ends[:-1], axis), strict=True):
        np.testing.assert_array_equal(part.detach().numpy(), wanted)
    same_gradient(sum((part.sum() for part in found), torch.zeros((), dtype=x.dtype)), x, torch.ones(()))


def test_crop_takes_sizes_of_the_second_bottom() -> None:
    x, reference = numbers(2, 5, 7, 6), numbers(1, 9, 4, 3)
    (y,) = tops(layer("Crop", "crop_param { axis: 2 offset: 1 offset: 3 }", x.shape, (1, 9, 4, 3)), x, reference)
    assert torch.equal(y, x[:, :, 1:5, 3:6])
    inside = torch.zeros(7, 6)
    inside[1:5, 3:6] = 1
    same_gradient(y, x, inside)
    (y,) = tops(layer("Crop", "crop_param { axis: 1 offset: 1 }", x.shape, (1, 2, 4, 3)), x, numbers(1, 2, 4, 3))
    assert torch.equal(y, x[:, 1:3, 1:5, 1:4])


def test_tile_repeats_along_an_axis() -> None:
    x = numbers(2, 3, 4)
    (y,) = tops(layer("Tile", "tile_param { axis: 1 tiles: 3 }", x.shape), x)
    np.testing.assert_array_equal(y.detach().numpy(), np.tile(x.detach().numpy(), (1, 3, 1)))
    same_gradient(y, x, torch.full((), 3.0))


def test_filter_keeps_the_images_that_are_chosen() -> None:
    x, labels, chosen = numbers(4, 3, 2, 2), numbers(4, 1), torch.tensor([0.0, 2.0, 0.0, 1.0]).double().view(4, 1, 1, 1)
    made = layer("Filter", "", (4, 3, 2, 2), (4, 1), (4, 1, 1, 1), tops=2)
    found = made(x, labels, chosen)
    assert isinstance(found, tuple)
    assert torch.equal(found[0], x[[1, 3]])
    assert torch.equal(found[1], labels[[1, 3]])
    same_gradient(found[0], x, chosen != 0)


def test_batch_reindex_sums_gradients_of_images_that_come_twice() -> None:
    x, places = numbers(3, 2, 2), torch.tensor([2.0, 0.0, 2.0, 2.0]).double()
    (y,) = tops(layer("BatchReindex", "", x.shape, (4,)), x, places)
    assert torch.equal(y, x[[2, 0, 2, 2]])
    same_gradient(y, x, torch.tensor([1.0, 0.0, 3.0]).view(3, 1, 1))


def bilinear(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Linear interpolation of (N, C, H, W), corners onto corners, element by element."""
    found = np.zeros((*x.shape[:2], height, width))
    for row, column in np.ndindex(height, width):
        r = row * (x.shape[2] - 1) / (height - 1) if height > 1 else 0.0
        c = column * (x.shape[3] - 1) / (width - 1) if width > 1 else 0.0
        top, left = math.floor(r), math.floor(c)
        for i, j in np.ndindex(2, 2):
            share = (1 - abs(r - top - i)) * (1 - abs(c - left - j))
            if share > 0:
                found[:, :, row, column] += share * x[:, :, min(top + i, x.shape[2] - 1), min(left + j, x.shape[3] - 1)]
    return found


@pytest.mark.parametrize(
    ("fields", "height", "width"),
    [
        ("interp_param { height: 7 width: 3 }", 7, 3),
        ("interp_param { zoom_factor: 2 }", 9, 11),
        ("interp_param { shrink_factor: 2 }", 3, 3),
        ("interp_param { shrink_factor: 2 zoom_factor: 3 }", 7, 7),
    ],
)
def test_interp_is_linear_between_corners(fields: str, height: int, width: int) -> None:
    x = numbers(2, 2, 5, 6)
    (y,) = tops(layer("Interp", fields, x.shape), x)
    np.testing.assert_allclose(y.detach().numpy(), bilinear(x.detach().numpy(), height, width), atol=1e-12)
    assert torch.autograd.gradcheck(layer("Interp", fields, x.shape), (x,))


def test_interp_cuts_before_and_takes_sizes_of_a_bottom() -> None:
    x = numbers(1, 2, 6, 7)
    (y,) = tops(layer("Interp", "interp_param { height: 4 width: 4 pad_beg: -1 pad_end: -2 }", x.shape), x)
    np.testing.assert_allclose(y.detach().numpy(), bilinear(x[:, :, 1:-2, 1:-2].detach().numpy(), 4, 4), atol=1e-12)
    (y,) = tops(layer("Interp", "", x.shape, (1, 9, 3, 8)), x, numbers(1, 9, 3, 8))
    np.testing.assert_allclose(y.detach().numpy(), bilinear(x.detach().numpy(), 3, 8), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "fields", "shapes", "count", "says"),
    [
        ("Slice", "", [(2, 5)], 2, "does not divide into 2 tops"),
        ("Slice", "slice_param { slice_point: 3 slice_point: 2 }", [(2, 5)], 3, "rising numbers below 5"),
        ("Slice", "slice_param { slice_point: 3 }", [(2, 5)], 3, "one less than the tops"),
        ("Crop", "crop_param { offset: 3 }", [(1, 1, 5, 5), (1, 1, 3, 3)], 1, "no 3 elements behind an offset of 3"),
        ("Tile", "tile_param { tiles: 0 }", [(2, 5)], 1, "tiles = 0; at least 1"),
        ("Filter", "", [(2, 5), (3, 1)], 1, "one number for each image"),
        ("BatchReindex", "", [(2, 5), (3, 1)], 1, "one axis would do"),
        ("Interp", "", [(1, 1, 5, 5)], 1, "none of height and width"),
        ("Interp", "interp_param { zoom_factor: 2 pad_beg: 1 }", [(1, 1, 5, 5)], 1, "pad_beg = 1"),
    ],
)
def test_what_does_not_fit_is_named(
    kind: str, fields: str, shapes: list[tuple[int, ...]], count: int, says: str
) -> None:
    with pytest.raises(CaffeError, match=says):
        layer(kind, fields, *shapes, tops=count).output_shapes(shapes)
