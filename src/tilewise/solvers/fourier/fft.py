"""Convolution by Fourier transforms of whole planes (Vasilache et al. 2014, sections 3 and 5)."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.bases import bases
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.common.matmul import at_precision, library_scratch
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.fourier import _own_configs as own
from tilewise.solvers.fourier._library import FourierPlan
from tilewise.solvers.fourier._library_products import STREAMS

MOST_BASES = 4
MOST_PLACES = 2
MOST_OWN = 2
"""Configs on this package's transforms that are measured beside those on the library's."""
MOST_BYTES = 2**32
"""Blocks with larger spectra are not offered, as smaller blocks are as fast."""
LARGE_PRODUCT = {"cpu": 1e6, "cuda": 1e8}
"""Operations per frequency from which on a call for each frequency is worth trying."""
TRANSFORM_EFFICIENCY = {"cpu": 0.08, "cuda": 0.1}
"""Share of the matrix product's rate that a transform's arithmetic reaches."""
WIDENED = {"cpu": 1.0, "cuda": 0.07}
"""Rate of fp32 arithmetic relative to that of 16-bit operands."""
TF32_COMPLEX = 0.4


class FFT(ConvSolver):
    """Transforms of whole planes, one complex product per frequency, and back.

    ``basis`` is the transform's size along each axis (3.4), ``product`` the form of the products (3.3): ``batched``,
    ``looped``, ``streams``, or ``pointwise`` for depthwise layers, and ``block`` how many images are transformed at a
    time (absent: all). The filter is transformed once. Strides are computed in full: FPROP drops outputs, the other
    passes spread the gradient. 16-bit operands are widened to fp32.

    With ``transform="own"`` small planes and short signals on a GPU go through this package's transforms. ``product``
    may then be one on the matrix units, in pieces of ``gemm``, of numbers in the parts that ``spectra`` names (absent:
    complex64), or ``fused``: sums over few channels inside the inverse transform.
    """

    kin = "Fourier transforms"
    name, version = "fft", 4
    accumulates = True
    blocks_itself = True
    compiles = True
    most_configs = 4

    def unsupported(self, p: ConvProblem) -> list[str]:
        """A reason for adding into results that are not fp32, as sums are kept in fp32."""
        if p.accumulate and p.out_dtype != "fp32":
            return [f"adds into fp32 results, not {p.out_dtype}"]
        return []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Every promising basis and product form with the whole batch, then smaller blocks in the best two bases.

        The same blocks for every batch, so that a part of a batch can be asked about what gained on the whole.
        """
        yield from self._library(p)
        yield from (c for c, _ in self._own(p, None))

    def _library(self, p: ConvProblem) -> Iterable[Config]:
        """Configs on the library's transforms."""
        best_bases = bases(p, MOST_BASES)
        whole = [Config(basis=basis, product=product) for basis in best_bases for product in self._products(p)]
        sizes = [*(2**e for e in range(29, 0, -2)), 1]
        form = whole[0]["product"]
        blocks = [Config(basis=basis, block=n, product=form) for n in sizes if n < p.batch for basis in best_bases[:2]]
        last = len(whole) + len(blocks) - 1
        for number, c in enumerate((*whole, *blocks)):
            if number == last or self.workspace(p, c) <= MOST_BYTES:
                yield c

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`; under a limit also the most images, a power of two, that keep it, in the best basis."""
        configs = list(self._library(p))
        if only is not None:
            configs = [c for c in configs if c in only]
            configs += [c for c in only if _is_own(c) and self._has_own(p) and own.fits(p, c)]
        elif ceiling is not None:
            configs += [c for c in self._largest(p, configs[0], ceiling) if c not in configs]
        offered = [(c, self.workspace(p, c)) for c in configs]
        return offered if only is not None else [*offered, *self._own(p, ceiling)]

    def most(self, p: ConvProblem) -> int:
        """As in :class:`Solver`, and more where this package's transforms apply."""
        return self.most_configs + (MOST_OWN if self._has_own(p) else 0)

    @staticmethod
    def _has_own(p: ConvProblem) -> bool:
        """Whether this package's transforms apply to ``p``."""
        return p.device_type == "cuda" and not own.limits(p)

    def _own(self, p: ConvProblem, ceiling: int | None) -> list[tuple[Config, int]]:
        """Configs on this package's transforms with their workspace, within ``ceiling`` bytes."""
        if not self._has_own(p):
            return []
        whole = [place for place in own.places(p) if own.count(p, place[1]) == 1]
        return list(own.offered(p, whole, ceiling, MOST_PLACES, tiled=False))

    def _largest(self, p: ConvProblem, whole: Config, ceiling: int) -> Iterable[Config]:
        """The config with the most images, a power of two, that fits into ``ceiling`` bytes; empty where none does."""
        for exponent in range((p.batch - 1).bit_length(), -1, -1):
            c = Config(**{**whole, "block": 2**exponent}) if 2**exponent < p.batch else whole
            if self.workspace(p, c) + self.hidden_workspace(p, c) <= ceiling:
                return (c,)
        return ()

    @staticmethod
    def _products(p: ConvProblem) -> list[str]:
        """Forms of the product worth trying."""
        if p.depthwise:
            return ["pointwise"]
        forms = ["batched"]
        if 8 * p.batch * (p.in_channels // p.groups) * (p.out_channels // p.groups) >= LARGE_PRODUCT[p.device_type]:
            forms += ["looped"] if p.device_type == "cpu" else ["looped", "streams"]
        return forms

    @staticmethod
    def _plan(p: ConvProblem, c: Config) -> FourierPlan:
        """The plan of a config on the library's transforms."""
        basis, product, images = c["basis"], c["product"], c.get("block", p.batch)
        assert isinstance(basis, tuple)
        assert isinstance(product, str)
        assert isinstance(images, int)
        return _planned(p, basis, product, images)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of one block's padded planes and spectra, and of the filter's spectrum."""
        return (own.plan_of(p, c) if _is_own(c) else self._plan(p, c)).arena.size

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a constant filter's spectrum."""
        return (own.plan_of(p, c) if _is_own(c) else self._plan(p, c)).constants.size

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        return own.plan_of(p, c).prepare(weight, weight.device) if _is_own(c) else self._plan(p, c).prepare(weight)

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes that transforms allocate: their results, copies for the inverse, and the library's scratch."""
        if _is_own(c):
            return own.hidden(p, c)
        if c["product"] == "pointwise":
            return self._plan(p, c).hidden()
        return self._plan(p, c).hidden() + library_scratch(p, STREAMS + 1 if c["product"] == "streams" else 1)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Transforms of all planes, products at all frequencies, and the traffic between them."""
        if _is_own(c):
            return own.cost(p, c)
        plan = self._plan(p, c)
        planes = {role: math.prod(p.shape(role)[:2]) for role in "xwy"}
        blocks = -(-p.batch // plan.images)
        total = sum(planes.values())
        transforms = int(2.5 * plan.size * math.log2(max(plan.size, 2)) * total)
        i, o = p.in_channels // p.groups, p.out_channels // p.groups
        products = 8 * plan.frequencies * p.batch * p.groups * i * o
        shape = (plan.images, o, i) if p.pass_ is not Pass.WGRAD else (o, i, plan.images)
        share = 0.3 if plan.pointwise else efficiency(p.device_type, *shape, batch=plan.frequencies * p.groups)
        if c["product"] == "looped":
            share = efficiency(p.device_type, *shape)
        share *= WIDENED[p.device_type] if p.dtype != "fp32" else TF32_COMPLEX if p.precision == "tf32" else 1.0
        work = products / share + transforms / TRANSFORM_EFFICIENCY[p.device_type]
        real, spectrum = 4 * plan.size, 8 * plan.frequencies
        passes = 4 if plan.pointwise else 6
        moved = p.bytes + total * (3 * real + passes * spectrum)
        filters = len(range(0, p.out_channels, plan.filter_rows))
        calls = plan.frequencies * p.groups if c["product"] in ("looped", "streams") else 1
        kernels = 5 * (filters + blocks * len(p.operands)) + blocks * calls
        flops = products + transforms
        return Cost(flops, int(moved), kernels, min(1.0, max(flops / work, 1e-4)))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run for tensors with the strides of these. Raises ``ValueError`` where ``out`` is ``None``."""
        if out is None:
            raise ValueError(f"out=None: {self.name} writes into a tensor of shape {p.shape(p.result)}")
        if _is_own(c):
            return own.bind(p, c, a, b, out)
        return at_precision(p, self._plan(p, c).bind(a, b, out))


def _is_own(c: Config) -> bool:
    """Whether ``c`` uses this package's transforms."""
    return c.get("transform") == "own"


@functools.lru_cache(maxsize=1024)
def _planned(p: ConvProblem, basis: tuple[int, ...], product: str, images: int) -> FourierPlan:
    """The plan on the library's transforms, kept for further calls."""
    return FourierPlan(p, basis, product, images)
