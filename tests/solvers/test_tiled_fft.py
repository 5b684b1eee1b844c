"""Tiles of small transforms: the kernels' very C++ emulated, products in Triton's interpreter, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.kernels.emulator import emulated, launched
from tests.reference import convolve
from tests.solvers.test_solvers import check
from tests.strategies import allocate, described, with_memory

from tilewise.kernels.cuda.launch import Bound
from tilewise.kernels.cuda.operands import leading
from tilewise.plan import Config
from tilewise.planner.search.estimate import estimate_ms
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.fourier import _own as _own_fft
from tilewise.solvers.fourier import _own_configs as own
from tilewise.solvers.fourier._frequency_products import FUSED, IN_PARTS, PLANES
from tilewise.solvers.fourier._magnitudes import collapsed
from tilewise.solvers.fourier._own_configs import plan_of
from tilewise.solvers.fourier._stretches import batches
from tilewise.solvers.fourier._windows import most, windows
from tilewise.solvers.fourier.fft import FFT
from tilewise.solvers.fourier.tiled_fft import TiledFFT

SOLVER = TiledFFT()
DENSE = (("contiguous", 0),) * 3
GPU = "cuda:some GPU"
PROFILE = {"copy": 3e9, "fp32": 5e10, "tf32": 4e11, "bf16": 7e11, "fp16": 7e11, "kernel": 3e-3}
"""Rates of a GPU whose matrix units are much faster than its memory."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms go through the emulator where tensors are the CPU's."""
    real = _own_fft.launched

    def either(device: torch.device) -> Callable[[Bound], _own_fft.Transform]:
        return real(device) if device.type == "cuda" else launched

    monkeypatch.setattr(_own_fft, "launched", either)


@st.composite
def axes(draw: st.DrawFn, longest: int = 14) -> Axis:
    """Paddings of either sign, kernels as long as the padded image."""
    size = draw(st.integers(1, longest))
    before, after = draw(st.integers(-2, 5)), draw(st.integers(-2, 5))
    assume(size + min(before, 0) + min(after, 0) >= 1)
    kernel = draw(st.integers(1, 7))
    assume(size + before + after >= kernel)
    return Axis(size, kernel, 1, 1, before, after)


