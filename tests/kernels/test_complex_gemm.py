"""Complex products in Triton's interpreter against complex128, in small tiles, between NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.interpreter import interpreted

try:
    from tilewise.kernels.triton import complex_gemm as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer, Program
except ImportError:  # without Triton
    pass

PLACES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LIMITS = {"fp16x3": 1e-6, "tf32x3": 1e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}
"""Relative error of random products."""


class Matrices:
    """Matrices (frequencies, groups, rows, columns) as a channel-innermost spectrum holds them, between NaN.

    ``turned``: the first of a matrix's two dimensions lies innermost.
    """

    def __init__(self, sizes: tuple[int, int, int, int], turned: bool, place: str) -> None:
        f, g, m, n = sizes
        outer, inner = (n, m) if turned else (m, n)
        self.base = torch.full((f, outer, g, inner + 1), math.nan, dtype=torch.complex64, device=place)
        self.tensor = self.base[..., :inner].permute(0, 2, 3, 1) if turned else self.base[..., :inner].transpose(1, 2)
        self.stride = g * (inner + 1)

    def fill(self, seed: int, scale: float = 1.0) -> Matrices:
        """Random numbers."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.tensor.shape, generator=generator, dtype=torch.complex128) * scale
        self.tensor.copy_(values)
        return self

    @property
    def between(self) -> tuple[int, int]:
        """Strides of frequencies and groups."""
        return self.base.stride(0), self.base.stride(2)


def run(
    a: Matrices, b: Matrices, out: Matrices, conjugate: str, product: str, form: int = 3,
    blocks: tuple[int, int, int] = (16, 16, 16), promote: int = 0, accumulate: bool = False,
) -> None:  # fmt: skip
    """``out (+)= a @ b`` in tiles of ``blocks``."""
    device = a.base.device
    frequencies, groups, rows, depth = a.tensor.shape
    columns = b.tensor.shape[3]
    peaks = [
        torch.tensor(
            [0, int(x.tensor.abs().max().to(torch.float32).view(torch.int32))], dtype=torch.int32, device=device
        )
        for x in (a, b)
    ]
    top = torch.full((2,), -1, dtype=torch.int32, device=device)
    m, n, k = blocks
    tiles_n, tiles = -(-columns // n), -(-columns // n) * -(-rows // m)
    constants: dict[str, Any] = {
        "A_DEPTH_INNER": a.tensor.stride(3) == 1, "B_DEPTH_INNER": b.tensor.stride(2) == 1 and b.tensor.stride(3) != 1,
        "CONJUGATE": conjugate, "ACCUMULATE": accumulate, "PRODUCT": product, "SCALED": product.startswith("fp16"),
        "FORM": form, "PROMOTE": promote, "EVEN_M": rows % m == 0, "EVEN_N": columns % n == 0, "EVEN_K": depth % k == 0,
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k,
    }  # fmt: skip
    integer, real = torch.int32, torch.float32
    launches = [
        Launch(kernels.largest, (2, 1, 1), (Pointer(3, 0, integer), Pointer(4, 0, integer), Pointer(5, 0, integer)),
               (2, 2), {"BLOCK": 16}),
        Launch(
            kernels.complex_gemm,
            (tiles * frequencies * groups, 1, 1),
            (*(Pointer(i, 0, real) for i in range(3)), Pointer(5, 0, integer), Pointer(5, 4, integer)),
            (rows, columns, depth, tiles_n, tiles, groups, *(n for x in (a, b, out) for n in (*x.between, x.stride))),
            constants,
        ),
    ]  # fmt: skip
    reals = [torch.view_as_real(x.base) for x in (a, b, out)]
    Program(launches, [8, 8, 8, 4, 4, 4], device)([*reals, *peaks, top])


def check(
    place: str, sizes: tuple[int, int, int, int, int], conjugate: str, product: str,
    turned: tuple[bool, bool] = (False, False), scales: tuple[float, float] = (1.0, 1.0), accumulate: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    frequencies, groups, rows, columns, depth = sizes
    a = Matrices((frequencies, groups, rows, depth), turned[0], place).fill(1, scales[0])
    b = Matrices((frequencies, groups, depth, columns), turned[1], place).fill(2, scales[1])
    out = Matrices((frequencies, groups, rows, columns), False, place)
    exact = [x.tensor.to(torch.complex128) for x in (a, b)]
    want = (exact[0].conj() if conjugate == "a" else exact[0]) @ (exact[1].conj() if conjugate == "b" else exact[1])
    if accumulate:
        out.fill(3, scales[0] * scales[1])
        want += out.tensor
    run(a, b, out, conjugate, product, accumulate=accumulate, **options)
    assert float((out.tensor - want).norm()) <= LIMITS[product] * float(want.norm())
    assert bool(out.base[..., columns:].isnan().all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("conjugate", ["none", "a", "b"])
@pytest.mark.parametrize("form", [3, 4])
def test_every_layout_and_conjugate(place: str, turned: tuple[bool, bool], conjugate: str, form: int) -> None:
    check(place, (2, 2, 19, 21, 23), conjugate, "fp16x3", turned, form=form)
    check(place, (3, 1, 16, 32, 32), conjugate, "tf32x3", turned, form=form)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("product", [name for name in LIMITS if name != "bf16"])  # the interpreter's bf16 is none
@pytest.mark.parametrize("form", [3, 4])
def test_every_product(place: str, product: str, form: int) -> None:
    check(place, (2, 1, 17, 33, 70), "b", product, form=form, blocks=(32, 16, 32))
    check(place, (2, 1, 17, 33, 70), "a", product, form=form, promote=2, accumulate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [3, 4])
def test_bf16(form: int) -> None:
    check("cuda", (2, 1, 17, 33, 70), "b", "bf16", form=form, blocks=(32, 16, 32))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scales", [(1e-30, 1e10), (1e25, 1e-30), (1e18, 1e18), (1e-18, 1e-15)])
def test_any_magnitude(place: str, scales: tuple[float, float]) -> None:
    check(place, (2, 1, 16, 16, 20), "b", "fp16x3", scales=scales)


@pytest.mark.parametrize("place", PLACES)
def test_zeros(place: str) -> None:
    check(place, (1, 1, 16, 16, 16), "none", "fp16x3", scales=(0.0, 1.0), accumulate=True)
