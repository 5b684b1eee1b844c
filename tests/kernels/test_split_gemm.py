"""Complex products of fp16 parts in Triton's interpreter against complex128, in small tiles, between NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted

try:
    from tilewise.kernels.triton.launch import Launch, Pointer, Program
    from tilewise.kernels.triton.magnitude import magnitudes
    from tilewise.kernels.triton.split_gemm import split_gemm
except ImportError:  # without Triton
    pass

PLACES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LIMITS = {True: 1e-6, False: 2e-3}
"""Relative error of random products, of split numbers and of half ones."""


def scale(peak: float, spread: int) -> float:
    """The power of two that spectra of planes of 2^spread numbers, none above ``peak``, are multiplied by."""
    bits = int(torch.tensor(peak).view(torch.int32))
    return 2.0 ** max(-126, min(126, 141 - (bits >> 23) - spread))


class Parts:
    """Matrices (frequencies, groups, rows, columns) in fp16 parts, with channels innermost, between NaN.

    ``turned``: the first of a matrix's two dimensions lies innermost. ``peak`` and ``spread`` are what the scale comes
    from; no number is above ``peak`` 2^spread.
    """

    def __init__(
        self, sizes: tuple[int, int, int, int], turned: bool, split: bool, place: str, seed: int, size: float, gap: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.exact = torch.randn(sizes, generator=generator, dtype=torch.complex128)
        self.exact *= size / max(1.0, float(self.exact.abs().max()) if self.exact.numel() else 1.0)
        self.spread = 3
        self.peak = torch.tensor([size / 2**self.spread]).to(torch.float32)
        factor = scale(float(self.peak), self.spread)
        lies = self.exact.permute(0, 3, 1, 2) if turned else self.exact.transpose(1, 2)
        parts = [lies.real * factor, lies.imag * factor]
        if split:
            high = [part.to(torch.float32).to(torch.float16) for part in parts]
            low = [(part - top.double()).to(torch.float16) for part, top in zip(parts, high, strict=True)]
            parts = [high[0], low[0], high[1], low[1]]
        self.base = torch.full(
            (len(lies), len(parts), *lies.shape[1:-1], lies.shape[-1] + gap), math.nan, dtype=torch.float16
        )
        for number, part in enumerate(parts):
            self.base[:, number, ..., :-gap] = part.to(torch.float16)
        self.base = self.base.to(place)
        self.peak = self.peak.to(place)
        self.inner = turned
        outer = self.base.stride(2)
        self.strides = (self.base.stride(0), self.base.stride(1), self.base.stride(3), outer)


def check(
    place: str, sizes: tuple[int, int, int, int, int], conjugate: str, split: bool,
    turned: tuple[bool, bool] = (False, False), scales: tuple[float, float] = (1.0, 1.0), accumulate: bool = False,
    blocks: tuple[int, int, int] = (16, 16, 16), promote: int = 0, unit: int = 1,
) -> None:  # fmt: skip
    """``out (+)= a @ b`` in tiles of ``blocks``; nothing else is written."""
    f, groups, rows, columns, depth = sizes
    a = Parts((f, groups, rows, depth), turned[0], split, place, 1, scales[0], unit)
    b = Parts((f, groups, depth, columns), turned[1], split, place, 2, scales[1], unit)
    out = torch.full((f, rows, groups, columns + 1), math.nan, dtype=torch.complex64, device=place)
    want = (a.exact.conj() if conjugate == "a" else a.exact) @ (b.exact.conj() if conjugate == "b" else b.exact)
    if accumulate:
        old = torch.randn(want.shape, dtype=torch.complex64) * scales[0] * scales[1]
        out[..., :-1] = old.transpose(1, 2).to(place)
        want += old
    m, n, k = blocks
    tiles_n, tiles = -(-columns // n), -(-columns // n) * -(-rows // m)
    constants: dict[str, Any] = {
        "A_DEPTH_INNER": not turned[0], "B_DEPTH_INNER": turned[1], "CONJUGATE": conjugate, "ACCUMULATE": accumulate,
        "SPLIT": split, "PROMOTE": promote, "UNIT": unit, "EVEN_M": rows % m == 0, "EVEN_N": columns % n == 0,
        "EVEN_K": depth % k == 0, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k,
    }  # fmt: skip
    types = (torch.float16, torch.float16, torch.float32, torch.int32, torch.int32)
    launch = Launch(
        split_gemm,
        (tiles * f * groups, 1, 1),
        tuple(Pointer(i, 0, dtype) for i, dtype in enumerate(types)),
        (rows // (unit if turned[0] else 1), columns // (1 if turned[1] else unit),
         depth // (unit if turned[1] or not turned[0] else 1), tiles_n, tiles, groups, a.spread, b.spread,
         *(stride // unit for stride in (*a.strides, *b.strides)),
         out.stride(0), out.stride(2), out.stride(1)),
        constants,
        warps=8 if m * n >= 4096 else 4,
        stages=3,
    )  # fmt: skip
    tensors = [a.base, b.base, torch.view_as_real(out), a.peak.view(torch.int32), b.peak.view(torch.int32)]
    Program([launch], [2, 2, 8, 4, 4], out.device)(tensors)
    got = out[..., :-1].transpose(1, 2).cpu()
    assert float((got - want).norm()) <= LIMITS[split] * float(want.norm())
    assert bool(out[..., -1].isnan().all())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("turned", "conjugate"),
    [((False, False), "a"), ((True, False), "b"), ((False, True), "none"), ((True, True), "b")],
)
def test_every_layout_and_conjugate(place: str, turned: tuple[bool, bool], conjugate: str) -> None:
    check(place, (2, 1, 24, 40, 8), conjugate, True, turned, blocks=(32, 32, 16), unit=8)
    for split in (True, False):
        check(place, (1, 2, 17, 5, 19), conjugate, split, turned)
        check(place, (2, 1, 16, 16, 16), conjugate, split, turned)


@interpreted
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), *[st.integers(1, 50)] * 3),
    blocks=st.tuples(*[st.sampled_from((16, 32, 64))] * 3),
    conjugate=st.sampled_from(("none", "a", "b")),
    turned=st.tuples(st.booleans(), st.booleans()),
    split=st.booleans(),
    accumulate=st.booleans(),
    promote=st.integers(0, 2),
)
def test_any_shape(sizes: Any, blocks: Any, conjugate: str, turned: Any, **options: Any) -> None:
    check("cpu", sizes, conjugate, turned=turned, blocks=blocks, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [(128, 64, 32), (64, 64, 64), (16, 64, 32), (32, 32, 64), (64, 128, 32)])
@pytest.mark.parametrize("split", [True, False])
def test_every_tile(blocks: tuple[int, int, int], split: bool) -> None:
    for conjugate, turned in (("b", (False, True)), ("none", (False, False)), ("a", (True, False))):
        check("cuda", (3, 1, 256, 128, 128), conjugate, split, turned, blocks=blocks, unit=8)
        check("cuda", (3, 1, 136, 40, 72), conjugate, split, turned, blocks=blocks, unit=8)
        check("cuda", (3, 2, 130, 72, 200), conjugate, split, turned, blocks=blocks, accumulate=True, promote=1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scales", [(1e-30, 1e10), (1e25, 1e-30), (1e18, 1e18), (1e-18, 1e-15), (1e-37, 1e10)])
def test_any_magnitude(place: str, scales: tuple[float, float]) -> None:
    check(place, (2, 1, 16, 16, 20), "b", True, scales=scales)


@pytest.mark.parametrize("place", PLACES)
def test_zeros(place: str) -> None:
    check(place, (1, 1, 16, 16, 16), "none", True, scales=(0.0, 1.0), accumulate=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_largest_finite_magnitude(place: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(3, 4, 5, 6, generator=generator).to(dtype).to(place)
    dense[1, 2, 3, 4] = -7.0
    wide = torch.full((3, 4, 7, 9), math.nan, dtype=dtype, device=place)
    view = wide[:, 1:4, 2:, 1:].transpose(0, 3)
    view.fill_(0.5)
    view[-1, -1, -1, -1], view[0, 0, 0, 0], view[1, 1, 1, 1] = -3.0, math.inf, math.nan
    out = torch.full((2, 3), -1, dtype=torch.int32, device=place)
    scalars = [dense.numel(), 1, 1, 1, 0, 0, 0, 0, view.numel(), *view.shape[1:], *view.stride()]
    start = view.storage_offset() * dtype.itemsize
    pointers = (Pointer(0, 0, dtype), Pointer(1, start, dtype), Pointer(2, 0, torch.int32), Pointer(2, 12, torch.int32))
    constants = {"A_DENSE": True, "B_DENSE": False, "BLOCK": 32}
    launch = Launch(magnitudes, (3, 2, 1), pointers, tuple(scalars), constants)
    Program([launch], [2, 2, 4], out.device)([dense, wide, out])
    assert out.view(torch.float32).amax(1).tolist() == [7.0, 3.0]
    assert bool((out >= 0).all())