@st.composite
def layers(draw: st.DrawFn, pass_: Pass, dims: int, longest: int = 50) -> ConvProblem:
    groups = draw(st.sampled_from((1, 1, 2)))
    channels = st.sampled_from((1, 2, 3, 5))
    dtype = draw(st.sampled_from(("fp32", "fp32", "fp16")))
    return ConvProblem(
        pass_, draw(st.integers(1, 4)), groups * draw(channels), groups * draw(channels),
        tuple(draw(axes({1: longest, 2: 14}[dims])) for _ in range(dims)), groups=groups, dtype=dtype,
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    found = draw(_drawn(p))
    assume(own.fits(p, found))  # one tile may read less than smaller ones, which reach over the edge
    return found


@st.composite
def _drawn(draw: st.DrawFn, p: ConvProblem) -> Config:
    basis, tile = [], []
    for axis in p.axes:
        n = draw(st.sampled_from([n for n in (8,) if most(axis, p.pass_, n)] or [16]))
        basis.append(n)
        tile.append(draw(st.integers(max(1, most(axis, p.pass_, n) // 2), most(axis, p.pass_, n))))
    product = draw(st.sampled_from(("fp16x3", "library") if p.dtype == "fp32" else ("fp16x3", "fp16", "library")))
    found: dict[str, object] = {"basis": tuple(basis), "tile": tuple(tile), "product": product}
    if product != "library":
        found |= {"gemm": (64, 16, 64), "warps": 4, "stages": 2}
        if p.dims > 1 and draw(st.booleans()):
            found["spectra"] = IN_PARTS[product]
        return Config(**found)  # type: ignore[arg-type]  # in one piece: interpreted products take their time
    if draw(st.booleans()):
        found["block"] = draw(st.integers(1, p.batch))
    if draw(st.booleans()):
        found["tiles"] = draw(st.integers(1, 3))
    return Config(**found)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.sampled(2)
@interpreted
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tile(pass_: Pass, dims: int, data: st.DataObject) -> None:
    p = data.draw(layers(pass_, dims))
    check(SOLVER, p, data.draw(configs(p)), DENSE, accumulate=False)


@emulated
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fused_products(pass_: Pass, data: st.DataObject) -> None:
    """Any number of channels that is summed over, groups, views, and any images and tiles in flight."""
    groups, depth, others = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    into, outof = (depth, others) if pass_ is Pass.FPROP else (others, depth)
    dtype = data.draw(st.sampled_from(("fp32", "fp32", "bf16")))
    p = ConvProblem(
        pass_, data.draw(st.integers(1, 4)), groups * into, groups * outof, (data.draw(axes()), data.draw(axes())),
        groups=groups, dtype=dtype,
    )  # fmt: skip
    drawn = {**data.draw(configs(p)), "product": FUSED}
    kept = {name: drawn[name] for name in ("basis", "tile", "product")}
    if data.draw(st.booleans()):
        kept["block"] = data.draw(st.integers(1, p.batch))
    elif data.draw(st.booleans()):
        kept["tiles"] = data.draw(st.integers(1, 3))
    found, forms = data.draw(with_memory(st.just(p)))
    check(SOLVER, found, Config(**kept), forms, accumulate=False)


@pytest.mark.slow
@pytest.mark.sampled(2)
@interpreted
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_products_plane_by_plane(pass_: Pass, dims: int, data: st.DataObject) -> None:
    """Any images and tiles in flight, groups and views."""
    p, forms = data.draw(with_memory(layers(pass_, dims, longest=20)))
    drawn = {**data.draw(configs(p)), "product": PLANES}
    kept = {name: drawn[name] for name in ("basis", "tile", "product", "block", "tiles") if name in drawn}
    if "tiles" in kept:
        kept["block"] = 1
    check(SOLVER, p, Config(**kept), forms, accumulate=False)


@pytest.mark.sampled(1)
@interpreted
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(("form", "more"), [("channels_last", {"multiplications": 4}), ("view", {"spectra": "split"})])
def test_layouts(pass_: Pass, form: str, more: dict[str, Any]) -> None:
    channels = (8, 16) if "spectra" in more else (4, 6)
    p = ConvProblem(pass_, 3, *channels, (Axis(10, 3, 1, 1, 1, 1), Axis(11, 5, 1, 1, 2, 0)), layouts=(form,) * 3)
    c = Config(basis=(8, 8), tile=(6, 4), product="fp16x3", gemm=(16, 16, 16), warps=4, stages=2, block=2, **more)
    check(SOLVER, p, c, ((form, 3 if form == "view" else 0),) * 3, accumulate=False)


@pytest.mark.sampled(3)
@interpreted
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(
    ("form", "batch", "more"),
    [("contiguous", 3, {"product": "fp16x3", "gemm": (16, 16, 16), "warps": 4, "stages": 2}),
     ("channels", 2, {"product": "library"}), ("channels_last", 9, {"product": "library"}),
     ("steps", 2, {"product": "library", "tiles": 3})],
)  # fmt: skip
def test_layouts_of_signals(pass_: Pass, form: str, batch: int, more: dict[str, Any]) -> None:
    """Images and channels join to one dimension or not, and then images are fewer than tiles or more."""
    p = ConvProblem(pass_, batch, 4, 6, (Axis(61, 8, 1, 1, 3, 5),))
    meta = torch.device("meta")
    p = described(p, {role: allocate(p.shape(role), torch.float32, meta, form, 2)[0] for role in ROLES})
    check(SOLVER, p, Config(basis=(16,), tile=(8,), **more), ((form, 2),) * 3, accumulate=False)


@emulated
@pytest.mark.parametrize("pass_", list(Pass))
def test_short_signals_are_one_tile_of_the_solver_fft(pass_: Pass) -> None:
    p = ConvProblem(pass_, 5, 6, 4, (Axis(13, 5, 1, 1, 2, 2),), groups=2, device=GPU)
    offered = [c for c, _ in FFT().offers(p, None) if c.get("transform") == "own"]
    assert {c["basis"] for c in offered} == {(16,), (24,)}
    assert {c["product"] for c in offered} == {"fp16x3", "library", "planes"}
    found = next(c for c in offered if c["product"] == "library")
    check(FFT(), replace(p, device="cpu"), found, DENSE, accumulate=False)


@pytest.mark.parametrize("pass_", list(Pass))
def test_the_tiles_of_long_signals_share_launches(pass_: Pass) -> None:
    """Fifty tiles of 32 images: the first, those inside and the last."""
    p = ConvProblem(pass_, 32, 64, 64, (Axis(8192, 101, 1, 1, 50, 50),), device=GPU)
    c = Config(basis=(256,), tile=(156,), product="library")
    tensors = [torch.empty(p.shape(role), device="meta") for role in (*p.operands, p.result)]
    bound: list[Bound] = []

    def launch(each: Bound) -> _own_fft.Transform:
        bound.append(each)
        return lambda *_: None

    steps = own.plan_of(p, c).steps(tensors, torch.device("cpu"), launch)
    assert own.count(p, (156,)) == 53
    assert len(steps) == SOLVER.cost(p, c).kernels - 2 <= 8
    assert sum(not b.program.vector for b in bound) == 1  # filters of 101
    apart = replace(p, layouts=("channels_last",) * 3)
    tensors = [t.permute(0, 2, 1).contiguous().permute(0, 2, 1) for t in tensors]
    steps = own.plan_of(apart, c).steps(tensors, torch.device("cpu"), launch)
    assert len(steps) == SOLVER.cost(apart, c).kernels - 2 > 64


@given(st.data())
def test_batches_hold_every_tile_once(data: st.DataObject) -> None:
    axis, pass_ = data.draw(axes(50)), data.draw(st.sampled_from(list(Pass)))
    extent = axis.size if pass_ is Pass.DGRAD else axis.out
    tiles, _ = windows(axis, pass_, data.draw(st.integers(1, extent)))
    places = [((w.start, w.count, w.lead),) for w in tiles]
    first, images, channels = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    memory = torch.empty(first + images, channels + data.draw(st.integers(0, 1)), axis.size)[:, :channels]
    if data.draw(st.booleans()):
        memory = memory.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    found: list[tuple[int, int, Any]] = []
    for batch in batches(places, first, images, channels, memory.stride()):
        row = range(batch.row, batch.row + batch.stretch.tiles * batch.apart, batch.apart)
        for number, image in itertools.product(range(batch.stretch.tiles), range(batch.images)):
            found.append((row[number] + image, batch.first + image, batch.stretch.tile(number)))
        inside = (batch.stretch.tiles, batch.images, channels)
        spectra = (batch.apart * channels, channels, 1)
        leading(inside, (batch.stretch.step * memory.stride(2), *memory.stride()[:2]), spectra)
    every = itertools.product(places, range(first, first + images))
    assert sorted(found) == [(row, image, place) for row, (place, image) in enumerate(every)]


@given(axis=axes(), pass_=st.sampled_from(list(Pass)), data=st.data())
def test_tiles_are_the_whole(axis: Axis, pass_: Pass, data: st.DataObject) -> None:
    """Each tile by its definition, without wrapping, adds up to the axis's own convolution."""
    extent = axis.size if pass_ is Pass.DGRAD else axis.out
    size = data.draw(st.integers(1, extent))
    tiles, basis = windows(axis, pass_, size)
    a, w = torch.randn(axis.size, dtype=torch.float64), torch.randn(axis.kernel, dtype=torch.float64)
    dy = torch.randn(axis.out, dtype=torch.float64)
    got = torch.zeros({Pass.FPROP: axis.out, Pass.DGRAD: axis.size, Pass.WGRAD: axis.kernel}[pass_], dtype=a.dtype)
    n = max(basis, axis.kernel)
    for t in tiles:
        data_in = (dy if pass_ is Pass.DGRAD else a)[t.start : t.start + t.count]
        plane = torch.zeros(n, dtype=a.dtype)
        plane[t.lead : t.lead + t.count] = data_in
        other = torch.zeros(n, dtype=a.dtype)
        if pass_ is Pass.WGRAD:
            other[: t.other_count] = dy[t.other_start : t.other_start + t.other_count]
        else:
            other[: axis.kernel] = w
        product = torch.fft.fft(plane) * (torch.fft.fft(other) if pass_ is Pass.DGRAD else torch.fft.fft(other).conj())
        result = torch.fft.ifft(product).real[t.result_lead : t.result_lead + t.result_count]
        got[t.result_start : t.result_start + t.result_count] += result
    want = torch.zeros_like(got)
    for j in range(axis.out):
        for r in range(axis.kernel):
            i = j - axis.before + r
            if 0 <= i < axis.size:
                if pass_ is Pass.FPROP:
                    want[j] += a[i] * w[r]
                elif pass_ is Pass.DGRAD:
                    want[i] += dy[j] * w[r]
                else:
                    want[r] += a[i] * dy[j]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@given(axis=axes(), pass_=st.sampled_from(list(Pass)), basis=st.sampled_from((8, 16, 24)))
def test_the_largest_tile_fits_and_a_larger_one_does_not(axis: Axis, pass_: Pass, basis: int) -> None:
    size, extent = most(axis, pass_, basis), axis.size if pass_ is Pass.DGRAD else axis.out
    if size:
        assert windows(axis, pass_, size)[1] <= basis
    if 0 < size < extent:
        assert windows(axis, pass_, extent)[1] > basis


@pytest.mark.parametrize(
    ("channels", "layer"),
    [(32, (Axis(56, 5, 1, 1, 2, 2),) * 2), (8, (Axis(16384, 101, 1, 1, 50, 50),))],
    ids=["2d", "1d"],
)
@pytest.mark.parametrize("pass_", list(Pass))
def test_a_limit_is_kept_by_fewer_images_and_tiles(pass_: Pass, channels: int, layer: tuple[Axis, ...]) -> None:
    p = ConvProblem(pass_, 16, channels, channels, layer, device=GPU)
    whole = SOLVER.offers(p, None)
    assert {len(c["basis"]) for c, _ in whole} == {len(layer)}  # type: ignore[arg-type]
    smallest = min(size for _, size in whole)
    for limit in (smallest // 4, smallest // 16):
        offered = [(c, size) for c, size in SOLVER.offers(p, limit) if size <= limit]
        assert offered
        for c, size in offered:
            assert SOLVER.workspace(p, c) == size


def test_what_it_leaves_to_others() -> None:
    fits = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(56, 5, 1, 1, 2, 2),) * 2, device=GPU)
    assert SOLVER.why_not(fits) == []
    strided = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(56, 5, 2), Axis(56, 5, 1, 2)), device=GPU)
    assert len(SOLVER.why_not(strided)) == 2
    long = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(256, 65), Axis(256, 5)), device=GPU)
    assert len(SOLVER.why_not(long)) == 1
    signal = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(512, 128),), device=GPU)
    assert SOLVER.why_not(signal) == []
    assert SOLVER.why_not(replace(signal, axes=(Axis(512, 129),))) == ["along w takes kernels to 128, not 129"]
    volume = ConvProblem(Pass.FPROP, 1, 8, 8, (Axis(56, 5),) * 3, device=GPU)
    assert SOLVER.why_not(volume) == ["does 1/2-D, not 3-D"]
    depthwise = ConvProblem(Pass.FPROP, 1, 64, 64, (Axis(56, 5), Axis(56, 5)), groups=64, device=GPU)
    assert len(SOLVER.why_not(depthwise)) == 1


