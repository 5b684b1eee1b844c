"""Depthwise convolutions with large kernels: transform, product and transform back in one kernel for each pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.bases import least, meets
from tilewise.solvers.common.costs import PLAIN_ARITHMETIC
from tilewise.solvers.common.cpu_run import numba_missing
from tilewise.solvers.common.cuda_run import Step, compiled
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.fused_fourier import _cpu_planes as cpu_planes
from tilewise.solvers.fused_fourier import _cpu_signals as cpu_signals
from tilewise.solvers.fused_fourier import _planes as planes
from tilewise.solvers.fused_fourier import _signals as signals

__all__ = ["DepthwiseFFT"]

MOST = 2**31 - 2**20
"""Most planes, and most elements of the filter: kernels count them in 32 bits."""
CPU_EFFICIENCY = 0.4
"""Share of a CPU's rate of matrix products that transforms reach, also with 16-bit operands."""
LEAST_PRODUCTS = 4
"""Multiply-adds of the direct method per point of a basis up to which transforms never win."""


class DepthwiseFFT(ConvSolver):
    """Fourier transforms of images, products with a filter's spectrum and the way back without leaving registers.

    Overlap-free circular convolution (Vasilache et al. 2014, sections 3 and 5) in the smallest basis that keeps what is
    read apart, fused so that images are read once and results written once. ``basis`` is the transform's size along
    each axis, ``planes`` or in one dimension ``signals`` go to one thread block, ``split`` threads share a plane's
    transform, ``resident`` bounds registers, and ``shares`` of the images are summed one by one to a filter's gradient.
    Images stay independent. Signals beyond the largest basis go in tiles (overlap-save) where the kernel is shorter.
    Strides and dilation are computed in full, which only accesses to memory know of.

    On a CPU a thread takes ``lanes`` channels at once, in its own cache, of one of ``shares`` of their images;
    ``threads`` bounds threads, and ``team`` says whether they are torch's. Signals go in pairs of tiles.

    Spectra of constant filters are kept.
    """

    name, version = "depthwise_fft", 3
    compiles = True
    dims = frozenset({1, 2})
    error_bound = {"ieee": 1e-6, "tf32": 1e-6}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: not depthwise, images beyond the largest basis, strides or dilation with little arithmetic."""
        on_cpu = self.on_cpu(p)
        reasons = numba_missing() if on_cpu else _missing(p)
        if not p.groups == p.in_channels == p.out_channels:
            reasons.append(
                f"takes as many groups as channels, not {p.groups} of {p.in_channels} to {p.out_channels} channels"
            )
        reasons += _too_sparse(p)
        if reasons:
            return reasons
        if p.pass_ is Pass.DGRAD and any(axis.before < 0 for axis in p.axes):
            reasons.append("writes no gradients of inputs that are cropped before the first")
        return reasons + self._way(p).too_large(p) + ([] if on_cpu else _too_many(p))

    def on_cpu(self, p: ConvProblem) -> bool:
        """Whether ``p`` is for a CPU."""
        return p.device_type == "cpu"

    def _way(self, p: ConvProblem) -> _Way:
        """The module for planes or signals, on the problem's kind of device."""
        if self.on_cpu(p):
            return _cpu_way(p)
        return signals if p.dims == 1 else planes

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Configs with the best bases, the most promising first."""
        return self._way(p).configs(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of filters' spectra, or of a weight gradient's shares; on a CPU of every thread's scratch."""
        return self._way(p).workspace(p, c)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of constant filters' spectra."""
        return self._way(p).constant(p, c)

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        if self.on_cpu(p):
            return _cpu_way(p).prepare(p, c, weight)
        run = compiled(self.filters(p, c, weight), weight.device)
        return lambda weight, kept, workspace: run.run_pointers(weight.data_ptr(), 0, kept.data_ptr(), 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Transforms in the config's basis at the rate of plain arithmetic, and operands read once."""
        points = self._way(p).transformed(p, c)
        flops = int(points * (2.5 * math.log2(math.prod(c["basis"])) + 4))  # type: ignore[arg-type]
        share = PLAIN_ARITHMETIC["16-bit" if p.dtype != "fp32" else "tf32" if p.precision == "tf32" else "fp32"]
        if self.on_cpu(p):
            return Cost(flops, p.bytes + self.constant(p, c), 1, CPU_EFFICIENCY)
        kept = self.constant(p, c)
        return Cost(flops, p.bytes + 2 * self.workspace(p, c) + kept, 1 if kept else 2, share)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels, a GPU's for these strides. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        if not self.on_cpu(p):
            return compiled(self.steps(p, c, a, b, out), a.device)
        with config_reasons(p, c):
            return _cpu_way(p).bind(p, c, a, b, out)

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """The launches on a GPU. Raises ``SolverUnavailable`` for a config that does not fit the problem."""
        with config_reasons(p, c):
            return signals.steps(p, c, a, b, out) if p.dims == 1 else planes.steps(p, c, a, b, out)

    def filters(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
        """The launches on a GPU that transform filters to be kept. Raises as :meth:`steps`."""
        with config_reasons(p, c):
            return signals.filters(p, c, weight) if p.dims == 1 else planes.filters(p, c, weight)


class _Way(Protocol):
    """The functions that the modules for planes and for signals share on all devices."""

    def too_large(self, p: ConvProblem) -> list[str]: ...
    def configs(self, p: ConvProblem) -> Iterable[Config]: ...
    def workspace(self, p: ConvProblem, c: Config) -> int: ...
    def constant(self, p: ConvProblem, c: Config) -> int: ...
    def transformed(self, p: ConvProblem, c: Config) -> int: ...


class _CpuWay(_Way, Protocol):
    """The functions that the modules for a CPU have besides."""

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare: ...
    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run: ...


def _cpu_way(p: ConvProblem) -> _CpuWay:
    """The CPU module for planes or signals."""
    return cpu_signals if p.dims == 1 else cpu_planes


def _too_sparse(p: ConvProblem) -> list[str]:
    """Reasons where strides or dilation leave too little to compute, or nothing."""
    reasons = [
        f"along {name} no output reads an input" for name, axis in zip(p.space, p.axes, strict=True) if not meets(axis)
    ]
    if all(axis.stride == axis.dilation == 1 for axis in p.axes):
        return reasons
    products = math.prod(axis.kernel * axis.out for axis in p.axes)
    points = math.prod(least(axis, p.pass_) for axis in p.axes)
    if products <= LEAST_PRODUCTS * points:
        reasons.append(
            f"takes strides and dilation that leave more than {LEAST_PRODUCTS} multiply-adds of the direct way for "
            f"each point of a transform, not {products} for {points} points"
        )
    return reasons


def _too_many(p: ConvProblem) -> list[str]:
    """Reasons where there is more than a GPU's kernels count in 32 bits."""
    length = max(axis.size + axis.before + axis.after for axis in p.axes)
    counted = (
        ("planes", p.batch * p.in_channels * (1 if p.dims > 1 else length)),
        ("filter elements", math.prod(p.shape("w"))),
    )
    return [f"counts to {MOST}; there are {number} {what}" for what, number in counted if number > MOST]


def _missing(p: ConvProblem) -> list[str]:
    """Why kernels in CUDA C++ cannot be compiled here; empty where they can."""
    from tilewise.kernels.cuda.launch import unavailable

    reason = unavailable() if p.device_type == "cuda" else ""
    return [reason] if reason else []
