"""A part's sums and elements by kernels, in Triton's interpreter and on a GPU, against float64 by torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.interpreter import interpreted

from tilewise.distributed.norms import parts as norm_parts
from tilewise.distributed.norms.parts import ENOUGH, MOST_SPLITS, TILE, MemoryOrder, NormParts, dense

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [
    (1, 3, 70, 100), (2, 5, 3, 3), (3, 70, 9), (2, 130, 4, 4), (1, 1, 1, 1), (9, 6), (2, 4, 3, 5, 7), (4, 65, 1, 1),
    (1, 2, 2 * TILE + 1), (33, 2, 8, 8),
]  # fmt: skip


class Poisoning:
    """Torch, whose memory for results is not a number until it is written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, math.nan)

    def empty(self, size: tuple[int, ...], **given: Any) -> torch.Tensor:
        return torch.full(size, math.nan, **given)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_parts, "torch", Poisoning())


def rows_of(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Mean, variance and one over the deviation, by channel, in float64."""
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return torch.stack([mean, var, (var + eps).rsqrt()])


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= bound * expected.norm() + 1e-12


def compare(x: torch.Tensor, bound: float) -> None:
    """All four kernels."""
    parts, shape = NormParts(), (1, -1, *(1,) * (x.dim() - 2))
    dims, exact = [0, *range(2, x.dim())], x.double()
    sums, splits = parts.statistics(x)
    assert sums.shape == (2, splits, x.shape[1])
    close(sums.sum(1), torch.stack([exact.sum(dims), exact.square().sum(dims)]), 1e-6)
    dy = torch.randn_like(x)
    rows = rows_of(x)
    of = rows.float()
    w, b = torch.randn(x.shape[1], device=x.device), torch.randn(x.shape[1], device=x.device)
    centred = exact - of[0].double().view(shape)
    sums, _ = parts.gradient_sums(dy, x, of)
    # Sums may cancel: a share of what is summed up.
    wanted = torch.stack([dy.double().sum(dims), (dy.double() * centred).sum(dims)])
    assert (sums.sum(1) - wanted).norm() <= 1e-6 * (dy.double().norm() * (1 + centred.norm()))
    scale = rows[2].view(shape)
    close(parts.elements(x, of, w, b), centred * scale * w.double().view(shape) + b.double().view(shape), bound)
    close(parts.elements(x, of, None, None), centred * scale, bound)
    means = torch.randn(2, x.shape[1], device=x.device)
    plain, slope = (m.double().view(shape) for m in means)
    wanted = (dy.double() - plain - centred * scale * scale * slope) * scale
    close(parts.gradient(dy, x, of, means, None), wanted, bound)
    close(parts.gradient(dy, x, of, means, w), wanted * w.double().view(shape), bound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_parts_are_those_of_float64(device: str, shape: tuple[int, ...], last: bool) -> None:
    formats: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
    if last and len(shape) not in formats:
        pytest.skip("there is one dense layout")
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) * 2 + 1
    x = x.contiguous(memory_format=formats[len(shape)]) if last else x
    assert dense(x) is x
    compare(x, 1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        pytest.param("cpu", torch.float16, 1e-3, marks=interpreted),
        pytest.param("cuda", torch.float16, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 8e-3, marks=pytest.mark.gpu),
    ],
)
def test_half_precision(device: str, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    compare(torch.randn(2, 33, 9, 31, device=device).to(dtype), bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mean", [1e3, -1e5])
def test_means_far_from_zero_cost_no_digits(device: str, mean: float) -> None:
    """Also where what comes first is not like the rest."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 50, 60, device=device) + mean
    x[:, 1, :2] = 0
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        sums, _ = NormParts().statistics(given)
        mean0, squares = sums.sum(1) / (2 * 50 * 60)
        close(squares - mean0 * mean0, rows_of(given)[1], 1e-6 if abs(mean) < 1e4 else 1e-4)


def test_blocks_cover_everything_and_are_enough() -> None:
    for shape in [*SHAPES, (1, 64, 256, 512), (32, 2048, 7, 7), (1, 3, 1 << 15, 1 << 15)]:
        x = torch.empty(shape, device="meta")
        others = [x.contiguous(memory_format=torch.channels_last)] if len(shape) == 4 else []
        for order in map(MemoryOrder.of, (x, *others)):
            assert order.images * order.channels * order.positions == math.prod(shape)
            assert order.block_c * order.block_s <= TILE
            assert order.splits * order.each >= order.blocks > (order.splits - 1) * order.each
            assert order.splits <= MOST_SPLITS
            assert (
                order.splits == order.blocks
                or order.splits * order.columns >= min(ENOUGH, MOST_SPLITS * order.columns) / 2
            )


def test_what_is_not_dense_is_copied() -> None:
    x = torch.randn(2, 3, 8, 8)
    for view in (x[:, :, ::2], x[..., 1:], x.expand(2, 3, 8, 8)[:, :2]):
        assert dense(view).is_contiguous()
        assert torch.equal(dense(view), view)
