"""Fused depthwise transforms, with the very C++ of their kernels on the CPU; GPU tests run what is compiled."""

from __future__ import annotations

import importlib.util
import itertools
import math
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulated
from tests.solvers.emulated_steps import EmulatedSteps, check_on_gpu, launch
from tests.solvers.test_solvers import Memory, check
from tests.strategies import with_memory

from tilewise.kernels.cuda import launch as cuda
from tilewise.kernels.cuda.depthwise1d import SIZES
from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.conv.reference import convolve_by_transform
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.bases import least, least_whole, whole_placement
from tilewise.solvers.fused_fourier.depthwise_fft import DepthwiseFFT

DENSE = (("contiguous", 0),) * 3
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]


class Emulated(EmulatedSteps, DepthwiseFFT):
    """The solver with its kernels run by the emulator."""

    def on_cpu(self, p: ConvProblem) -> bool:
        """Never: here a GPU's kernels run."""
        return False


SOLVER = Emulated()


@st.composite
def depthwise(
    draw: st.DrawFn, pass_: Pass, dims: int = 2, longest: int = 20, dtype: str = "fp32", spread: bool = False
) -> ConvProblem:
    """Layers of any kernel up to the padded image, with signed padding that differs by side.

    ``spread``: with a stride, a dilation or both, which differ by axis.
    """
    axes = []
    for _ in range(dims):
        size = draw(st.integers(1, longest))
        before, after = draw(st.integers(-min(2, size - 1), size)), draw(st.integers(-min(2, (size - 1) // 2), size))
        before = max(before, 1 - size - min(after, 0))
        padded = size + before + after
        dilation = draw(st.integers(1, min(4, padded))) if spread else 1
        kernel = draw(st.integers(1, min((padded - 1) // dilation + 1, longest)))
        axes.append(
            Axis(size, kernel, draw(st.sampled_from((1, 2, 2, 3, 5))) if spread else 1, dilation, before, after)
        )
    channels = draw(st.sampled_from((1, 2, 3, 5)))
    return ConvProblem(pass_, draw(st.integers(1, 4)), channels, channels, tuple(axes), channels, dtype=dtype)


@pytest.mark.slow
@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=2, suppress_health_check=SLOW)
@given(data=st.data())
def test_planes_of_any_size_and_memory(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    check_drawn(depthwise(pass_, dtype=dtype), data)


@pytest.mark.slow
@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=2, suppress_health_check=SLOW)
@given(data=st.data())
def test_signals_of_any_length_and_memory(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    check_drawn(depthwise(pass_, 1, 700, dtype), data)


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=2, suppress_health_check=SLOW)
@given(data=st.data())
def test_strides_and_dilation_of_any_memory(pass_: Pass, dims: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(("fp32", "bf16", "fp16")), "dtype")
    check_drawn(depthwise(pass_, dims, 700 if dims == 1 else 40, dtype, True), data)


def check_drawn(drawn: st.SearchStrategy[ConvProblem], data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(with_memory(drawn, lambda p: not SOLVER.unsupported(p)), "problem")
    p, forms = found
    dtype = p.dtype
    if dtype != "fp32" and data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    p = replace(p, constant_weight=p.pass_ is not Pass.WGRAD and data.draw(st.booleans(), "constant weight"))
    c = data.draw(st.sampled_from(list(SOLVER.configs(p))), "config")
    check(Emulated(data.draw(st.booleans(), "backwards")), p, c, forms, False)


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])  # DGRAD has FPROP's kernels
@pytest.mark.parametrize(
    ("size", "kernel", "n"),
    [
        (5, 3, 8), (9, 5, 12), (12, 9, 16), (17, 15, 24), (25, 13, 32), (26, 21, 36), (34, 29, 48), (48, 31, 64),
        (56, 31, 72), (70, 51, 96), (81, 55, 108), (100, 57, 128),
    ],
)  # fmt: skip
def test_every_basis(pass_: Pass, size: int, kernel: int, n: int) -> None:
    """With one and with two threads a transform where there are both, all blocks and threads in either order."""
    axis = Axis(size, kernel, 1, 1, kernel // 2, kernel // 2)
    p = ConvProblem(pass_, 3, 2, 2, (axis, axis), 2)
    found = list(SOLVER.configs(p))
    assert {c["basis"] for c in found} == {(n, n)}
    splits = {c["split"]: c for c in found}
    assert set(splits) == ({1} if n < 48 else {1, 2} if n <= 96 else {2})
    for split, c in splits.items():
        planes = 3 if split == 1 and n <= 48 else 2 if n <= 72 else 1
        check_config(p, Config(**{**c, "planes": planes, **({"shares": 2} if pass_ is Pass.WGRAD else {})}))


def check_config(p: ConvProblem, c: Config) -> None:
    a, b = make_operands(p)
    want = convolve_by_transform(p, a, b)
    for backwards in (False, True):
        out = make_result(p).fill_(math.nan)
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
        Emulated(backwards).bind(p, c, a, b, out)(a, b, out, space)
        assert (out.double() - want).norm() <= 4e-7 * want.norm()


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])
def test_every_length(pass_: Pass, n: int) -> None:
    """Signals as long as a basis takes them, all blocks and threads in either order."""
    p = ConvProblem(pass_, 2, 1, 1, (Axis(n - 150, 250, 1, 1, 120, 149),), 1)
    c = Config(basis=(n,), signals=1 if n > 8192 else 2)
    if pass_ is Pass.WGRAD:
        if n == SIZES[-1]:
            assert all(c["basis"] != (n,) for c in SOLVER.configs(p))
            return
        c = Config(**c, shares=2)
    check_config(p, c)


@pytest.mark.sampled(3)
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(
    ("axis", "n"),
    [(Axis(3000, 129, 1, 1, 64, 64), 512), (Axis(2500, 256, 1, 1, 0, 255), 512), (Axis(2501, 200, 1, 1, 199, 0), 1024),
     (Axis(1700, 300, 1, 1, 11, 700), 1536), (Axis(3001, 129, 2, 1, 64, 63), 512), (Axis(2500, 40, 3, 5, 100, 7), 512)],
)  # fmt: skip
def test_tiles(pass_: Pass, axis: Axis, n: int) -> None:
    p = ConvProblem(pass_, 2, 3, 3, (axis,), 3)
    c = Config(basis=(n,), signals=2)
    check_config(p, Config(**c, shares=3) if pass_ is Pass.WGRAD else c)


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(
    ("split", "axes"),
    [
        (2, (Axis(40, 17, 2, 1, 8, 8), Axis(52, 15, 3, 2, 10, 11))),
        (1, (Axis(48, 6, 1, 5, 12, 12), Axis(31, 30, 2, 1, 20, 3))),
    ],
)
def test_one_and_two_threads_a_transform_with_strides_and_dilation(
    pass_: Pass, split: int, axes: tuple[Axis, ...]
) -> None:
    """Two threads hold every other row and column: with an even stride those of one have none of the result."""
    p = ConvProblem(pass_, 2, 3, 3, axes, 3)
    found = next(c for c in SOLVER.configs(p) if c["split"] == split)
    check_config(p, Config(**{**found, "planes": 2, **({"shares": 2} if pass_ is Pass.WGRAD else {})}))


@settings(max_examples=200, suppress_health_check=SLOW)
@given(data=st.data(), pass_=st.sampled_from(list(Pass)), dims=st.sampled_from((1, 2)))
def test_the_basis_is_as_small_as_it_says(data: st.DataObject, pass_: Pass, dims: int) -> None:
    """Behind one side's padding alone, what wraps around lands on zeros."""
    p = data.draw(depthwise(pass_, dims), "problem")
    for axis in p.axes:
        most = max(axis.size + max(axis.before, axis.after, 0), axis.kernel, axis.out)
        assert least(axis, pass_) <= least_whole(axis, pass_) <= most


@settings(max_examples=300, suppress_health_check=SLOW)
@given(data=st.data(), pass_=st.sampled_from(list(Pass)))
def test_nothing_that_is_read_wraps_onto_something_else(data: st.DataObject, pass_: Pass) -> None:
    """A circular product in the least basis is exact in whole numbers, wherever strides and dilation put elements."""
    (axis,) = data.draw(depthwise(pass_, 1, 30, spread=True), "problem").axes
    assume(pass_ is not Pass.DGRAD or axis.before >= 0)
    p = ConvProblem(pass_, 1, 1, 1, (axis,), 1)
    n = least_whole(axis, pass_)
    a, b = (torch.arange(3, 3 + math.prod(p.shape(role)), dtype=torch.float64) for role in p.operands)
    circles = {}
    for role, values in zip(p.operands, (a, b), strict=True):
        place = whole_placement(axis, role, pass_)
        assert place.lead + (place.count - 1) * place.step < n
        circles[role] = torch.zeros(n, dtype=torch.float64)
        places = place.lead + torch.arange(place.count) * place.step
        circles[role][places] = values[place.start : place.start + place.count]
    first, second = (torch.fft.fft(circles[role]) for role in p.operands)
    full = torch.fft.ifft(first * (second if pass_ is Pass.DGRAD else second.conj())).real.round()
    kept = whole_placement(axis, p.result, pass_)
    got = full[kept.lead + torch.arange(kept.count) * kept.step]
    want = p.reference(a.reshape(p.shape(p.operands[0])), b.reshape(p.shape(p.operands[1]))).flatten()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 2, "in_channels": 4, "out_channels": 4}, "takes as many groups as channels, not 2 of 4 to 4"),
        ({"axes": (Axis(56, 3, 4), Axis(56, 3, 4))}, "more than 4 multiply-adds of the direct way for each"),
        ({"axes": (Axis(1, 2, 1, 2, 1, 1), Axis(40, 20))}, "along h no output reads an input"),
        ({"axes": (Axis(100, 61, 1, 1, 30, 30), Axis(20, 3))}, "along h needs a basis of 130, at most 128"),
        ({"axes": (Axis(2**15, 2**14 + 1),)}, "or for tiles a kernel that reaches over at most 12288, not 16385"),
        ({"pass_": Pass.DGRAD, "axes": (Axis(20, 3, 1, 1, -1, 0), Axis(20, 3))}, "inputs that are cropped before the"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(change: dict[str, Any], reason: str) -> None:
    p = ConvProblem(Pass.WGRAD, 2, 3, 3, (Axis(20, 3), Axis(20, 3)), 3)
    (found,) = SOLVER.unsupported(replace(p, **change))
    assert reason in found


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
def test_foreign_configs_are_refused(pass_: Pass, dims: int) -> None:
    p = ConvProblem(pass_, 2, 3, 3, (Axis(600, 301, 1, 1, 150, 150),) * 1, 3)
    if dims == 2:
        p = replace(p, axes=(Axis(30, 5, 1, 1, 2, 2),) * 2)
    a, b = make_operands(p)
    for c in (Config(), Config(basis=(8,) * dims, planes=1, signals=1, split=1, shares=1)):
        with pytest.raises(SolverUnavailable, match="is no config of"):
            SOLVER.steps(p, c, a, b, make_result(p))


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
def test_images_stay_independent(pass_: Pass, dims: int) -> None:
    """What is not finite in one image, or in one channel's filter, reaches no other."""
    axes = (Axis(300, 31, 1, 1, 15, 15),) if dims == 1 else (Axis(15, 7, 1, 1, 3, 3),) * 2
    p = ConvProblem(pass_, 3, 4, 4, axes, 4)
    a, b = make_operands(p)
    a[1, 2] = math.inf
    out = make_result(p)
    c = next(iter(SOLVER.configs(p)))
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    SOLVER.bind(p, c, a, b, out)(a, b, out, space)
    finite = torch.isfinite(out).flatten(2).all(-1)
    want = torch.ones_like(finite)
    want[(2, 0) if pass_ is Pass.WGRAD else (1, 2)] = False
    assert torch.equal(finite, want)


@pytest.mark.slow
@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.WGRAD])
def test_a_missing_barrier_shows(pass_: Pass, dims: int) -> None:
    """Of the emulation: without any one of its barriers a kernel goes wrong in one order of threads or the other."""
    axes = (Axis(500, 12, 1, 1, 6, 6),) if dims == 1 else (Axis(60, 9, 1, 1, 4, 4),) * 2
    p = ConvProblem(pass_, 2, 2, 2, axes, 2)
    a, b = make_operands(p)
    c = Config(basis=(1024,), signals=1) if dims == 1 else Config(basis=(64, 64), planes=1, split=2)
    c = Config(**c, shares=1) if pass_ is Pass.WGRAD else c
    out = make_result(p)
    steps = SOLVER.steps(p, c, a, b, out)
    space = torch.zeros(max(SOLVER.workspace(p, c), 1), dtype=torch.uint8)
    for step in steps[:-1]:
        launch(step, (a, b, out, space), False)
    want, last = convolve_by_transform(p, a, b), steps[-1]
    pieces = last.program.source().split("__syncthreads();\n")
    assert len(pieces) > 4 if dims == 1 else len(pieces) > 2
    for i in range(1, len(pieces)):
        text = "__syncthreads();\n".join([*pieces[: i - 1], pieces[i - 1] + "\n" + pieces[i], *pieces[i + 1 :]])
        errors = []
        for backwards in (False, True):
            out.fill_(math.nan)
            launch(last, (a, b, out, space), backwards, text)
            errors.append(float((out.double() - want).norm() / want.norm()))
        assert not max(errors) <= 1e-4, f"barrier {i} of {len(pieces) - 1} is not needed"


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed")
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
def test_nvrtc_compiles_them(pass_: Pass, dims: int) -> None:
    if cuda.unavailable():
        pytest.skip(cuda.unavailable())
    axis = Axis(8192, 1025, 1, 1, 512, 512) if dims == 1 else Axis(56, 31, 1, 1, 15, 15)
    apart = replace(axis, stride=2, kernel=axis.kernel // 3, dilation=3)
    for dtype, same in (("fp32", axis), ("bf16", axis), ("fp16", axis), ("fp32", apart)):
        p = ConvProblem(pass_, 2, 3, 3, (same,) * dims, 3, dtype=dtype)
        a, b = make_operands(p)
        for c in itertools.islice(SOLVER.configs(p), 2):
            for step in SOLVER.steps(p, c, a, b, make_result(p)):
                try:
                    assert len(cuda.compile_cubin(step.program.source(), "sm_90").code) > 1000
                except Exception as error:
                    if "nvrtc" in str(error) and "NotFound" in type(error).__name__:
                        pytest.skip("no NVRTC library")
                    raise


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_large_layers_on_a_gpu(pass_: Pass, dtype: str) -> None:
    layers = (
        (Axis(56, 31, 1, 1, 15, 15), Axis(56, 31, 1, 1, 15, 15)), (Axis(28, 29, 1, 1, 14, 14),) * 2,
        (Axis(64, 51, 1, 1, 25, 25),) * 2, (Axis(7, 5, 1, 1, 2, 2), Axis(90, 33, 1, 1, 16, 16)),
        (Axis(8192, 1025, 1, 1, 512, 512),), (Axis(8192, 8192, 1, 1, 8191, 0),), (Axis(100_000, 901, 1, 1, 450, 450),),
    )  # fmt: skip
    for axes in layers:
        check_first_on_gpu(ConvProblem(pass_, 5, 6, 6, axes, 6, dtype=dtype), 2 if dtype == "fp32" else 1)
        if pass_ is not Pass.WGRAD:
            check_first_on_gpu(ConvProblem(pass_, 5, 6, 6, axes, 6, dtype=dtype, constant_weight=True), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "axes",
    [
        (Axis(56, 31, 2, 1, 15, 15),) * 2, (Axis(57, 31, 2, 1, 15, 14), Axis(60, 29, 3, 1, 14, 14)),
        (Axis(56, 13, 1, 2, 12, 12),) * 2, (Axis(28, 29, 2, 1, 14, 14), Axis(90, 9, 4, 3, 12, 11)),
        (Axis(30, 9, 2, 1, 3, -1), Axis(14, 13, 1, 1, 6, 6)), (Axis(8192, 1025, 2, 1, 512, 512),),
        (Axis(8191, 300, 3, 4, 597, 601),), (Axis(100_001, 901, 5, 1, 450, 450),), (Axis(50_000, 129, 1, 8, 512, 512),),
    ],
    ids=lambda axes: " by ".join(f"{a.size}k{a.kernel}s{a.stride}d{a.dilation}" for a in axes),
)  # fmt: skip
def test_strides_and_dilation_on_a_gpu(axes: tuple[Axis, ...], pass_: Pass, dtype: str) -> None:
    check_first_on_gpu(ConvProblem(pass_, 5, 6, 6, axes, 6, dtype=dtype), 3 if dtype == "fp32" else 1)


def check_first_on_gpu(p: ConvProblem, most: int) -> None:
    """The first configs."""
    on_gpu = replace(p, device=device_name(torch.device("cuda")))
    check_on_gpu(DepthwiseFFT(), p, itertools.islice(DepthwiseFFT().configs(on_gpu), most))


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", list(Pass))
def test_places_beyond_32_bits(pass_: Pass, dims: int) -> None:
    """Every tensor but the filter with its images 2^31 elements apart, in memory that is only reserved."""
    far = 2**31 + 64
    axes = (Axis(300, 31, 1, 1, 15, 15),) if dims == 1 else (Axis(15, 7, 1, 1, 3, 3),) * 2
    p = ConvProblem(pass_, 2, 2, 2, axes, 2, dtype="bf16")
    a, b = make_operands(p)
    out = make_result(p)
    tensors = [
        distant(t, far) if role != "w" else t for role, t in zip((*p.operands, p.result), (a, b, out), strict=True)
    ]
    c = next(iter(SOLVER.configs(p)))
    space = torch.full((max(SOLVER.workspace(p, c), 1),), 0xFF, dtype=torch.uint8)
    SOLVER.bind(p, c, *tensors)(*tensors, space)
    want = convolve_by_transform(p, a, b)
    assert (tensors[2].double() - want).norm() <= 2.0**-8 * want.norm()


def distant(tensor: torch.Tensor, far: int) -> torch.Tensor:
    """The values with images ``far`` elements apart."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # NORESERVE
    storage = mmap.mmap(-1, tensor.element_size() * (far + 2**16), flags=flags)
    view = torch.frombuffer(storage, dtype=tensor.dtype).as_strided(tensor.shape, (far, *tensor.stride()[1:]))
    return view.copy_(tensor)
