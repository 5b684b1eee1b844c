"""Depthwise convolutions with large kernels: transform, product and transform back in one kernel for each pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import _depthwise_cpu_planes as cpu_planes
from tilewise.solvers import _depthwise_cpu_signals as cpu_signals
from tilewise.solvers import _depthwise_planes as planes
from tilewise.solvers import _depthwise_signals as signals
from tilewise.solvers._costs import PLAIN_ARITHMETIC
from tilewise.solvers._depthwise_cpu import missing
from tilewise.solvers._depthwise_fft import Step, compiled
from tilewise.solvers._fft_sizes import least, meets
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable

__all__ = ["DepthwiseFFT"]

MOST = 2**31 - 2**20
"""Planes, and elements of the filter: kernels count them in 32 bits."""
CPU_EFFICIENCY = 0.4
"""The same on a CPU, where 16-bit operands' products are done in fp32 too."""
LEAST_PRODUCTS = 4
"""Multiply-adds of the direct way for each point of a basis up to which transforms, by their arithmetic, never win."""


class DepthwiseFFT(Solver):
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

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Other layers than depthwise ones, images beyond the largest basis, strides and dilation that make the direct
        way short."""
        on_cpu = self.on_cpu(p)
        reasons = missing() if on_cpu else _missing(p)
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
        """Whether it is a CPU's kernels that ``p`` is for."""
        return p.device_type == "cpu"

    def _way(self, p: ConvProblem) -> _Way:
        if self.on_cpu(p):
            return _cpu_way(p)
        return signals if p.dims == 1 else planes

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return self._way(p).configs(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Spectra of the filters, or what several shares of a filter gradient sum to; on a CPU what threads work in."""
        return self._way(p).workspace(p, c)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """The spectra of constant filters."""
        return self._way(p).constant(p, c)

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """Transforms of filters."""
        if self.on_cpu(p):
            return _cpu_way(p).prepare(p, c, weight)
        run = compiled(self.filters(p, c, weight), weight.device)
        return lambda weight, kept, workspace: run.run_pointers(weight.data_ptr(), 0, kept.data_ptr(), 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Transforms in the smallest basis, at the rate of plain arithmetic, and operands read once."""
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
        try:
            return _cpu_way(p).bind(p, c, a, b, out)
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """A GPU's launches. Raises ``SolverUnavailable`` for a config that is none of the problem's."""
        try:
            return signals.steps(p, c, a, b, out) if p.dims == 1 else planes.steps(p, c, a, b, out)
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error

    def filters(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
        """A GPU's launches for spectra that are kept, from the first tensor to the result. Raises as :meth:`steps`."""
        try:
            return signals.filters(p, c, weight) if p.dims == 1 else planes.filters(p, c, weight)
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error


class _Way(Protocol):
    """What the modules of planes and of signals have in common, on either kind of device."""

    def too_large(self, p: ConvProblem) -> list[str]: ...
    def configs(self, p: ConvProblem) -> Iterable[Config]: ...
    def workspace(self, p: ConvProblem, c: Config) -> int: ...
    def constant(self, p: ConvProblem, c: Config) -> int: ...
    def transformed(self, p: ConvProblem, c: Config) -> int: ...


class _CpuWay(_Way, Protocol):
    """What those for a CPU have beside."""

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare: ...
    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run: ...


def _cpu_way(p: ConvProblem) -> _CpuWay:
    return cpu_signals if p.dims == 1 else cpu_planes


def _too_sparse(p: ConvProblem) -> list[str]:
    """Strides and dilation with which too little is left to compute, or nothing."""
    found = [
        f"along {name} no output reads an input" for name, axis in zip(p.space, p.axes, strict=True) if not meets(axis)
    ]
    if all(axis.stride == axis.dilation == 1 for axis in p.axes):
        return found
    products = math.prod(axis.kernel * axis.out for axis in p.axes)
    points = math.prod(least(axis, p.pass_) for axis in p.axes)
    if products <= LEAST_PRODUCTS * points:
        found.append(
            f"takes strides and dilation that leave more than {LEAST_PRODUCTS} multiply-adds of the direct way for "
            f"each point of a transform, not {products} for {points} points"
        )
    return found


def _too_many(p: ConvProblem) -> list[str]:
    """What a GPU's kernels cannot count."""
    length = max(axis.size + axis.before + axis.after for axis in p.axes)
    counted = (
        ("planes", p.batch * p.in_channels * (1 if p.dims > 1 else length)),
        ("filter elements", math.prod(p.shape("w"))),
    )
    return [f"counts to {MOST}; there are {number} {what}" for what, number in counted if number > MOST]


def _missing(p: ConvProblem) -> list[str]:
    from tilewise.kernels.cuda.launch import unavailable

    reason = unavailable() if p.device_type == "cuda" else ""
    return [reason] if reason else []
