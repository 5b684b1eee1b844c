"""The proof that a plan computes its problem: distance from float64 on operands of many kinds.

What is compared is a part of the result. Outputs start as NaN, so an element that nobody wrote anywhere shows. What
changes here, or in the kinds, outliers and samples, raises :data:`~tilewise.plan.CHECK_VERSION`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.machine.torch_state import without_benchmark
from tilewise.machine.turns import pause
from tilewise.problems.activations import activate, activated
from tilewise.problems.base import WHOLE, Compute, Range, Seams, narrow
from tilewise.problems.checks import floor_of
from tilewise.problems.conv import samples
from tilewise.problems.conv.mixtures import (
    KINDS,
    NEEDED,
    SMOOTH,
    Mixture,
    apart,
    apply,
    mixture,
    pairs_of,
    plain,
    plant,
)
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.conv.reference import convolve_by_transform
from tilewise.problems.conv.samples import MOST_RANKS, Sample, few_samples, first_images, samples_of
from tilewise.problems.error import Error
from tilewise.problems.kept_runs import kept_runs
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result

__all__ = ["errors_of"]

MANY_TAPS = 64
"""From so many taps on, a depthwise reference is computed by Fourier transforms: torch is slow at it on a CPU."""
RESOLVED = 1e-9
"""Results below this share of the largest are compared as if they were that large."""
EXTRA, CHEAP = 0.3, 0.1
"""What further runs for pairs of kinds may cost: a share of the check without them, or of ``samples.FLOPS``."""
PICKED = 1 << 20
"""Places of the result times blocks that are looked through at a time."""
MUST = 4
"""The first so many pairs of :data:`NEEDED` are checked at any cost."""


def errors_of(problem: ConvProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """Worst errors of ``compute`` on operands of every kind; infinite where it leaves or makes NaN.

    ``own`` is torch's own way, where it has one: the product of two smooth operands, whose plain sum drifts in any
    order, counts where ``compute`` is more than twice as far off there as torch.
    """
    worst = Error(0.0, 0.0)
    kept = None if seams.parted or seams.starts else kept_runs()  # plans of parts are compared elsewhere
    for draw in _draws(problem, seams):
        key = (problem, draw.seed, draw.roles)
        make = functools.partial(_Run, problem, draw)
        run = make() if kept is None else kept.find(key, make)
        block_errors = run.block_errors(compute)
        if draw.mixed is not None:
            worst = _worse(worst, _where_smooth(run, block_errors, own))
        worst = _worse(worst, *block_errors.values())
        if not math.isfinite(worst.l2):
            if kept is not None:
                kept.drop(key)  # its operands may be written over
            break
        if kept is not None:
            kept.keep(key, run)
    return worst


def _worse(*errors: Error) -> Error:
    """The larger of each of the errors' two figures."""
    return Error(max(error.l2 for error in errors), max(error.spread for error in errors))


def _where_smooth(run: _Run, block_errors: dict[int, Error], own: Compute | None) -> Error:
    """The error that counts for blocks where both operands are smooth. They are taken out of ``block_errors``."""
    smooth = {pair: block_errors.pop(pair) for pair in SMOOTH if pair in block_errors}
    worst = _worse(Error(0.0, 0.0), *smooth.values())
    if own is None or max(worst.l2, worst.spread) <= floor_of(run.problem):
        return worst
    torchs = run.block_errors(own)
    l2, spread = 0.0, 0.0
    for pair, error in smooth.items():
        at_torch = torchs.get(pair, Error(0.0, 0.0))
        l2 = max(l2, error.l2 if error.l2 > 2 * at_torch.l2 else 0.0)
        spread = max(spread, error.spread if error.spread > 2 * at_torch.spread else 0.0)
    return Error(l2, spread)


