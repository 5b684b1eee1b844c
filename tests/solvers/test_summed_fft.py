"""Transform and product in one kernel, with its very C++ on the CPU; GPU tests run what is compiled."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulated
from tests.solvers.emulated_steps import EmulatedSteps, check_on_gpu, launch
from tests.solvers.test_solvers import check
from tests.strategies import with_memory

from tilewise.kernels.cuda import launch as cuda
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.conv.reference import convolve_by_transform
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.fused_fourier.summed_fft import SummedFFT

SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
CHANNELS = {"few outputs": (5, 2), "few inputs": (2, 5), "one output": (5, 1), "one input": (1, 6)}
PASSES = [
    (Pass.FPROP, "few outputs"), (Pass.DGRAD, "few inputs"), (Pass.WGRAD, "few outputs"), (Pass.WGRAD, "few inputs"),
]  # fmt: skip


class Emulated(EmulatedSteps, SummedFFT):
    """The solver with its kernels run by the emulator."""


SOLVER = Emulated()


@st.composite
def layers(draw: st.DrawFn, pass_: Pass, dtype: str) -> ConvProblem:
    """Few channels on one side, signed padding that differs by side, at times strides and dilation."""
    axes = []
    for _ in range(2):
        size = draw(st.integers(1, 20))
        before, after = draw(st.integers(-min(2, size - 1), size)), draw(st.integers(-min(2, (size - 1) // 2), size))
        before = max(before, 1 - size - min(after, 0))
        padded = size + before + after
        dilation = draw(st.sampled_from([n for n in (1, 1, 2, 3) if n <= padded]))
        kernel = draw(st.integers(1, min((padded - 1) // dilation + 1, 20)))
        axes.append(Axis(size, kernel, draw(st.sampled_from((1, 1, 2, 3))), dilation, before, after))
    many, few = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    batch = draw(st.integers(4, 7) if pass_ is Pass.WGRAD else st.integers(1, 4))
    turned = pass_ is Pass.DGRAD or (pass_ is Pass.WGRAD and draw(st.booleans()))
    return ConvProblem(pass_, batch, *((few, many) if turned else (many, few)), tuple(axes), dtype=dtype)


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=2, suppress_health_check=SLOW)
@given(data=st.data())
def test_planes_of_any_size_and_memory(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    p, forms = data.draw(with_memory(layers(pass_, dtype), lambda p: not SOLVER.unsupported(p)), "problem")
    if dtype != "fp32" and data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    p = replace(p, constant_weight=p.pass_ is not Pass.WGRAD and data.draw(st.booleans(), "constant weight"))
    c = data.draw(st.sampled_from(SOLVER.configs(p)), "config")
    check(Emulated(data.draw(st.booleans(), "backwards")), p, c, forms, False)


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize(
    ("size", "kernel", "n", "pass_", "few"),
    [
        (6, 3, 8, Pass.FPROP, "few outputs"), (14, 5, 16, Pass.DGRAD, "few inputs"),
        (20, 9, 24, Pass.WGRAD, "few outputs"), (34, 13, 36, Pass.WGRAD, "few inputs"),
        *((42, 11, 48, pass_, few) for pass_, few in PASSES), (60, 17, 64, Pass.WGRAD, "few inputs"),
        (90, 31, 96, Pass.FPROP, "few outputs"), (120, 21, 128, Pass.WGRAD, "few outputs"),
    ],
)  # fmt: skip
def test_bases_threads_and_results(size: int, kernel: int, n: int, pass_: Pass, few: str) -> None:
    """One and two results at a time, sums in registers and in shared memory, blocks and threads in either order."""
    channels = CHANNELS[few] if n <= 48 else CHANNELS[few.replace("few", "one").removesuffix("s")]
    axis = Axis(size, kernel)
    p = ConvProblem(pass_, 4 if pass_ is Pass.WGRAD else 2, *channels, (axis, axis))
    found = SOLVER.configs(p)
    assert {c["basis"] for c in found} == {(n, n)}
    distinct = {(c["results"], c["split"]): c for c in found}
    for number, c in enumerate(distinct.values()):
        changed = Config(**{**c, "planes": 1 + number % 2, "shares": 1 + number % 3})
        check_config(p, changed, backwards=number % 2 == 1)


def check_config(p: ConvProblem, c: Config, backwards: bool) -> None:
    a, b = make_operands(p)
    want = convolve_by_transform(p, a, b)
    out = make_result(p).fill_(math.nan)
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cpu")
    Emulated(backwards).bind(p, c, a, b, out)(a, b, out, space)
    assert (out.double() - want).norm() <= 4e-7 * want.norm()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 2}, "takes one group, not 2"),
        ({"axes": (Axis(20, 1), Axis(20, 1))}, "a kernel of one point is a matrix product already"),
        ({"out_channels": 10}, "makes at most 8 results of each sum, not 10"),
        ({"in_channels": 2}, "sums over at least 4, not 2"),
        ({"axes": (Axis(1, 2, 1, 2, 1, 1), Axis(40, 20))}, "along h no output reads an input"),
        ({"axes": (Axis(130, 3), Axis(20, 3))}, "along h needs a basis of 130, at most 128"),
        ({"pass_": Pass.DGRAD, "in_channels": 2, "out_channels": 8, "axes": (Axis(20, 3, 1, 1, -1, 0), Axis(20, 3))},
         "inputs that are cropped before the"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(change: dict[str, Any], reason: str) -> None:
    p = ConvProblem(Pass.FPROP, 2, 10, 4, (Axis(20, 3), Axis(20, 3)))
    assert not SOLVER.unsupported(p)
    (found,) = SOLVER.unsupported(replace(p, **change))
    assert reason in found


@pytest.mark.parametrize(("pass_", "few"), PASSES)
def test_foreign_configs_are_refused(pass_: Pass, few: str) -> None:
    p = ConvProblem(pass_, 4, *CHANNELS[few], (Axis(30, 5),) * 2)
    a, b = make_operands(p)
    good = Config(basis=(32, 32), planes=1, split=1, results=1, shares=1)
    assert SOLVER.steps(p, good, a, b, make_result(p))
    for change in ({"basis": (8, 8)}, {"basis": (33, 32)}, {"shares": 99}, {"planes": 0}, {"split": 3}):
        with pytest.raises(SolverUnavailable, match="is no config of"):
            SOLVER.steps(p, Config(**{**good, **change}), a, b, make_result(p))
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.steps(p, Config(), a, b, make_result(p))


@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize(("pass_", "few"), PASSES)
def test_sums_stay_independent(pass_: Pass, few: str) -> None:
    """What is not finite in one plane reaches only the sums that it is part of."""
    p = ConvProblem(pass_, 5, *CHANNELS[few], (Axis(15, 7, 1, 1, 3, 3),) * 2)
    a, b = make_operands(p)
    a[1, 1] = math.inf
    out = make_result(p)
    for c in SOLVER.configs(p)[:2]:
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
        SOLVER.bind(p, c, a, b, out)(a, b, out, space)
        finite = torch.isfinite(out).flatten(2).all(-1)
        want = torch.ones_like(finite)
        want[:, 1] = want[:, 1] & (pass_ is not Pass.WGRAD)
        if pass_ is not Pass.WGRAD:
            want[1] = False
        assert torch.equal(finite, want)


@emulated
def test_a_missing_barrier_shows() -> None:
    """Of the emulation: without any one of its barriers the kernel goes wrong in one order of threads or the other."""
    p = ConvProblem(Pass.FPROP, 2, 5, 2, (Axis(40, 9),) * 2)
    a, b = make_operands(p)
    c = Config(basis=(48, 48), planes=2, split=1, results=2, shares=1)
    out = make_result(p)
    steps = SOLVER.steps(p, c, a, b, out)
    space = torch.zeros(SOLVER.workspace(p, c), dtype=torch.uint8)
    for step in steps[:-1]:
        launch(step, (a, b, out, space), False)
    want, last = convolve_by_transform(p, a, b), steps[-1]
    pieces = last.program.source().split("__syncthreads();\n")
    assert len(pieces) == 4
    for i in range(1, len(pieces)):
        text = "__syncthreads();\n".join([*pieces[: i - 1], pieces[i - 1] + "\n" + pieces[i], *pieces[i + 1 :]])
        errors = []
        for backwards in (False, True):
            out.fill_(math.nan)
            launch(last, (a, b, out, space), backwards, text)
            errors.append(float((out.double() - want).norm() / want.norm()))
        assert not max(errors) <= 1e-4, f"barrier {i} of {len(pieces) - 1} is not needed"


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed")
@pytest.mark.parametrize(("pass_", "few"), PASSES)
def test_nvrtc_compiles_them(pass_: Pass, few: str) -> None:
    if cuda.unavailable():
        pytest.skip(cuda.unavailable())
    for dtype, n in (("fp32", 42), ("bf16", 120)):
        p = ConvProblem(pass_, 8, *CHANNELS[few], (Axis(n, 11),) * 2, dtype=dtype)
        a, b = make_operands(p)
        for c in SOLVER.configs(p)[:2]:
            for step in SOLVER.steps(p, c, a, b, make_result(p)):
                try:
                    assert len(cuda.compile_cubin(step.program.source(), "sm_90").code) > 1000
                except Exception as error:
                    if "nvrtc" in str(error) and "NotFound" in type(error).__name__:
                        pytest.skip("no NVRTC library")
                    raise


@pytest.mark.gpu
@pytest.mark.parametrize(("pass_", "few"), PASSES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_layers_on_a_gpu(pass_: Pass, few: str, dtype: str) -> None:
    for axes in (
        (Axis(42, 11),) * 2, (Axis(28, 5, 1, 1, 2, 2), Axis(15, 7, 1, 1, 3, 3)), (Axis(72, 9),) * 2,
        (Axis(100, 21, 1, 1, 10, 10), Axis(90, 31)), (Axis(56, 9, 2, 1, 4, 4), Axis(31, 5, 1, 3, 6, 6)),
    ):  # fmt: skip
        for channels in (CHANNELS[few], tuple(7 * n if n > 2 else n + 2 for n in CHANNELS[few])):
            p = ConvProblem(pass_, 9, *channels, axes, dtype=dtype)
            check_some_on_gpu(p, 3 if dtype == "fp32" else 1)
            if pass_ is not Pass.WGRAD:
                check_some_on_gpu(replace(p, constant_weight=True), 1)


def check_some_on_gpu(p: ConvProblem, most: int) -> None:
    """Configs evenly taken."""
    found = list(SummedFFT().configs(p))
    check_on_gpu(SummedFFT(), p, found[:: -(-len(found) // most)])


@emulated
@pytest.mark.parametrize(("pass_", "few"), PASSES)
def test_memory_of_any_config_is_what_it_says(pass_: Pass, few: str) -> None:
    """Spectra are in the workspace unless they are kept, and so are the shares of sums where there are several."""
    p = ConvProblem(pass_, 6, *CHANNELS[few], (Axis(20, 5),) * 2)
    results, depth = 2, 6 if pass_ is Pass.WGRAD else 5
    planes = {Pass.WGRAD: 5 * 25, Pass.FPROP: 6 * 16 * 16, Pass.DGRAD: 6 * 20 * 20}[pass_]
    for shares in (1, 3):
        c = Config(basis=(24, 24), planes=1, split=1, results=1, shares=shares)
        spectra = 8 * results * depth * (12 * 24 + 24)
        aligned = -(-spectra // 256) * 256 if shares > 1 else spectra
        assert SOLVER.workspace(p, c) == aligned + (4 * results * planes * shares if shares > 1 else 0)
        if pass_ is not Pass.WGRAD:
            kept = replace(p, constant_weight=True)
            assert SOLVER.constant(kept, c) == spectra
            assert SOLVER.workspace(kept, c) == (4 * results * planes * shares if shares > 1 else 0)
