"""The 1-D transforms, on a GPU or their very C++ on the CPU: against torch in float64, between NaN, in any strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.emulator import emulated, run_bound
from tests.kernels.spectra import Guarded, relative, spectrum

from tilewise.kernels.cuda.fft1d import SIZES, Config, bind, default_config, irfft, rfft
from tilewise.kernels.cuda.operands import LAYOUTS, Memory, spectrum_shape

LIMIT = 3e-7
HALF = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
PLACES = [pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)]


def run(
    x: torch.Tensor, y: torch.Tensor, n: int, offset: int = 0, layout: str = "plain", inverse: bool = False,
    config: Config | None = None, backwards: bool = False,
) -> None:  # fmt: skip
    """Transform between signals ``x`` and spectra ``y``, wherever they are; scaled like torch's."""
    bound = bind(Memory.of(x), Memory.of(y), (n,), (offset,), layout, inverse, config, 1.0 / n)
    run_bound(bound, x, y, inverse, backwards)


def check(
    place: str, n: int, length: int, offset: int, layout: str = "plain", lead: tuple[int, ...] = (7, 11),
    dtype: torch.dtype = torch.float32, config: Config | None = None, **memory: Any,
) -> None:  # fmt: skip
    """There, and back from the exact spectrum of whole signals; NaN outside is neither read nor written."""
    x = Guarded((*lead, length), dtype, place, **memory).fill(1)
    y = Guarded(spectrum_shape(lead, (n,), layout), torch.complex64, place)
    want = spectrum(x.tensor, (n,), (offset,), layout)
    run(x.tensor, y.tensor, n, offset, layout, config=config)
    assert relative(y.tensor, want) <= LIMIT
    assert y.untouched()
    whole = Guarded((*lead, n), torch.float64, place).fill(2).tensor
    y.tensor.copy_(spectrum(whole, (n,), (0,), layout))
    x.tensor.fill_(float("nan"))
    run(x.tensor, y.tensor, n, offset, layout, inverse=True, config=config, backwards=True)
    assert relative(x.tensor, whole[..., offset : offset + length]) <= HALF.get(dtype, LIMIT)
    assert x.untouched()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n", SIZES)
def test_every_size_there_and_back(place: str, n: int) -> None:
    check(place, n, n - 3, 2, LAYOUTS[n % 3])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", SIZES)
