"""The 2-D transforms, on a GPU or their very C++ on the CPU: against torch in float64, between NaN, in any strides."""

from __future__ import annotations

import importlib.util
import mmap
import re
from typing import Any

import pytest
import torch
from tests.kernels.emulator import emulate, emulated, run_bound
from tests.kernels.spectra import Guarded, relative, spectrum

from tilewise.kernels.cuda import launch
from tilewise.kernels.cuda.fft2d import (
    LARGEST_IN_PARTS,
    LAYOUTS,
    SIZES,
    Config,
    bind,
    default_config,
    irfft2,
    rfft2,
    spectrum_shape,
)
from tilewise.kernels.cuda.operands import Memory

LIMIT = 3e-7
HALF = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
EVERY = [
    (8, "plain"), (16, "packed"), (24, "plain"), (32, "frequency_major"), (48, "plain"), (64, "packed"),
    (96, "frequency_major"), (128, "plain"),
]  # fmt: skip
"""Every size, and every layout with small and with large ones."""
PLACES = [
    pytest.param("cpu", marks=emulated),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run(
    x: torch.Tensor, y: torch.Tensor, s: tuple[int, int], offset: tuple[int, int] = (0, 0), layout: str = "plain",
    inverse: bool = False, config: Config | None = None, backwards: bool = False,
) -> None:  # fmt: skip
    """Transform between planes ``x`` and spectra ``y``, wherever they are; scaled like torch's."""
    bound = bind(Memory.of(x), Memory.of(y), s, offset, layout, inverse, config, 1.0 / s[0] / s[1])
    run_bound(bound, x, y, inverse, backwards)


def check(
    place: str, s: tuple[int, int], size: tuple[int, int], offset: tuple[int, int], layout: str = "plain",
    lead: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32, config: Config | None = None, **memory: Any,
) -> None:  # fmt: skip
    """There, and back from the exact spectrum of planes without padding; NaN outside is neither read nor written."""
    x = Guarded((*lead, *size), dtype, place, **memory).fill(1)
    y = Guarded(spectrum_shape(lead, s, layout), torch.complex64, place)
    want = spectrum(x.tensor, s, offset, layout)
    run(x.tensor, y.tensor, s, offset, layout, config=config)
    assert relative(y.tensor, want) <= LIMIT
    assert y.untouched()
    whole = Guarded((*lead, *s), torch.float64, place).fill(2).tensor
    y.tensor.copy_(spectrum(whole, s, (0, 0), layout))
    x.tensor.fill_(float("nan"))
    run(x.tensor, y.tensor, s, offset, layout, inverse=True, config=config, backwards=True)
    (a, b), (h, w) = offset, size
    assert relative(x.tensor, whole[..., a : a + h, b : b + w]) <= HALF.get(dtype, LIMIT)
    assert x.untouched()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("n", "layout"), EVERY)
