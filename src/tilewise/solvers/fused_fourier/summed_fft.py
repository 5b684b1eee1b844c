"""Convolutions with few results of long sums: each plane is transformed in the kernel that sums it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewise.kernels.cuda.launch import unavailable
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.bases import meets
from tilewise.solvers.common.costs import PLAIN_ARITHMETIC
from tilewise.solvers.common.cuda_run import Step, compiled
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.fused_fourier import _summed as planes

__all__ = ["SummedFFT"]

MOST_RESULTS = 8
"""Results of a sum beyond which each plane would be transformed too often."""
LEAST_SUM = 4
"""Shorter sums leave spectra no larger than results; solver ``fft`` is as fast there."""
MOST = 2**31 - 2**20
"""Most planes, and most elements of the result: kernels count them in 32 bits."""


class SummedFFT(ConvSolver):
    """Transform and product in one kernel, for few results of long sums (Vasilache et al. 2014, section 3, fused).

    A forward pass with few output channels, a gradient of an image with few input channels, and a filter's gradient
    with few of either sum many planes' spectra, each times the spectrum of another plane, of which there are few. Here
    a plane is read and transformed once, multiplied and added in registers, and its spectrum never leaves the
    multiprocessor: what ``fft`` writes and reads again, the largest thing in such a layer, is no more. The others'
    spectra are made before and come from the second cache; each sum goes back once, in the same kernel.

    ``basis`` is the transform's size along each axis, ``planes`` go to one thread block, ``split`` threads share a
    plane's transform, ``results`` are summed at a time, ``resident`` bounds registers, and ``shares`` of each sum are
    taken by blocks of their own and added in order. Strides and dilation are computed in full. Spectra of constant
    filters are kept.
    """

    name, version = "summed_fft", 1
    devices = frozenset({"cuda"})
    compiles = True
    dims = frozenset({2})
    error_bound = {"ieee": 3e-6, "tf32": 3e-6}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: groups, many results, short sums, or images beyond the largest basis."""
        reasons = []
        if p.groups > 1:
            reasons.append(f"takes one group, not {p.groups}")
        if p.taps == 1:
            reasons.append("a kernel of one point is a matrix product already: transforms would save no multiplication")
        results, depth = planes.extents(p)
        if results > MOST_RESULTS:
            reasons.append(f"makes at most {MOST_RESULTS} results of each sum, not {results}")
        if depth < LEAST_SUM:
            reasons.append(f"sums over at least {LEAST_SUM}, not {depth}")
        reasons += [
            f"along {name} no output reads an input"
            for name, axis in zip(p.space, p.axes, strict=True)
            if not meets(axis)
        ]
        if reasons:
            return reasons
        if p.pass_ is Pass.DGRAD and any(axis.before < 0 for axis in p.axes):
            reasons.append("writes no gradients of inputs that are cropped before the first")
        counted = (("planes", p.batch * (p.in_channels + p.out_channels)), ("results", math.prod(p.shape(p.result))))
        reasons += [f"counts to {MOST}; there are {number} {what}" for what, number in counted if number > MOST]
        reasons += planes.too_large(p)
        return reasons or ([unavailable()] if p.device_type == "cuda" and unavailable() else [])

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Configs ranked by a rule of thumb, the best first."""
        return planes.configs(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the few planes' spectra, and of several shares of each sum."""
        return planes.arena(p, c).size

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of constant filters' spectra."""
        return planes.spectra(p, c) if planes.keeps(p) else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        run = compiled(self.filters(p, c, weight), weight.device)
        return lambda weight, kept, workspace: run.run_pointers(weight.data_ptr(), 0, kept.data_ptr(), 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Transforms at the rate of plain arithmetic; operands, spectra and shares through memory."""
        flops = int(planes.transformed(p) * 2.5 * math.log2(math.prod(planes.basis(p))) + 4 * planes.multiplied(p))
        share = PLAIN_ARITHMETIC["16-bit" if p.dtype != "fp32" else "tf32" if p.precision == "tf32" else "fp32"]
        kept = self.constant(p, c)
        launches = 1 + (not kept) + (int(str(c["shares"])) > 1)
        return Cost(flops, p.bytes + 2 * self.workspace(p, c) + kept, launches, share / planes.handicap(p, c))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        return compiled(self.steps(p, c, a, b, out), a.device)

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """The launches. Raises ``SolverUnavailable`` for a config that does not fit the problem."""
        with config_reasons(p, c):
            return planes.steps(p, c, a, b, out)

    def filters(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
        """The launches that transform filters to be kept. Raises as :meth:`steps`."""
        with config_reasons(p, c):
            return planes.filters(p, c, weight)
