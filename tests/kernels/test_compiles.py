"""Every kernel by NVIDIA's own compiler, where there is one: what the emulation defines, a GPU may not know."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise.kernels.cuda import fft1d, fft2d, irfft2_summed
from tilewise.kernels.cuda.launch import Bound, Program, read_source
from tilewise.kernels.cuda.operands import Memory, dense, spectrum_shape
from tilewise.kernels.cuda.winograd import Planes, Prepare
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.fused_fourier.depthwise_fft import DepthwiseFFT
from tilewise.solvers.winograd.winograd_fused import WinogradFused

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
SPILLED = 40
"""Bytes of a thread that may be kept in memory: outside of the loops that multiply and that fetch, as compiled now."""


def transform(dims: int, layout: str, inverse: bool, dtype: torch.dtype, spectra: str = "interleaved") -> Bound:
    n = 24
    shape, s = (6, *[n - 2] * dims), (n,) * dims
    image = Memory(shape, dense(shape), dtype)
    sizes = spectrum_shape((6,), s, layout, spectra)
    if spectra != "interleaved":
        parts = Memory(sizes, dense(sizes), torch.float16)
        return fft2d.bind(image, parts, s, (1, 1), layout, inverse, None, spectra=spectra, spread=9)
    spectrum = Memory(sizes, dense(sizes), torch.complex64)
    if dims == 1:
        return fft1d.bind(image, spectrum, s, (1,), layout, inverse, None, 1.0, layout == "frequency_major")
    return fft2d.bind(image, spectrum, s, (1, 1), layout, inverse, None, 1.0, layout == "frequency_major")


def check(program: Program, folder: Path, architecture: str = "90") -> str:
    """Compile; what the assembler says of registers."""
    source = folder / "kernel.cu"
    source.write_text(read_source("ptx.cu") + program.source())
    options = [
        "-cubin", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-std=c++17",
        "--expt-relaxed-constexpr", "-Xptxas", "-v", "-o", "/dev/null",
    ]  # fmt: skip
    done = subprocess.run(["nvcc", *options, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("dims", "layout", "dtype"),
    [(1, "plain", torch.float32), (1, "packed", torch.float16), (1, "frequency_major", torch.float32),
     (2, "plain", torch.bfloat16), (2, "frequency_major", torch.float32), (2, "packed", torch.float32)],
)  # fmt: skip
def test_transforms(dims: int, layout: str, dtype: torch.dtype, inverse: bool, tmp_path: Path) -> None:
    check(transform(dims, layout, inverse, dtype).program, tmp_path)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "axes",
    [
        (Axis(14, 5, 1, 1, 2, 2),) * 2, (Axis(600, 33, 1, 1, 16, 16),), (Axis(29, 9, 2, 2, 8, 8),) * 2,
        (Axis(600, 33, 2, 3, 48, 48),),
    ],
    ids=["2d", "1d", "2d-apart", "1d-apart"],
)  # fmt: skip
@pytest.mark.parametrize("pass_", list(Pass))
def test_depthwise(pass_: Pass, axes: tuple[Axis, ...], tmp_path: Path) -> None:
    solver, p = DepthwiseFFT(), ConvProblem(pass_, 3, 4, 4, axes, 4, device="cuda:any")
    here = replace(p, device="cpu")
    a, b = make_operands(here)
    steps = solver.steps(p, next(iter(solver.configs(p))), a, b, make_result(here))
    assert len(steps) >= 2
    for step in steps:
        check(step.program, tmp_path)


@pytest.mark.parametrize("spectra", ["half", "split"])
def test_transforms_into_fp16_parts(spectra: str, tmp_path: Path) -> None:
    check(transform(2, "frequency_major", False, torch.float32, spectra).program, tmp_path)


@pytest.mark.parametrize("summed", [3, 4])
def test_transforms_of_sums(summed: int, tmp_path: Path) -> None:
    image, frequencies = Memory((2, 6, 22, 22), dense((2, 6, 22, 22)), torch.float32), 24 * 13
    shapes = ((frequencies, 2, 1, summed), (frequencies, 1, 6, summed))
    first, second = (Memory(shape, dense(shape), torch.complex64) for shape in shapes)
    check(irfft2_summed.bind(image, first, second, (24, 24), (1, 1), True).program, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "program",
    [
        *(Prepare(taps, wide, dense) for taps, wide, dense in ((1, 2, 0), (3, 3, 1), (5, 5, 4))),
        *(Planes(taps, wide, 4, 16, 4, 3, 2, accumulate)
          for taps, wide, accumulate in ((1, 2, True), (2, 4, False), (7, 5, True))),
    ],
    ids=lambda program: f"{program.name}-{program.taps}x{program.wide_taps}",
)  # fmt: skip
def test_winograd(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path, "90a")


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "size", "kernel"), [((64, 192), 27, 5), ((192, 384), 13, 3)])
def test_what_winograd_holds_stays_in_registers(
    channels: tuple[int, int], size: int, kernel: int, tmp_path: Path
) -> None:
    """Of all that is offered of AlexNet's second and third layers."""
    axis = Axis(size, kernel, 1, 1, kernel // 2, kernel // 2)
    p = ConvProblem(Pass.FPROP, 256, *channels, (axis, axis))
    a, b = torch.empty(p.shape("x"), device="meta"), torch.empty(p.shape("w"), device="meta")
    for c in WinogradFused().configs(p):
        for step in WinogradFused().steps(p, c, a, b, torch.empty(p.shape("y"), device="meta")):
            said = check(step.program, tmp_path, "90a")
            (stored,) = re.findall(r"(\d+) bytes spill stores", said)
            assert int(stored) <= SPILLED, f"{step.program}: {said}"