def test_every_size_there_and_back(place: str, n: int, layout: str) -> None:
    check(place, (n, n), (n - 3, n - 4), (2, 1), layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", SIZES)
def test_every_size_and_layout(n: int, layout: str) -> None:
    for lead in ((1,), (67,), (9, 5)):
        check("cuda", (n, n), (n, n), (0, 0), layout, lead)
    check("cuda", (n, n), (n - 2, n - 4), (0, 2), layout, (4, 33))
    check("cuda", (n, n), (1, 1), (n - 1, n - 1), layout, (7,))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_padded(place: str, layout: str) -> None:
    check(place, (16, 16), (16, 16), (0, 0), layout)
    check(place, (16, 16), (16, 16), (0, 0), layout, (1,), start=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("s", [(16, 64), (96, 24), (8, 128)])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_rectangles(place: str, s: tuple[int, int], layout: str) -> None:
    check(place, s, (s[0] - 1, s[1] - 2), (1, 0), layout, (2, 3))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", [Config(2, 2), Config(3, 2, vector=False), Config(5)])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_configs(place: str, config: Config, layout: str) -> None:
    check(place, (16, 16), (14, 14), (0, 2), layout, config=config)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "config", [Config(4, cluster=2), Config(3, 2, vector=False, cluster=4), Config(2, 2, cluster=8)]
)
@pytest.mark.parametrize("layout", ["frequency_major", "packed"])
def test_clusters(place: str, config: Config, layout: str) -> None:
    check(place, (16, 32), (14, 30), (0, 2), layout, config=config)
    check(place, (48, 16), (47, 13), (1, 1), layout, (3, 2), config=config, order=(0, 2, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(place: str, dtype: torch.dtype) -> None:
    check(place, (32, 32), (30, 28), (2, 2), dtype=dtype)
    check(place, (32, 32), (29, 27), (1, 1), dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "memory",
    [
        {"gap": 2, "start": 2},
        {"gap": 3, "start": 1},
        {"order": (0, 2, 3, 1)},
        {"order": (1, 0, 2, 3)},
        {"order": (2, 3, 0, 1), "gap": 1},
    ],
    ids=["even gaps", "odd gaps", "channels last", "channels first", "planes last"],
)
def test_views(place: str, memory: dict[str, Any]) -> None:
    check(place, (24, 24), (22, 20), (2, 0), "plain", (3, 5), **memory)
    check(place, (24, 24), (22, 20), (2, 0), "frequency_major", (3, 5), **memory)


@pytest.mark.parametrize("place", PLACES)
def test_spectra_are_views_too(place: str) -> None:
    s, size = (16, 16), (16, 14)
    x = Guarded((3, 5, *size), torch.float32, place).fill(0)
    plain = Guarded((3, 5, 16, 9), torch.complex64, place, order=(1, 0, 2, 3), start=1)  # at 8 of 16 bytes
    run(x.tensor, plain.tensor, s)
    assert relative(plain.tensor, spectrum(x.tensor, s, (0, 0), "plain")) <= LIMIT
    assert plain.untouched()
    major = Guarded((144, 3, 5), torch.complex64, place, gap=3, order=(0, 2, 1))
    run(x.tensor, major.tensor, s, layout="frequency_major")
    assert relative(major.tensor, spectrum(x.tensor, s, (0, 0), "frequency_major")) <= LIMIT
    assert major.untouched()
    for y, layout in ((plain, "plain"), (major, "frequency_major")):
        back = Guarded((3, 5, *size), torch.float32, place)
        run(back.tensor, y.tensor, s, layout=layout, inverse=True)
        assert relative(back.tensor, x.tensor.double()) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_in_its_plane(place: str) -> None:
    x = Guarded((6, 16, 16), torch.float32, place).fill(0).tensor
    x[1, 3, 4], x[4, 0, 0] = float("nan"), float("inf")
    y = torch.zeros(6, 16, 9, dtype=torch.complex64, device=place)
    run(x, y, (16, 16))
    finite = torch.isfinite(torch.view_as_real(y)).flatten(1)
    assert finite.all(1).tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("place", PLACES)
def test_imaginary_parts_of_real_frequencies_do_not_count(place: str) -> None:
    y = torch.fft.rfft2(torch.randn(4, 16, 16)).to(torch.complex64).to(place)
    bent = y.clone()
    for k1, k2 in ((0, 0), (0, 8), (8, 0), (8, 8)):
        bent[:, k1, k2] += 3j
    got, want = (torch.zeros(4, 16, 16, device=place) for _ in range(2))
    run(got, bent, (16, 16), inverse=True)
    run(want, y, (16, 16), inverse=True)
    assert torch.equal(got, want)


@emulated
def test_a_missing_barrier_shows() -> None:
    """Of the emulation: without any one of its barriers a kernel goes wrong."""
    x, y = torch.randn(3, 24, 24), torch.zeros(3, 24, 13, dtype=torch.complex64)
    bound = bind(Memory.of(x), Memory.of(y), (24, 24), (0, 0), "plain", False, None)
    p = bound.program
    pieces = re.split(r"  (?:synchronize|exchange)\(\);\n", p.source())
    assert len(pieces) == 4
    for i in range(1, len(pieces)):
        text = "  synchronize();\n".join([*pieces[: i - 1], pieces[i - 1] + pieces[i], *pieces[i + 1 :]])
        emulate(text, p.name, bound.grid, p.threads, [x.data_ptr(), y.data_ptr(), 0], bound.scalars)
        assert not relative(y, spectrum(x, (24, 24), (0, 0), "plain")) <= LIMIT


@emulated
def test_offsets_beyond_32_bits_on_the_cpu() -> None:
    far = 2**31 + 64
    storage = mmap.mmap(-1, 4 * far + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
    x = torch.frombuffer(storage, dtype=torch.float32).as_strided((2, 8, 8), (far, 8, 1))
    x.copy_(torch.randn(2, 8, 8))
    y = torch.zeros(2, 8, 5, dtype=torch.complex64)
    run(x, y, (8, 8))
    assert relative(y, spectrum(x, (8, 8), (0, 0), "plain")) <= LIMIT


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    planes = 2**31 // 64 + 5
    if torch.cuda.mem_get_info()[0] < 64 * planes * 8:
        pytest.skip("needs 18 GiB of GPU memory")
    x = torch.zeros(planes, 8, 8, device="cuda", dtype=torch.float16)
    y = torch.full((planes, 8, 5), float("nan"), dtype=torch.complex64, device="cuda")
    x[-3:] = torch.randn(3, 8, 8)
    rfft2(x, out=y)
    assert relative(y[-3:], spectrum(x[-3:], (8, 8), (0, 0), "plain")) <= LIMIT
    x.fill_(float("nan"))
    irfft2(y, (8, 8), out=x)
    assert relative(x[-3:], torch.fft.irfft2(y[-3:].to(torch.complex128))) <= 1e-3
    assert not x[:-3].any()


@pytest.mark.gpu
def test_the_wrapper_follows_torch() -> None:
    x = torch.randn(3, 4, 30, 27, device="cuda")
    y = rfft2(x, (32, 32))
    torch.testing.assert_close(y, torch.fft.rfft2(x, s=(32, 32)), rtol=1e-4, atol=1e-4)
    back = irfft2(y, (32, 32), size=(30, 27))
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = rfft2(x.clone(), (32, 32))
    stream.synchronize()
    assert torch.equal(late, y)
    assert rfft2(x[:0], (32, 32)).shape == (0, 4, 32, 17)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvrtc_compiles_them(layout: str) -> None:
    if launch.unavailable():
        pytest.skip(launch.unavailable())
    for n, dtype in ((8, torch.bfloat16), (24, torch.float16), (96, torch.float32)):
        for inverse in (False, True):
            x = Memory((3, n, n - 1), (n * n, n - 1, 1), dtype)
            shape = spectrum_shape((3,), (n, n), layout)
            y = Memory(shape, torch.empty(shape, device="meta").stride(), torch.complex64)
            text = bind(x, y, (n, n), (0, 0), layout, inverse, None).program.source()
            try:
                assert len(launch.compile_cubin(text, "sm_90").code) > 1000
            except Exception as error:
                if "nvrtc" in str(error) and "NotFound" in type(error).__name__:
                    pytest.skip("no NVRTC library")
                raise


def test_default_configs_fit_every_size() -> None:
    for layout in LAYOUTS:
        for s in [(a, b) for a in SIZES for b in SIZES]:
            for inverse in (False, True):
                shape = spectrum_shape((9,), s, layout)
                y = Memory(shape, torch.empty(shape, device="meta").stride(), torch.complex64)
                x = Memory((9, *s), (s[0] * s[1], s[1], 1), torch.float32)
                assert bind(x, y, s, (0, 0), layout, inverse, default_config(s, layout, inverse)).grid >= 1


def test_fp16_parts_fill_sectors() -> None:
    for s in [(a, b) for a in SIZES for b in SIZES]:
        for spectra in ("half", "split"):
            shape = spectrum_shape((9,), s, "frequency_major", spectra)
            y = Memory(shape, torch.empty(shape, device="meta").stride(), torch.float16)
            x = Memory((9, *s), (s[0] * s[1], s[1], 1), torch.float32)
            bound = bind(x, y, s, (0, 0), "frequency_major", False, None, spectra=spectra, spread=14)
            assert bound.grid >= 1
            config = default_config(s, "frequency_major", spectra=spectra)
            assert config.planes >= 16 or max(s) > LARGEST_IN_PARTS


def scale(x: torch.Tensor, spread: int) -> float:
    """The power of two that brings the spectra of planes of at most 2^spread numbers below 2^15."""
    finite = x[x.isfinite()].abs().to(torch.float32)
    bits = int(finite.max().cpu().view(torch.int32)) if finite.numel() else 0
    return 2.0 ** max(-126, min(126, 141 - (bits >> 23) - spread))


def check_parts(
    place: str, n: int, spectra: str, lead: tuple[int, ...], dtype: torch.dtype, size: float = 1.0, **memory: Any
) -> torch.Tensor:
    """Spectra in fp16 parts, between NaN; gives them back as complex numbers, unscaled."""
    x = Guarded((*lead, n - 1, n - 2), dtype, place, **memory).fill(1)
    x.tensor.mul_(size)
    spread = ((n - 1) * (n - 2) - 1).bit_length()
    y = Guarded(spectrum_shape(lead, (n, n), "frequency_major", spectra), torch.float16, place, gap=1)
    bound = bind(
        Memory.of(x.tensor), Memory.of(y.tensor), (n, n), (0, 1), "frequency_major", False, None,
        spectra=spectra, spread=spread,
    )  # fmt: skip
    peak = x.tensor.abs().max().to(torch.float32).view(1).view(torch.int32)
    run_bound(bound, x.tensor, y.tensor, False, peaks=peak)
    assert y.untouched()
    parts = y.tensor.double()
    each = parts if spectra == "half" else parts[:, ::2] + parts[:, 1::2]
    assert float(parts.abs().max()) <= 2.0**15
    got = torch.complex(each[:, 0], each[:, 1]) / scale(x.tensor, spread)
    want = spectrum(x.tensor, (n, n), (0, 1), "frequency_major")
    assert relative(got, want) <= (4e-4 if spectra == "half" else LIMIT)
    return got


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("n", "spectra"), [(8, "split"), (16, "half"), (24, "split"), (32, "split"), (48, "half"), (64, "split")]
)
def test_fp16_parts(place: str, n: int, spectra: str) -> None:
    check_parts(place, n, spectra, (5, 7), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("spectra", ["half", "split"])
@pytest.mark.parametrize("n", SIZES)
def test_fp16_parts_of_every_size(n: int, spectra: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_parts("cuda", n, spectra, (3, 64), dtype)
        check_parts("cuda", n, spectra, (3, 19), dtype, gap=3, start=1)
        check_parts("cuda", n, spectra, (3, 64), dtype, order=(0, 2, 3, 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1e-36, 1e30])
def test_fp16_parts_of_any_magnitude(place: str, size: float) -> None:
    check_parts(place, 8, "split", (3, 5), torch.float32, size, gap=1, order=(0, 2, 3, 1))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_has_no_finite_parts_and_leaves_others_theirs(place: str) -> None:
    x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(5)).to(place)
    x[0], x[1, 2, 3] = 0.0, float("inf")
    y = torch.full((40, 4, 3), float("nan"), dtype=torch.float16, device=place)
    peak = x[2].abs().max().view(1).view(torch.int32)
    bound = bind(Memory.of(x), Memory.of(y), (8, 8), (0, 0), "frequency_major", False, None, spectra="split", spread=6)
    run_bound(bound, x, y, False, peaks=peak)
    assert bool((y[..., 0] == 0).all())
    assert bool(y[..., 2].isfinite().all())
    assert not bool((y[:, :2, 1] + y[:, 2:, 1]).isfinite().any())


PACKED = {"layout": "packed", "y": Memory((128, 3), (3, 1), torch.complex64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": Config(4, cluster=2)}, "clusters take frequency_major and packed spectra, not plain"),
        ({**PACKED, "config": Config(4, cluster=3)}, "3 blocks do not share 16 x 16 evenly"),
        ({**PACKED, "config": Config(4, cluster=16)}, "a cluster has 1 to 8 blocks, not 16"),
        ({"s": (16, 20)}, r"s=\(16, 20\): sizes are 8, 16, 24"),
        ({"offset": (1, 0)}, "height 16 at offset 1 does not fit a basis of 16"),
        ({"offset": (0, -1)}, "width 16 at offset -1 does not fit a basis of 16"),
        ({"layout": "transposed"}, "layout='transposed': must be one of plain, frequency_major, packed"),
        ({"layout": "packed"}, r"the spectrum has shape \(3, 16, 9\), packed spectra of \(3, 16, 16\) have \(128, 3\)"),
        ({"s": (8, 8)}, "height 16 at offset 0 does not fit a basis of 8"),
        ({"config": Config(256)}, "threads in a block are more than 1024"),
        (
            {
                "x": Memory((3, 128, 128), (2**14, 128, 1), torch.float32),
                "y": Memory((3, 128, 65), (8320, 65, 1), torch.complex64),
                "s": (128, 128), "config": Config(4),
            },
            "266240 bytes of shared memory in a block are more than",
        ),
        ({"x": Memory((3, 16, 16), (256, 2**31, 1), torch.float32)}, "a stride of 2147483648 elements inside"),
        ({"y": Memory((3, 16, 9), (144, 1, 16), torch.complex64)}, r"must be \(9, 1\)"),
        ({"spectra": "quarter"}, "spectra='quarter': must be one of interleaved, half, split"),
        ({"spectra": "half"}, "layout='plain': spectra in fp16 parts are frequency_major"),
        (
            {
                "y": Memory((144, 2, 3), (6, 3, 1), torch.float16),
                "layout": "frequency_major", "spectra": "half", "spread": 7,
            },
            "spread=7, inverse=False: spectra='half' are written only, of at most 2\\^spread numbers",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": Memory((3, 16, 16), (256, 16, 1), torch.float32),
        "y": Memory((3, 16, 9), (144, 9, 1), torch.complex64),
        "s": (16, 16), "offset": (0, 0), "layout": "plain", "inverse": False, "config": None,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        bind(given.pop("x"), given.pop("y"), **given)


def test_wrong_types_and_devices_are_named() -> None:
    a, y = Memory((3, 16, 16), (256, 16, 1), torch.float32), Memory((144, 2, 3), (6, 3, 1), torch.complex64)
    with pytest.raises(TypeError, match=r"the spectrum is torch\.complex64: must be float16"):
        bind(a, y, (16, 16), (0, 0), "frequency_major", False, None, spectra="half", spread=8)
    x, y = Memory((3, 16, 16), (256, 16, 1), torch.float64), Memory((3, 16, 9), (144, 9, 1), torch.complex64)
    with pytest.raises(TypeError, match=r"real data are torch\.float64"):
        bind(x, y, (16, 16), (0, 0), "plain", False, None)
    with pytest.raises(ValueError, match="x is on cpu"):
        rfft2(torch.zeros(2, 16, 16))
    with pytest.raises(ValueError, match="y is on cpu"):
        irfft2(torch.zeros(2, 16, 9, dtype=torch.complex64), (16, 16))
    a = Memory((2, 2, 2, 8, 8), (9999, 999, 99, 8, 1), torch.float32)
    b = Memory((2, 2, 2, 8, 5), (160, 80, 40, 5, 1), torch.complex64)
    with pytest.raises(ValueError, match="do not join into two"):
        bind(a, b, (8, 8), (0, 0), "plain", False, None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("n", "layout"), [(8, "frequency_major"), (32, "packed"), (48, "plain"), (96, "frequency_major")]
)
def test_peaks_bound_what_is_finite(place: str, n: int, layout: str) -> None:
    x = torch.randn(7, n - 1, n - 2, generator=torch.Generator().manual_seed(4)).to(place)
    x[4] *= 1e4
    x[6, 0, 0] = float("inf")
    y = torch.empty(spectrum_shape((7,), (n, n), layout), dtype=torch.complex64, device=place)
    bound = bind(Memory.of(x), Memory.of(y), (n, n), (0, 1), layout, False, None, 1.0, True)
    peaks = torch.full((bound.grid + 1,), -1, dtype=torch.int32, device=place)
    run_bound(bound, x, y, False, peaks=peaks)
    found = peaks[: bound.grid].view(torch.float32)
    finite = torch.view_as_real(y).abs()
    largest = float(finite[finite.isfinite()].max())
    assert int(peaks[-1]) == -1
    assert bool((found >= 0).all())
    assert bool(found.isfinite().all())
    assert largest <= float(found.max()) <= 4 * largest