def test_every_size_and_layout(n: int, layout: str) -> None:
    for lead in ((1,), (4,), (1001,), (129, 65)):
        check("cuda", n, n, 0, layout, lead)
    check("cuda", n, n - 4, 2, layout, (33, 7))
    check("cuda", n, 1, n - 1, layout, (9,))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_padded(place: str, layout: str) -> None:
    check(place, 32, 32, 0, layout)
    check(place, 32, 32, 0, layout, (1,), start=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("staged", [True, False])
def test_configs(place: str, threads: int, staged: bool) -> None:
    """Those that have as many transforms in the second step as threads, more, and fewer."""
    for n in (96, 128):
        check(place, n, n - 2, 2, config=Config(threads, 64 // threads, staged=staged), lead=(70,))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(place: str, dtype: torch.dtype) -> None:
    check(place, 96, 94, 2, dtype=dtype)
    check(place, 96, 93, 1, dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "memory",
    [{"gap": 2, "start": 2}, {"gap": 3, "start": 1}, {"order": (0, 2, 1)}, {"order": (2, 1, 0)}],
    ids=["even gaps", "odd gaps", "along rows", "backwards"],
)
def test_views(place: str, memory: dict[str, Any]) -> None:
    check(place, 48, 46, 2, "plain", (3, 21), **memory)
    check(place, 48, 46, 2, "frequency_major", (3, 21), **memory)


@pytest.mark.parametrize("place", PLACES)
def test_spectra_are_views_too(place: str) -> None:
    x = Guarded((3, 5, 32), torch.float32, place).fill(0)
    for layout, shape, memory in (
        ("plain", (3, 5, 17), {"order": (1, 0, 2), "start": 1, "gap": 1}),
        ("frequency_major", (17, 3, 5), {"order": (0, 2, 1), "gap": 2}),
    ):
        y = Guarded(shape, torch.complex64, place, **memory)  # type: ignore[arg-type]
        run(x.tensor, y.tensor, 32, layout=layout)
        assert relative(y.tensor, spectrum(x.tensor, (32,), (0,), layout)) <= LIMIT
        assert y.untouched()
        back = Guarded((3, 5, 30), torch.float32, place)
        run(back.tensor, y.tensor, 32, 1, layout, inverse=True)
        assert relative(back.tensor, x.tensor[..., 1:31].double()) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_in_its_signal(place: str) -> None:
    x = Guarded((6, 64), torch.float32, place).fill(0).tensor
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    y = torch.zeros(6, 33, dtype=torch.complex64, device=place)
    run(x, y, 64)
    assert torch.isfinite(torch.view_as_real(y)).flatten(1).all(1).tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("place", PLACES)
def test_imaginary_parts_of_real_frequencies_do_not_count(place: str) -> None:
    y = torch.fft.rfft(torch.randn(4, 64)).to(torch.complex64).to(place)
    bent = y.clone()
    bent[:, 0] += 3j
    bent[:, 32] -= 2j
    got, want = (torch.zeros(4, 64, device=place) for _ in range(2))
    run(got, bent, 64, inverse=True)
    run(want, y, 64, inverse=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("n", "layout", "config"),
    [(8, "packed", None), (96, "plain", Config(8, 16)), (256, "frequency_major", Config(8, 16))],
)  # fmt: skip
def test_peaks_are_the_largest_finite_magnitudes(place: str, n: int, layout: str, config: Config | None) -> None:
    """Of each block, the last of which has fewer signals than seats."""
    x = torch.randn(37, n - 1, generator=torch.Generator().manual_seed(4))
    x[4] *= 1e4
    x[36, 0] = float("inf")
    x[35, :], x[17, n // 2] = 0.0, float("nan")
    x = x.to(place)
    y = Guarded(spectrum_shape((37,), (n,), layout), torch.complex64, place)
    bound = bind(Memory.of(x), Memory.of(y.tensor), (n,), (1,), layout, False, config, peaks=True)
    peaks = torch.full((bound.grid + 1,), -1, dtype=torch.int32, device=place)
    run_bound(bound, x, y.tensor, False, peaks=peaks)
    assert y.untouched()
    assert int(peaks[-1]) == -1
    signals = (config or default_config(n, 37)).signals
    rows = y.tensor if layout == "plain" else y.tensor.movedim(0, -1)
    finite = torch.view_as_real(rows).abs().flatten(1).nan_to_num(nan=0.0, posinf=0.0).cpu()
    want = [float(block.max()) for block in finite.split(signals)]
    assert peaks[:-1].view(torch.float32).tolist() == want


@pytest.mark.gpu
def test_the_wrapper_follows_torch() -> None:
    x = torch.randn(3, 4, 61, device="cuda")
    y = rfft(x, 64, offset=1)
    torch.testing.assert_close(y, torch.fft.rfft(torch.nn.functional.pad(x, (1, 2))), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(irfft(y, 64, size=61, offset=1), x, rtol=1e-5, atol=1e-5)
    assert rfft(x[:0], 64).shape == (0, 4, 33)


def test_default_configs_fit_every_size() -> None:
    for n in SIZES:
        for count in (1, 4, 1000, 10**6):
            x = Memory((count, n), (n, 1), torch.float32)
            y = Memory((count, n // 2 + 1), (n // 2 + 1, 1), torch.complex64)
            assert bind(x, y, (n,), (0,), "plain", False, default_config(n, count)).grid >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 20}, "n=20: sizes are 8, 16, 24"),
        ({"offset": 1}, "length 64 at offset 1 does not fit a basis of 64"),
        ({"n": 32}, "length 64 at offset 0 does not fit a basis of 32"),
        ({"layout": "packed"}, r"the spectrum has shape \(3, 33\), packed spectra of \(3, 64\) have \(32, 3\)"),
        ({"config": Config(3, 32)}, "threads=3 do not share 32 points"),
        ({"config": Config(32, 32)}, "threads=32 do not share 32 points"),
        ({"config": Config(4, 12)}, "signals=12 are no multiple of 8"),
        ({"config": Config(4, 512)}, "2048 threads in a block are more than 1024"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"n": 64, "offset": 0, "layout": "plain", "config": None} | change
    x, y = Memory((3, 64), (64, 1), torch.float32), Memory((3, 33), (33, 1), torch.complex64)
    with pytest.raises(ValueError, match=message):
        bind(x, y, (given["n"],), (given["offset"],), given["layout"], False, given["config"])