@pytest.mark.parametrize("pass_", list(Pass))
def test_a_kernel_of_one_point_is_left_to_matrix_products(pass_: Pass) -> None:
    """By our own transforms, whole or in tiles; those of the library stay."""
    p = ConvProblem(pass_, 4, 64, 64, (Axis(28, 1), Axis(28, 1)), device=GPU)
    (reason,) = SOLVER.why_not(p)
    assert "matrix product already" in reason
    assert {c.get("transform") for c, _ in FFT().offers(p, None)} == {None}
    wide = replace(p, axes=(Axis(28, 1), Axis(28, 3)))
    assert {c.get("transform") for c, _ in FFT().offers(wide, None)} == {None, "own"}


@pytest.mark.sampled(2)
@interpreted
@emulated
@pytest.mark.parametrize(
    ("pass_", "product", "dims"),
    [(Pass.FPROP, "fp16x3", 2), (Pass.FPROP, "library", 2), (Pass.DGRAD, "split", 2), (Pass.DGRAD, "library", 2),
     (Pass.FPROP, "fused", 2), (Pass.DGRAD, "planes", 2), (Pass.FPROP, "fp16x3", 1), (Pass.DGRAD, "library", 1)],
)  # fmt: skip
def test_a_constant_filter_is_transformed_apart(pass_: Pass, product: str, dims: int) -> None:
    axes = (Axis(10, 3, 1, 1, 1, 1), Axis(9, 5, 1, 1, 2, 0))[:dims]
    p = ConvProblem(pass_, 3, 4, 6, axes, constant_weight=True)
    piece: dict[str, object] = (
        {} if product in ("library", "fused", "planes") else {"gemm": (16, 16, 16), "warps": 4, "stages": 2}
    )
    if product == "split":
        product, piece["spectra"] = "fp16x3", "split"
    else:
        piece["block"] = 2
    c = Config(basis=(8, 8)[:dims], tile=(6, 4)[:dims], product=product, **piece)  # type: ignore[arg-type]
    a, w = (torch.randn(p.shape(role)) for role in p.operands)
    out = torch.full(p.shape(p.result), math.nan)
    kept = torch.full((SOLVER.constant(p, c),), 0xFF, dtype=torch.uint8)
    workspace = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    SOLVER.prepare(p, c, w)(w, kept, workspace)
    workspace.fill_(0xFF)
    run = SOLVER.bind(p, c, a, w, out)
    for _ in range(2):
        run(a, kept, out, workspace)
        torch.testing.assert_close(out.double(), convolve(p, a, w), rtol=1e-4, atol=1e-4)
    assert SOLVER.workspace(p, c) < SOLVER.workspace(replace(p, constant_weight=False), c)


