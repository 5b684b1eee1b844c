"""Inverse transforms of sums of products, on a GPU or their very C++ on the CPU: against float64, between NaN."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulate, emulated
from tests.kernels.spectra import Guarded, relative

from tilewise.kernels.cuda.fft2d import SIZES, Config, default_config
from tilewise.kernels.cuda.irfft2_summed import CLUSTERED, LARGE, MOST_SUMMED, bind
from tilewise.kernels.cuda.launch import Bound
from tilewise.kernels.cuda.operands import Memory

LIMIT = 4e-7
HALF = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
PLACES = [
    pytest.param("cpu", marks=emulated),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run(bound: Bound, *tensors: torch.Tensor, backwards: bool = False) -> None:
    addresses = [t.data_ptr() for t in tensors]
    if tensors[0].is_cuda:
        bound.launch(tensors[0].get_device())(*addresses)
        return
    p = bound.program
    emulate(p.source(), p.name, bound.grid, p.threads, addresses, bound.scalars, backwards, bound.cluster)


def spectra(lead: tuple[int, ...], s: tuple[int, int], seed: int) -> torch.Tensor:
    """Of normal random planes, (frequencies, *lead), in complex128."""
    generator = torch.Generator().manual_seed(seed)
    planes = torch.randn(*lead, *s, dtype=torch.float64, generator=generator)
    return torch.fft.rfft2(planes).flatten(-2).movedim(-1, 0)


def check(
    place: str, s: tuple[int, int], size: tuple[int, int], offset: tuple[int, int], summed: int,
    lead: tuple[int, int, int] = (3, 1, 5), conjugated: bool = True, dtype: torch.dtype = torch.float32,
    config: Config | None = None, turned: bool = False, gap: int = 0, start: int = 0, **memory: Any,
) -> None:  # fmt: skip
    """``lead``: images, groups, columns; ``turned``: the second factor has columns innermost."""
    n, groups, columns = lead
    frequencies = s[0] * (s[1] // 2 + 1)
    order = (0, 1, 3, 2) if turned else (0, 1, 2, 3)
    first = Guarded((frequencies, n, groups, summed), torch.complex64, place, start=start)
    second = Guarded((frequencies, groups, columns, summed), torch.complex64, place, gap, start, order)
    a, b = spectra((n, groups, summed), s, 1), spectra((groups, columns, summed), s, 2)
    first.tensor.copy_(a)
    second.tensor.copy_(b)
    x = Guarded((n, groups * columns, *size), dtype, place, **memory)
    bound = bind(Memory.of(x.tensor), Memory.of(first.tensor), Memory.of(second.tensor), s, offset, conjugated, config,
                 1.0 / s[0] / s[1])  # fmt: skip
    run(bound, first.tensor, second.tensor, x.tensor, backwards=bool(start))
    product = torch.einsum("fngc,fgoc->fngo", a, b.conj() if conjugated else b)
    whole = torch.fft.irfft2(product.movedim(0, -1).unflatten(-1, (s[0], s[1] // 2 + 1)), s=s).flatten(1, 2)
    want = whole[..., offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]]
    assert relative(x.tensor.cpu(), want) <= HALF.get(dtype, LIMIT)
    assert x.untouched()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("n", "summed", "turned", "lead"),
    [(8, 1, False, (3, 1, 5)), (24, 4, True, (2, 2, 3)), (128, 3, False, (3, 1, 3))],
)  # fmt: skip
def test_some_sizes(place: str, n: int, summed: int, turned: bool, lead: tuple[int, int, int]) -> None:
    config = CLUSTERED if n == LARGE else None  # what many planes get
    check(place, (n, n), (n - 3, n - 4), (2, 1), summed, lead, not turned, turned=turned, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("n", SIZES)
def test_every_size_and_sum(n: int) -> None:
    for summed in range(1, MOST_SUMMED + 1):
        for turned in (False, True):
            check("cuda", (n, n), (n, n), (0, 0), summed, (2, 1, 33), turned=turned)
            check("cuda", (n, n), (n - 2, n - 4), (0, 2), summed, (3, 2, 7), conjugated=False, turned=turned)
    check("cuda", (n, n), (n - 1, n - 1), (1, 0), 3, (37, 1, 96))


@emulated
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_form(data: st.DataObject) -> None:
    """Blocks that end inside an image, factors at 8 of 16 bytes, planes in any order, clusters, shared transforms."""
    lead = tuple(data.draw(st.integers(1, most)) for most in (4, 3, 6))
    config = data.draw(
        st.sampled_from((None, Config(4), Config(3), Config(3, 2), Config(5, vector=False), Config(4, 2, cluster=2)))
    )
    memory = data.draw(st.sampled_from(({}, {"order": (0, 2, 3, 1)}, {"order": (1, 0, 2, 3)}, {"gap": 3, "start": 1})))
    x = Guarded((lead[0], lead[1] * lead[2], 6, 5), torch.float32, "cpu", **memory)
    inside = {"order": memory.get("order")}
    check(
        "cpu", (8, 16), (6, 5 + 7 * data.draw(st.integers(0, 1))), (1, 2), data.draw(st.integers(1, MOST_SUMMED)),
        (lead[0], lead[1], lead[2]), data.draw(st.booleans()), config=config, turned=data.draw(st.booleans()),
        gap=data.draw(st.integers(0, 1)), start=data.draw(st.integers(0, 1)), **inside,
    )  # fmt: skip
    assert x.untouched()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype: torch.dtype) -> None:
    check("cuda", (16, 16), (14, 12), (2, 2), 3, dtype=dtype)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_in_its_planes(place: str) -> None:
    a, b = spectra((2, 1, 1), (8, 8), 1).to(torch.complex64), spectra((1, 3, 1), (8, 8), 2).to(torch.complex64)
    a[7, 1], b[9, 0, 2] = float("nan"), float("inf")
    a, b, x = a.to(place), b.to(place), torch.zeros(2, 3, 8, 8, device=place)
    run(bind(Memory.of(x), Memory.of(a), Memory.of(b), (8, 8), (0, 0), True), a, b, x)
    assert x.isfinite().flatten(2).all(2).tolist() == [[True, True, False], [False, False, False]]


@emulated
def test_offsets_beyond_32_bits() -> None:
    far = 2**31 + 64
    storage = mmap.mmap(-1, 8 * far + 65536, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
    wide = torch.frombuffer(storage, dtype=torch.complex64)
    a, b = spectra((2, 1, 2), (8, 8), 1), spectra((1, 2, 2), (8, 8), 2)
    first = wide.as_strided((40, 2, 1, 2), (2, far, 2, 1))
    second = wide.as_strided((40, 1, 2, 2), (2, 2, far, 1), 1024)
    x = torch.frombuffer(storage, dtype=torch.float32).as_strided((2, 2, 8, 8), (far, 64, 8, 1), 8192)
    first.copy_(a)
    second.copy_(b)
    run(bind(Memory.of(x), Memory.of(first), Memory.of(second), (8, 8), (0, 0), True, None, 1 / 64), first, second, x)
    want = torch.fft.irfft2(torch.einsum("fngc,fgoc->ngof", a, b.conj()).flatten(1, 2).unflatten(-1, (8, 5)), s=(8, 8))
    assert relative(x, want) <= LIMIT


def test_default_configs_fit_every_size() -> None:
    for s in [(a, b) for a in SIZES for b in SIZES]:
        for clusters in (True, False):
            frequencies = s[0] * (s[1] // 2 + 1)
            x = Memory((9, 64, *s), (64 * s[0] * s[1], s[0] * s[1], s[1], 1), torch.float32)
            a = Memory((frequencies, 9, 1, 3), (27, 3, 3, 1), torch.complex64)
            b = Memory((frequencies, 1, 64, 3), (192, 192, 3, 1), torch.complex64)
            assert (
                bind(x, a, b, s, (0, 0), True, default_config(s, "frequency_major", True, 9 * 64, clusters)).grid >= 1
            )


IMAGE = Memory((2, 6, 8, 8), (384, 64, 8, 1), torch.float32)
FIRST = Memory((40, 2, 2, 3), (12, 6, 3, 1), torch.complex64)
SECOND = Memory((40, 2, 3, 3), (18, 9, 3, 1), torch.complex64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"s": (8, 20)}, ValueError, r"s=\(8, 20\): sizes are 8, 16, 24"),
        ({"offset": (1, 0)}, ValueError, "height 8 at offset 1 does not fit a basis of 8"),
        ({"first": SECOND}, ValueError, r"the first factor has shape \(40, 2, 3, 3\): must be \(40, 2, 2, 3\)"),
        ({"image": Memory((2, 5, 8, 8), (384, 64, 8, 1), torch.float32)}, ValueError, "2 groups of 3 columns are not"),
        (
            {"first": Memory((40, 2, 2, 3), (12, 6, 1, 2), torch.complex64)}, ValueError,
            "the first factor's last stride is 2: must be 1",
        ),
        (
            {"second": Memory((40, 2, 3, 3), (2**31, 9, 3, 1), torch.complex64)}, ValueError,
            "a stride of 2147483648 elements between frequencies",
        ),
        (
            {"second": Memory((40, 2, 3, 3), (18, 9, 3, 1), torch.float32)}, TypeError,
            r"the second factor is torch\.float32: must be complex64",
        ),
        (
            {
                "first": Memory((40, 2, 2, 9), (36, 18, 9, 1), torch.complex64),
                "second": Memory((40, 2, 3, 9), (54, 27, 9, 1), torch.complex64),
            }, ValueError, "sums of 9 products: 1 to 8 would do",
        ),
        ({"config": Config(512)}, ValueError, "threads in a block are more than 1024"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "image": IMAGE, "first": FIRST, "second": SECOND, "s": (8, 8), "offset": (0, 0), "conjugated": True,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        bind(**(given | change))
