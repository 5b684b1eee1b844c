"""Layer normalization of rows in Triton's interpreter and on a GPU against torch in float64, between NaN."""

from __future__ import annotations

import pytest
import torch
from tests.interpreter import interpreted
from torch.nn.functional import layer_norm

from tilewise.nn.programs.rows import RowNorm

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(3, 5, 96), (70, 32), (1, 1), (2, 1000), (33, 7), (5, 4100)])
@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (False, False), (True, False), (False, True)])
def test_rows(place: str, dtype: torch.dtype, shape: tuple[int, ...], weighted: bool, biased: bool) -> None:
    generator = torch.Generator(place).manual_seed(3)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float32, device=place, generator=generator).add(5).to(dtype)

    x, columns = drawn(*shape), shape[-1]
    added = [drawn(columns) for _ in range(weighted + biased)]
    weight, bias = added[0] if weighted else None, added[-1] if biased else None
    room = torch.full((x.numel() + 64,), torch.nan, dtype=dtype, device=place)
    out = room[32 : 32 + x.numel()].view(shape)
    RowNorm(shape, 1e-6, weighted, biased, dtype)(x, *added, out)
    doubled = [None if t is None else t.double() for t in (weight, bias)]
    want = layer_norm(x.double(), [columns], *doubled, eps=1e-6)
    assert float((out.double() - want).norm()) <= LIMITS[dtype] * float(want.norm()) + 1e-12
    assert bool(room[:32].isnan().all())
    assert bool(room[32 + x.numel() :].isnan().all())


@pytest.mark.parametrize("place", PLACES)
def test_nan_stays_in_its_row(place: str) -> None:
    x = torch.randn(40, 24, dtype=torch.float32, device=place)
    x[7, 3] = torch.nan
    out = torch.empty_like(x)
    RowNorm((40, 24), 1e-6, weighted=False, biased=False, dtype=torch.float32)(x, out)
    assert bool(out[7].isnan().all())
    assert int(out.isnan().sum()) == 24