@pytest.mark.parametrize(("pass_", "precision"), [(Pass.FPROP, "ieee"), (Pass.DGRAD, "tf32"), (Pass.WGRAD, "ieee")])
def test_fp16_parts_are_offered_where_they_fit(pass_: Pass, precision: str) -> None:
    p = ConvProblem(pass_, 16, 256, 256, (Axis(56, 5, 1, 1, 2, 2),) * 2, device=GPU, precision=precision)
    form = "split" if precision == "ieee" else "half"
    found = {c["basis"]: {c.get("spectra") for c, _ in SOLVER.offers(p, None)} for c, _ in SOLVER.offers(p, None)}
    assert found
    assert all(kinds == {None, form} for kinds in found.values())
    for c, _ in SOLVER.offers(p, None):
        whole = Config(**{**c, "spectra": "interleaved"})
        if "spectra" in c:
            assert SOLVER.cost(p, c).efficiency > SOLVER.cost(p, whole).efficiency
            assert estimate_ms(p, SOLVER.cost(p, c), PROFILE) < estimate_ms(p, SOLVER.cost(p, whole), PROFILE)
            if form == "half":
                assert SOLVER.cost(p, c).bytes < SOLVER.cost(p, whole).bytes
                assert SOLVER.workspace(p, c) < SOLVER.workspace(p, whole)


