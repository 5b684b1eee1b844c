"""Depthwise convolutions with large kernels: transform, product and transform back in one kernel for each pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import _depthwise_planes as planes
from tilewise.solvers import _depthwise_signals as signals
from tilewise.solvers._depthwise_fft import Step, compiled
from tilewise.solvers._fft_sizes import result_placement
from tilewise.solvers.base import Cost, Run, Solver, SolverUnavailable

__all__ = ["DepthwiseFFT"]

MOST = 2**31 - 2**20
"""Planes, and elements of the filter: kernels count them in 32 bits."""
EFFICIENCY = {"fp32": 0.25, "tf32": 0.03, "16-bit": 0.017}
"""Share of the matrix product's rate that transforms reach, which are done in fp32 whatever the operands."""


class DepthwiseFFT(Solver):
    """Fourier transforms of images, products with a filter's spectrum and the way back without leaving registers.

    Overlap-free circular convolution (Vasilache et al. 2014, sections 3 and 5) in the smallest basis that keeps what is
    read apart, fused so that images are read once and results written once. ``basis`` is the transform's size along
    each axis, ``planes`` or in one dimension ``signals`` go to one thread block, ``split`` threads share a plane's
    transform, ``resident`` bounds registers, and ``shares`` of the images are summed one by one to a filter's gradient.
    Images stay independent. Signals beyond the largest basis go in tiles (overlap-save) where the kernel is shorter.
    """

    name, version = "depthwise_fft", 1
    devices = frozenset({"cuda"})
    compiles = True
    dims = frozenset({1, 2})
    error_bound = {"ieee": 1e-6, "tf32": 1e-6}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Other layers than depthwise ones, strides and dilation, images beyond the largest basis."""
        reasons = _missing(p)
        if not p.groups == p.in_channels == p.out_channels:
            reasons.append(
                f"takes as many groups as channels, not {p.groups} of {p.in_channels} to {p.out_channels} channels"
            )
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.stride != 1 or axis.dilation != 1:
                reasons.append(f"along {name} takes stride 1 and dilation 1, not {axis.stride} and {axis.dilation}")
        if reasons:
            return reasons
        if p.pass_ is Pass.DGRAD and any(result_placement(axis, p.pass_).count < axis.size for axis in p.axes):
            reasons.append("writes only gradients of inputs that an output reads")
        length = max(axis.size + axis.before + axis.after for axis in p.axes)
        counted = (
            ("planes", p.batch * p.in_channels * (1 if p.dims > 1 else length)),
            ("filter elements", math.prod(p.shape("w"))),
        )
        for what, number in counted:
            if number > MOST:
                reasons.append(f"counts to {MOST}; there are {number} {what}")
        return reasons + _way(p).too_large(p)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return _way(p).configs(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Spectra of the filters, or what several shares of a filter gradient sum to."""
        return _way(p).workspace(p, c)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Transforms in the smallest basis, at the rate of plain arithmetic, and operands read once."""
        points = _way(p).transformed(p, c)
        flops = int(points * (2.5 * math.log2(math.prod(c["basis"])) + 4))  # type: ignore[arg-type]
        share = EFFICIENCY["16-bit" if p.dtype != "fp32" else "tf32" if p.precision == "tf32" else "fp32"]
        return Cost(flops, p.bytes + 2 * self.workspace(p, c), 2, share)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        return compiled(self.steps(p, c, a, b, out), a.device)

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """The kernels' launches. Raises ``SolverUnavailable`` for a config that is none of the problem's."""
        try:
            return _way(p).steps(p, c, a, b, out)
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error


class _Way(Protocol):
    """What the modules of planes and of signals have in common."""

    def too_large(self, p: ConvProblem) -> list[str]: ...
    def configs(self, p: ConvProblem) -> Iterable[Config]: ...
    def workspace(self, p: ConvProblem, c: Config) -> int: ...
    def transformed(self, p: ConvProblem, c: Config) -> int: ...
    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]: ...


def _way(p: ConvProblem) -> _Way:
    return signals if p.dims == 1 else planes


def _missing(p: ConvProblem) -> list[str]:
    from tilewise.kernels.cuda.launch import unavailable

    reason = unavailable() if p.device_type == "cuda" else ""
    return [reason] if reason else []
