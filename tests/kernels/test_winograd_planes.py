"""Convolution with fewer products in one kernel, on a GPU or its very C++ on the CPU: against float64, between NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulate, emulated
from tests.kernels.spectra import Guarded, relative

from tilewise.kernels.cuda.launch import Program, kernel
from tilewise.kernels.cuda.winograd import CHANNELS, DEPTH, OUTPUTS, Planes, Prepare

LIMIT = 2e-6
ZEROS = 16
PLACES = [
    pytest.param("cpu", marks=emulated),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def launch(
    program: Program, grid: int, tensors: Sequence[torch.Tensor], scalars: Sequence[int], backwards: bool = False
) -> None:
    addresses = [t.data_ptr() for t in tensors]
    if tensors[0].is_cuda:
        loaded = kernel(program.source(), program.name, tensors[0].get_device())
        loaded.launch(grid, program.threads, program.shared, len(addresses), scalars)(*addresses)
    else:
        emulate(program.source(), program.name, grid, program.threads, addresses, scalars, backwards)


class Prepared:
    """What ``winograd_prepare`` gives of images and filters, in memory that was full of NaN."""

    def __init__(
        self, x: torch.Tensor, w: torch.Tensor, shares: int = 2, dense: int = 0, backwards: bool = False
    ) -> None:  # fmt: skip
        n, c, h, width = x.shape
        o, _, taps, wide = w.shape
        blocks, points = -(-o // CHANNELS), OUTPUTS + wide - 1
        self.shares = shares
        self.peaks = torch.full((n, shares), -1, dtype=torch.int32, device=x.device)
        count = blocks * -(-c // DEPTH) * points * 2 * taps * DEPTH * CHANNELS
        self.parts = torch.full((count,), math.nan, dtype=torch.float16, device=x.device)
        self.exponents = torch.full((o,), -1, dtype=torch.int32, device=x.device)
        scalars = [o, c, *w.stride(), shares, c * h * width, h, width, *x.stride()]
        grid = blocks * CHANNELS // 8 + n * shares
        launch(Prepare(taps, wide, dense), grid, [x, w, self.peaks, self.parts, self.exponents], scalars, backwards)


def run(
    p: Planes, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, padding: tuple[int, int] = (0, 0), *,
    shares: int = 2, dense: int = 0, backwards: bool = False, blocks: int = 3, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """``blocks`` take all tasks. ``padding``: before the first line and column, with sign; after the last whatever the
    result's sizes ask for."""
    assert not p.problems()
    n, c, h, width = x.shape
    out_height, out_width = y.shape[2:]
    found, read = Prepared(x, w, shares, dense, backwards), out_height + p.taps - 1
    pitch = max(read - max(0, padding[0]), min(h + padding[0], read), out_height)
    place_blocks = -(-n * pitch * p.tiles // (2 * p.places))
    segments = -(-out_width // (OUTPUTS * p.tiles))
    tasks = -(-len(w) // CHANNELS) * place_blocks * segments
    grid = min(tasks, blocks)
    scalars = [
        grid, n, shares, c, len(w), h, width, pitch, padding[0], -padding[1], out_height, out_width, place_blocks,
        segments, *x.stride(), *y.stride(),
    ]  # fmt: skip
    more = y if bias is None else bias
    launch(p, grid, [x, found.peaks, found.parts, found.exponents, y, more], scalars, backwards)


def reference(x: torch.Tensor, w: torch.Tensor, padding: tuple[int, int], sizes: Sequence[int]) -> torch.Tensor:
    """In float64, of so many lines and columns."""
    whole = torch.nn.functional.pad(x.double().cpu(), (ZEROS,) * 4)
    for dim, (before, size, taps) in enumerate(zip(padding, sizes, w.shape[2:], strict=True), start=2):
        whole = whole.narrow(dim, ZEROS - before, size + taps - 1)
    return torch.nn.functional.conv2d(whole, w.double().cpu())


def check(
    place: str, p: Planes, images: int, channels: tuple[int, int], size: tuple[int, int], out: tuple[int, int],
    padding: tuple[int, int] = (0, 0), backwards: bool = False, dense: int = 0, shares: int = 2, **memory: Any,
) -> None:  # fmt: skip
    x = Guarded((images, channels[0], *size), torch.float32, place, **memory).fill(1)
    w = Guarded((channels[1], channels[0], p.taps, p.wide_taps), torch.float32, place, **memory).fill(2)
    y = Guarded((images, channels[1], *out), torch.float32, place, **memory)
    want = reference(x.tensor, w.tensor, padding, out)
    if p.accumulate:
        want += y.fill(3).tensor.double().cpu()
    bias = torch.randn(channels[1], device=x.tensor.device) if p.bias else None
    if bias is not None:
        want += bias.double().cpu().view(-1, 1, 1)
    run(p, x.tensor, w.tensor, y.tensor, padding, shares=shares, dense=dense, backwards=backwards, bias=bias)
    assert relative(y.tensor.cpu(), want) <= LIMIT
    assert y.untouched()


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("program", "images", "channels", "size", "padding"),
    [
        (Planes(3, 3, 3, 16, 4, 4), 2, (18, 5), (9, 13), (1, 1)),
        (Planes(5, 5, 4, 16, 3, 4, bias=True), 2, (18, 70), (5, 13), (2, 2)),
        (Planes(5, 5, 2, 8, 6, 3, together=2), 1, (5, 3), (7, 9), (2, 2)),
        (Planes(1, 2, 5, 8, 6, 4, together=3), 3, (33, 4), (2, 19), (0, 1)),
        (Planes(2, 3, 1, 24, 4, 3, accumulate=True, bias=True), 5, (3, 65), (4, 4), (1, 0)),
        (Planes(4, 4, 2, 16, 4, 4, together=2), 2, (7, 9), (6, 7), (3, 3)),
        (Planes(3, 4, 4, 8, 5, 3), 2, (16, 8), (3, 14), (-1, -2)),
        (Planes(3, 5, 2, 8, 4, 3, together=2), 2, (2, 3), (3, 5), (5, 6)),
        (Planes(1, 3, 8, 16, 6, 4, together=3), 2, (4, 6), (1, 61), (0, 1)),
        (Planes(5, 2, 2, 32, 3, 3, accumulate=True), 3, (2, 2), (1, 5), (2, 1)),
    ],
)  # fmt: skip
def test_taps_tiles_and_places(
    place: str, program: Planes, images: int, channels: tuple[int, int], size: tuple[int, int],
    padding: tuple[int, int], backwards: bool,
) -> None:  # fmt: skip
    """Blocks that end inside lines and images, channels that fill no block, padding that crops or exceeds a kernel."""
    taps = (program.taps, program.wide_taps)
    out = tuple(have + before + min(before, 1) - t + 1 for have, before, t in zip(size, padding, taps, strict=True))
    out = (max(1, out[0]), max(1, out[1]))
    check(place, program, images, channels, size, out, padding, backwards)


@pytest.mark.gpu
@pytest.mark.parametrize("places", range(32, 65, 8))
@pytest.mark.parametrize(("taps", "wide"), [(1, 2), (3, 3), (2, 4), (5, 5), (7, 3)])
def test_blocks_that_fill_a_gpu(places: int, taps: int, wide: int) -> None:
    together, tiles = 3 if wide < 4 else 2, 3
    for held in range(together + 1, 2 * together + 1):
        p = Planes(taps, wide, tiles, places, held, 3, together)
        if not p.problems():
            check("cuda", p, 37, (83, 130), (21, 23), (20, 24), (taps // 2, wide // 2))


@pytest.mark.sampled(1)
@emulated
@settings(max_examples=4, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_any_form(data: st.DataObject) -> None:
    """Memory with channels or images innermost and with gaps; results of any size, mostly padding at times."""
    memory: dict[str, Any] = data.draw(
        st.sampled_from(({}, {"order": (0, 2, 3, 1)}, {"order": (3, 1, 2, 0)}, {"gap": 3, "start": 1}))
    )
    size, out = (tuple(data.draw(st.integers(1, most)) for most in (4, 9)) for _ in range(2))
    p = Planes(data.draw(st.integers(1, 3)), 3, data.draw(st.integers(1, 3)), 8, 4, 4, together=3)
    padding = data.draw(st.integers(-3, 5)), data.draw(st.integers(-3, 5))
    channels = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 3))
    x = Guarded((1, 1, *size), torch.float32, "cpu").fill(1).tensor
    if not reference(x, torch.ones(1, 1, p.taps, 3), padding, out).any():
        return  # all padding: nothing to be relative to
    check("cpu", p, data.draw(st.integers(1, 3)), channels, (size[0], size[1]), (out[0], out[1]), padding, **memory)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shares", [1, 3])
def test_largest_exponents_and_filters(place: str, shares: int) -> None:
    """Of images however their elements are read; filters at the points in high and low parts, zeros after the last."""
    factors = torch.tensor([1e-30, 1.0, 1e30]).view(3, 1, 1, 1)
    x = torch.randn(3, 4, 5, 7, generator=torch.Generator().manual_seed(1)) * factors
    x[1, 2, 3, 4], x[1, 0, 0, 0] = math.inf, math.nan  # which do not count
    w = torch.randn(5, 4, 2, 3, generator=torch.Generator().manual_seed(2)) * 1e-3
    x, w = x.to(place), w.to(place)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x)).abs().flatten(1).amax(1)
    want = (torch.frexp(finite).exponent + 126).cpu()  # as fp32 has them
    turned = x.to(memory_format=torch.channels_last)
    for images, dense in ((x, 0), (x, 1), (x, 4), (turned, 0), (turned, 1), (turned, 4)):
        found = Prepared(images, w, shares, dense)
        assert torch.equal(found.peaks.amax(1).cpu(), want)
        assert int(found.peaks.min()) >= 0
        parts = found.parts.double().cpu().view(6, 2, 2, DEPTH // 8, CHANNELS, 8)
        assert not bool(parts[:, :, :, :, 5:].any())
        assert not bool(parts[..., 4:].any())
        # The last of the first pair is at infinity, where a filter is its last tap.
        scaled = torch.ldexp((parts[1, 0] + parts[1, 1])[:, 0, :5, :4], (found.exponents.cpu() - 141).view(1, -1, 1))
        assert relative(scaled.permute(1, 2, 0), w.double().cpu()[..., 2]) <= 2e-7


@pytest.mark.parametrize("place", PLACES)
def test_each_image_keeps_its_own_accuracy(place: str) -> None:
    """Images of one block whose magnitudes are 2^40 apart, filters too."""
    x = Guarded((3, 6, 3, 7), torch.float32, place).fill(1)
    w = Guarded((3, 6, 3, 3), torch.float32, place).fill(2)
    for i, factor in enumerate((2.0**-20, 1.0, 2.0**20)):
        x.tensor[i] *= factor
        w.tensor[2 - i] *= factor**0.5
    y = Guarded((3, 3, 3, 7), torch.float32, place)
    run(Planes(3, 3, 2, 16, 4, 4), x.tensor, w.tensor, y.tensor, (1, 1))
    want = reference(x.tensor, w.tensor, (1, 1), (3, 7))
    for i in range(3):
        for o in range(3):
            assert relative(y.tensor[i, o].cpu(), want[i, o]) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
def test_filters_as_far_apart_as_numbers_are(place: str) -> None:
    """In any order among the sixteen that share a scale."""
    x = Guarded((2, 6, 3, 7), torch.float32, place).fill(1)
    w = Guarded((18, 6, 3, 3), torch.float32, place).fill(2)
    powers = [112, -108, 0, 5, 112, -108, *range(-36, 36, 8), 3, -108, 112]
    for o, power in enumerate(powers):
        w.tensor[o] *= 2.0**power
    y = Guarded((2, 18, 3, 7), torch.float32, place)
    run(Planes(3, 3, 2, 16, 4, 4), x.tensor, w.tensor, y.tensor, (1, 1))
    want = reference(x.tensor, w.tensor, (1, 1), (3, 7))
    for o in range(18):
        assert relative(y.tensor[:, o].cpu(), want[:, o]) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_in_its_tiles(place: str) -> None:
    """Images that share a block and the zeros between them."""
    x = Guarded((3, 2, 4, 12), torch.float32, place).fill(1).tensor
    w = Guarded((2, 2, 3, 3), torch.float32, place).fill(2).tensor
    want = reference(x, w, (1, 1), (4, 12))
    x[1, 0, 3, 5] = math.nan
    y = torch.full((3, 2, 4, 12), math.nan, device=place)
    run(Planes(3, 3, 3, 32, 4, 4), x, w, y, (1, 1))
    clean = torch.ones(3, 2, 4, 12, dtype=torch.bool)
    clean[1, :, 2:, 4:8] = False
    assert torch.equal(y.isfinite().cpu() | ~clean, torch.ones_like(clean))
    assert not bool(y[1, :, 2:, 4:7].isfinite().any())
    assert relative(y.cpu()[clean], want[clean]) <= LIMIT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_images_of_nothing_give_nothing(place: str, value: float) -> None:
    x, w = torch.full((2, 3, 3, 5), value, device=place), torch.ones(2, 3, 3, 3, device=place)
    y = torch.full((2, 2, 3, 5), math.nan, device=place)
    run(Planes(3, 3, 2, 8, 4, 4), x, w, y, (1, 1))
    assert float(y.abs().max()) <= 27 * 2 * value + 1e-38


def test_too_much_for_a_block_is_said() -> None:
    assert not Planes(3, 3, 7, 64, 4, 4, together=3).problems()
    (reason,) = Planes(5, 5, 16, 64, 8, 4, together=2).problems()
    assert "bytes of shared memory" in reason
    for held, filters_held in ((1, 3), (2, 2)):
        (reason,) = Planes(3, 3, 2, 8, held, filters_held, together=2).problems()
        assert "2 and 3 would do" in reason