@pytest.mark.parametrize(("pass_", "channels"), [(Pass.FPROP, (3, 64)), (Pass.DGRAD, (64, 3))])
def test_few_channels_need_no_spectrum_of_the_result(pass_: Pass, channels: tuple[int, int]) -> None:
    p = ConvProblem(pass_, 16, *channels, (Axis(56, 5, 1, 1, 2, 2),) * 2, device=GPU)
    for limit in (None, 2**24, 2**20):
        found = SOLVER.offers(p, limit)
        assert found[0][0]["product"] == FUSED
        for c, size in found:
            if c["product"] != FUSED:
                continue
            assert SOLVER.workspace(p, c) == size
            assert SOLVER.hidden_workspace(p, c) == 0
            whole = Config(**{**c, "product": "library"})
            assert 2 * size < SOLVER.workspace(p, whole)
            assert estimate_ms(p, SOLVER.cost(p, c), PROFILE) < estimate_ms(p, SOLVER.cost(p, whole), PROFILE)
    more = tuple(max(n, 5) for n in channels)
    for other in (replace(p, pass_=Pass.WGRAD), replace(p, in_channels=more[0], out_channels=more[1])):
        assert all(c["product"] != FUSED for c, _ in SOLVER.offers(other, None))


def test_fused_steps_are_named_and_sums_are_short() -> None:
    p = ConvProblem(Pass.FPROP, 2, 3, 4, (Axis(10, 3),) * 2)
    c = Config(basis=(8, 8), tile=(6, 6), product=FUSED)
    tensors = [torch.empty(p.shape(role)) for role in (*p.operands, p.result)]
    steps = plan_of(p, c).steps(tensors, torch.device("cpu"), lambda bound: lambda *addresses: None)
    assert [name for name, _ in steps] == ["transform B", *["transform A"] * 4, *["product and inverse C"] * 4]
    for change in ({"pass_": Pass.WGRAD}, {"in_channels": 9}):
        with pytest.raises(ValueError, match="product='fused': sums over at most 8 channels, and no gradient of a"):
            plan_of(replace(p, **change), c)  # type: ignore[arg-type]