@dataclass(frozen=True)
class _Draw:
    """Operands of one run, and what of the result is compared. Without ``mixed`` they are of a wide range."""

    seed: int
    mixed: Mixture | None
    compared: tuple[Sample, ...]
    images: tuple[int, ...] = ()
    """The images with outliers."""
    roles: tuple[str, ...] = ()
    """The operands with outliers."""
    seams: tuple[int, ...] = ()

    def operands(self, problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor]:
        """Both operands, in the order of ``problem.operands``."""
        # Beside values over many octaves WGRAD's long sums would hide what an outlier does to them.
        first, second = make_operands(problem, self.seed, wide=self.mixed is None and problem.pass_ is not Pass.WGRAD)
        pair = first, second
        pause()
        if self.mixed is None:
            plant(problem, pair, self.roles, self.images, self.seams)
        else:
            apply(problem, pair, self.mixed)
        return pair


def _draws(problem: ConvProblem, seams: Seams) -> Iterator[_Draw]:
    """The runs of a check: mixed kinds of data, then a wide range with outliers, then pairs that had no room.

    Plans of parts of a batch are each compared with normal values: there the kinds come afterwards.
    """
    parted = seams.parted and problem.pass_ is not Pass.WGRAD
    mixed = plain(problem) if parted else mixture(problem)
    telling = tuple(samples_of(problem, seams))
    first = telling if parted else tuple(samples_of(problem, seams, MOST_RANKS // 2))
    yield _Draw(1, mixed, first)
    images = tuple({problem.batch - 1, *first_images(seams)})
    for roles in (problem.operands,) if apart(problem) else ((role,) for role in problem.operands):
        yield _Draw(2, None, telling, images, roles, seams.starts.get("space", ()))
    met, few = _pairs(problem, mixed, first), tuple(few_samples(problem))
    cost = 1 + 2 * _share(problem, few)
    room = max(EXTRA * (2 + 2 * _share(problem, telling) + 2 * _share(problem, first)), _cheap(problem))
    for seed in itertools.count(3):
        missing = [pair for pair in NEEDED if pair not in met]
        if not missing or (room < cost and missing[0] not in NEEDED[:MUST]):
            return
        mixed, room = mixture(problem, missing[0]), room - cost
        yield _Draw(seed, mixed, few)
        met |= {missing[0]} | _pairs(problem, mixed, few)


def _cheap(problem: ConvProblem) -> float:
    """How many times a problem can be computed at no cost that matters."""
    return CHEAP * samples.FLOPS[problem.device_type] / problem.flops


def _share(problem: ConvProblem, compared: Sequence[Sample]) -> float:
    """The share of the problem's operations that the samples take."""
    return sum(sample.problem.flops for sample in compared if sample.problem is not None) / problem.flops


def _pairs(problem: ConvProblem, mixed: Mixture, compared: Sequence[Sample]) -> set[tuple[int, int]]:
    """The pairs of kinds that meet in what is compared."""
    codes = pairs_of(problem, mixed)
    met_codes = {code for sample in compared for code in _codes(problem, codes, sample).flatten().tolist()}
    return {divmod(code, len(KINDS)) for code in met_codes}


def _codes(problem: ConvProblem, codes: torch.Tensor, sample: Sample) -> torch.Tensor:
    """The codes of the pairs of kinds in a sample of the result."""
    return narrow(codes, [r for r in sample.ranges[problem.result] if r.dim < 2])


class _Run:
    """One run of a check: its operands, and float64's results for what is compared, which further plans share."""

    def __init__(self, problem: ConvProblem, draw: _Draw) -> None:
        self.problem, self._draw = problem, draw
        self._operands = draw.operands(problem)
        pause()
        self._bias = make_bias(problem, draw.seed)
        self._residual = make_residual(problem, draw.seed)
        self._start = 1.0 if problem.accumulate else 0.0  # a solver that sets where it should add is seen
        self._codes = pairs_of(problem, plain(problem) if draw.mixed is None else draw.mixed)
        self._expected: dict[int, _Expected] = {}
        self._drawn = _fingerprints(self._operands)
        self._room = samples.REFERENCE_BYTES
        """Bytes of references that may still be kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, the references that it has by now included."""
        added = [t for t in (self._bias, self._residual) if t is not None]
        expected = [t for each in self._expected.values() for t in each]
        return sum(t.nbytes for t in (*self._operands, *added, *expected))

    def block_errors(self, compute: Compute) -> dict[int, Error]:
        """Errors of ``compute`` in each block of the result, by its pair of kinds; infinite where it errs elsewhere."""
        problem = self.problem
        result = make_result(problem)
        if problem.accumulate:
            result.fill_(self._start)
        added = {} if self._residual is None else {"residual": self._residual}
        computed = compute(*self._operands, self._bias, result, **added)
        assert isinstance(computed, torch.Tensor)
        result = computed
        pause()
        if _fingerprints(self._operands) != self._drawn:  # written over by what must only read them
            return {-1: Error(math.inf, math.inf)}
        if not torch.isfinite(result).all():
            return {-1: Error(math.inf, math.inf)}
        pause()
        tally = _Tally(_terms(problem), torch.finfo(result.dtype).tiny, result.device)
        for index, sample in enumerate(self._draw.compared):
            pause()
            got = narrow(result, sample.ranges[problem.result]).double()
            expected = self._expected.get(index)
            if expected is None:
                expected = self._expect(sample, got)
                if (size := expected.want.nbytes + expected.scale.nbytes) <= self._room:
                    self._expected[index], self._room = expected, self._room - size
            tally.add(got, expected)
        return tally.errors()

    def _expect(self, sample: Sample, like: torch.Tensor) -> _Expected:
        """What float64 gives for a sample; ``like`` is a tensor of its shape."""
        problem = self.problem
        operands = [
            narrow(t, sample.ranges[role]) for t, role in zip(self._operands, problem.operands, strict=True)
        ]  # fmt: skip
        if sample.problem is None:
            want, scale = torch.zeros_like(like), torch.zeros_like(like)
        else:
            want, scale = _reference(sample.problem, *operands)
        pause()
        want, scale = want.add_(self._start), scale.add_(self._start)
        if self._bias is not None:
            ranges = sample.ranges[problem.result]
            channels = narrow(self._bias, [Range(0, r.start, r.length) for r in ranges if r.dim == 1])
            added = channels.double().view(-1, *[1] * problem.dims)
            want, scale = want.add_(added), scale.add_(added.abs())
        if self._residual is not None:
            added = narrow(self._residual, sample.ranges[problem.result]).double()
            want, scale = want.add_(added), scale.add_(added.abs())
        if problem.activation != "none":
            pause()
            want = activate(want, problem.activation)
            scale.add_(activated(torch.zeros_like(scale[:1, :1]), problem.activation).abs_())
        codes = _codes(problem, self._codes, sample).flatten()
        present = torch.bincount(codes, minlength=len(KINDS) ** 2).nonzero().flatten().to(like.device)
        return _Expected(want, scale, present, codes.to(like.device) == present[:, None])


def _fingerprints(operands: tuple[torch.Tensor, ...]) -> list[int]:
    """A sum over the bits of each operand, which changes with nearly everything that is written over it."""
    return [int(t.view(_BITS[t.dtype.itemsize]).sum(dtype=torch.int64)) for t in operands]


_BITS = {2: torch.int16, 4: torch.int32}


class _Expected(NamedTuple):
    """What a sample of the result should be."""

    want: torch.Tensor
    scale: torch.Tensor
    """|a| conv |b|, with the magnitudes of what is added, and of the activation of 0."""
    codes: torch.Tensor
    """The pairs of kinds that are in it."""
    blocks: torch.Tensor
    """For each of them, in which places of the first two axes it is, in one axis."""


def _terms(problem: ConvProblem) -> int:
    """How many products a result is the sum of."""
    if problem.pass_ is Pass.WGRAD:
        return problem.batch * math.prod(axis.out for axis in problem.axes)
    channels = problem.in_channels if problem.pass_ is Pass.FPROP else problem.out_channels
    return channels // problem.groups * problem.taps


class _Tally:
    """Collects sums of squares and the worst spread in each block of the result, all on the result's device.

    A result that cancels is compared with what it would be if the signs of its terms were random: at least
    |a| conv |b| divided by the root of how many they are.
    """

    def __init__(self, terms: int, tiny: float, device: torch.device) -> None:
        self._terms, self._tiny = terms, tiny  # results below it are rounded to multiples, in fp16 often
        blocks = len(KINDS) ** 2
        self._sums = torch.zeros((blocks, 3), dtype=torch.float64, device=device)
        self._spreads = torch.full((blocks,), -1.0, dtype=torch.float64, device=device)  # nothing there

    def add(self, got: torch.Tensor, expected: _Expected) -> None:
        """Add a sample of the result."""
        want, scale, codes, blocks = expected
        gap = (got - want).abs_()
        square = _summed(gap.square())
        pause()
        norm = _summed(want.square().clamp_min_(self._tiny**2))
        random = _summed(scale.square()) / self._terms
        pause()
        spread = _spread(gap, scale, self._tiny).flatten(2).amax(2).flatten()
        values = torch.stack((square, norm, random)).flatten(1)
        together = max(1, PICKED // values.shape[1])
        for some, here in zip(codes.split(together), blocks.split(together), strict=True):
            pause()
            # Picked, not multiplied by 0 or 1: what is infinite in one block is nothing in another.
            self._sums[some] += torch.where(here[:, None], values, 0.0).sum(2)
            self._spreads[some] = self._spreads[some].maximum(torch.where(here, spread, 0.0).amax(1))

    def errors(self) -> dict[int, Error]:
        """The relative L2 error and the spread of each block."""
        found = enumerate(zip(self._sums.tolist(), self._spreads.tolist(), strict=True))
        return {
            code: Error(math.sqrt(square / max(norm, random)), spread)
            for code, ((square, norm, random), spread) in found
            if spread >= 0.0
        }


def _summed(values: torch.Tensor) -> torch.Tensor:
    """The sums over all axes but the first two."""
    return values.flatten(2).sum(2)


def _spread(gap: torch.Tensor, scale: torch.Tensor, tiny: float) -> torch.Tensor:
    """``gap`` in shares of ``scale``, which is |a| conv |b|. Where that is 0 nothing is read: all but 0 counts as 1."""
    return torch.where(scale == 0.0, (gap != 0.0).to(gap.dtype), gap / scale.clamp_min(tiny))


def _reference(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and |a| conv |b| in float64; WGRAD in chunks of the batch and of images, so that copies stay small."""
    with without_benchmark(problem.device_type):  # torch's search would outlast the reference
        return _float64(problem, a, b)


def _float64(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_reference`, under the benchmark mode that the caller has set."""
    if problem.device_type == "cpu" and problem.depthwise and problem.taps >= MANY_TAPS:
        value = convolve_by_transform(problem, a, b)
        scale = convolve_by_transform(problem, a.abs(), b.abs())
        # It errs by a share of the largest, also where nothing meets.
        return value, scale.clamp_min_(RESOLVED * float(scale.max()))
    if problem.pass_ is not Pass.WGRAD:
        value = problem.reference(a, b)
        pause()
        return value, problem.reference(a.abs(), b.abs())
    image = 8 * (math.prod(problem.shape("x")) + math.prod(problem.shape("y"))) // problem.batch
    chunk = max(1, min(problem.batch, samples.REFERENCE_BYTES // image))
    sizes = [min(chunk, problem.batch - i) for i in range(0, problem.batch, chunk)]
    value = torch.zeros(problem.shape("w"), dtype=torch.float64, device=a.device)
    scale = torch.zeros_like(value)
    rows = problem.extent(problem.space[0])
    stripe = max(1, min(rows, samples.REFERENCE_BYTES * rows // image))
    stripes = [min(stripe, rows - i) for i in range(0, rows, stripe)]
    for images_part in problem.split("batch", sizes):
        assert images_part.problem is not None
        for part in images_part.problem.split(problem.space[0], stripes):
            if part.problem is not None:
                x, dy = (narrow(t, (*images_part.ranges(role), *part.ranges(role))) for t, role in ((a, "x"), (b, "y")))
                pause()
                value += part.problem.reference(x, dy)
                pause()
                scale += part.problem.reference(x.abs(), dy.abs())
    return value, scale