def test_parts_go_with_their_product() -> None:
    p = ConvProblem(Pass.FPROP, 2, 8, 8, (Axis(10, 3),) * 2, device=GPU)
    c = Config(basis=(8, 8), tile=(6, 6), product="library", spectra="split")
    with pytest.raises(ValueError, match="spectra='split': the product library takes spectra='interleaved' or"):
        SOLVER.workspace(p, c)
    with pytest.raises(ValueError, match="spectra='whole': must be one of interleaved, half, split"):
        SOLVER.workspace(p, Config(basis=(8, 8), tile=(6, 6), product="library", spectra="whole"))
    signal = replace(p, axes=(Axis(10, 3),))
    with pytest.raises(ValueError, match="spectra='split': those of signals are interleaved"):
        SOLVER.workspace(signal, Config(basis=(8,), tile=(6,), product="library", spectra="split"))
    with pytest.raises(ValueError, match=r"basis=\(8, 8\): \(n,\), n positive, would do"):
        SOLVER.workspace(signal, Config(basis=(8, 8), tile=(6,), product="library"))


@given(st.data())
def test_collapsed_dimensions_hold_the_same_elements(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=4, max_size=4))
    order = data.draw(st.permutations(range(4)))
    wide = torch.arange(math.prod(n + 1 for n in sizes)).view([n + 1 for n in sizes])
    tensor = wide[tuple(slice(0, n + data.draw(st.integers(0, 1))) for n in sizes)].permute(*order)
    if data.draw(st.booleans()):
        tensor = tensor[:, :1].expand(-1, 3, -1, -1)
    found = collapsed(tensor.shape, tensor.stride())
    same = tensor.as_strided([n for n, _ in found], [step for _, step in found])
    assert sorted(same.flatten().tolist()) == sorted(set(tensor.flatten().tolist()))
    assert all(a != n * b for (_, a), (n, b) in itertools.pairwise(found))
