"""The proof that a plan computes its problem: distance from float64 on operands of many kinds.

What is compared is a part of the result. Outputs start as NaN, so an element that nobody wrote anywhere shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tilewise.kernels.reference import convolve_by_transform
from tilewise.plan import Error, Plan
from tilewise.planner import samples
from tilewise.planner.kinds import (
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
from tilewise.planner.operands import make_bias, make_operands, make_result, narrow
from tilewise.planner.samples import MOST_RANKS, Sample, few_samples, first_images, samples_of, seams_of
from tilewise.problem import ConvProblem, Pass, Range
from tilewise.torch_state import without_benchmark

__all__ = ["CHECK_VERSION", "FLOOR", "Compute", "allowed", "error_limit", "errors_of"]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""``compute(a, b, bias, out) -> result`` of the problem; a bias where it has one."""

MANY_TAPS = 64
"""From so many on a depthwise reference is transformed: torch takes a CPU's float64 products one by one."""
RESOLVED = 1e-9
"""Of the largest result: what lies below is compared as if it were this large."""
CHECK_VERSION = 2
"""Of what a check compares: what was found by an earlier one was found on less."""
EXTRA, CHEAP = 0.3, 0.1
"""What kinds may cost that have no room beside others: a share of a check without them, or of ``samples.FLOPS``."""
MUST = 4
"""So many of :data:`NEEDED` are met at any cost."""
LIMIT = 1e-5
"""Error limit of fp32."""
FLOOR = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}
"""Least error limits where operands or result are rounded; for fp32 operands to TF32."""


def errors_of(problem: ConvProblem, compute: Compute, plan: Plan | None = None, own: Compute | None = None) -> Error:
    """Worst errors of ``compute`` on operands of every kind; infinite where it leaves or makes NaN.

    ``own`` is torch's own way, where it has one: the product of two smooth operands, whose plain sum drifts in any
    order, counts where ``compute`` is more than twice as far off there as torch.
    """
    worst = Error(0.0, 0.0)
    for draw in _draws(problem, plan):
        found = _block_errors(problem, compute, draw)
        if draw.mixed is not None:
            worst = _worse(worst, _where_smooth(problem, found, draw, own))
        worst = _worse(worst, *found.values())
        if not math.isfinite(worst.l2):
            break
    return worst


def _worse(*errors: Error) -> Error:
    return Error(max(error.l2 for error in errors), max(error.spread for error in errors))


def _where_smooth(problem: ConvProblem, found: dict[int, Error], draw: _Draw, own: Compute | None) -> Error:
    """What counts of the blocks where both operands are smooth, which are taken out of ``found``."""
    smooth = {pair: found.pop(pair) for pair in SMOOTH if pair in found}
    worst = _worse(Error(0.0, 0.0), *smooth.values())
    if own is None or max(worst.l2, worst.spread) <= _floor(problem):
        return worst
    torchs = _block_errors(problem, own, draw)
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
    """Those with outliers."""
    roles: tuple[str, ...] = ()
    """The operands with outliers."""
    seams: tuple[int, ...] = ()

    def operands(self, problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, in the order of ``problem.operands``."""
        pair = make_operands(problem, self.seed, wide=self.mixed is None)
        if self.mixed is None:
            plant(problem, pair, self.roles, self.images, self.seams)
        else:
            apply(problem, pair, self.mixed)
        return pair


def _draws(problem: ConvProblem, plan: Plan | None) -> Iterator[_Draw]:
    """Kinds, each pair in one block of the result; then a wide range with outliers; then pairs that had no room.

    Plans of parts of a batch are each compared with normal values: there the kinds come afterwards.
    """
    parted = plan is not None and not plan.leaf and problem.pass_ is not Pass.WGRAD
    mixed = plain(problem) if parted else mixture(problem)
    telling = tuple(samples_of(problem, plan))
    first = telling if parted else tuple(samples_of(problem, plan, MOST_RANKS // 2))
    yield _Draw(1, mixed, first)
    images = tuple({problem.batch - 1, *first_images(problem, plan)})
    for roles in (problem.operands,) if apart(problem) else ((role,) for role in problem.operands):
        yield _Draw(2, None, telling, images, roles, tuple(seams_of(plan)))
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
    return sum(sample.problem.flops for sample in compared if sample.problem is not None) / problem.flops


def _pairs(problem: ConvProblem, mixed: Mixture, compared: Sequence[Sample]) -> set[tuple[int, int]]:
    """The pairs of kinds that meet in what is compared."""
    codes = pairs_of(problem, mixed)
    found = {code for sample in compared for code in _codes(problem, codes, sample).flatten().tolist()}
    return {divmod(code, len(KINDS)) for code in found}


def _codes(problem: ConvProblem, codes: torch.Tensor, sample: Sample) -> torch.Tensor:
    return narrow(codes, [r for r in sample.ranges[problem.result] if r.dim < 2])


def _block_errors(problem: ConvProblem, compute: Compute, draw: _Draw) -> dict[int, Error]:
    """Errors of one run in each block of the result, by its pair of kinds."""
    start = 1.0 if problem.accumulate else 0.0  # a solver that sets where it should add is seen
    a, b = draw.operands(problem)
    result = make_result(problem)
    if problem.accumulate:
        result.fill_(start)
    bias = make_bias(problem, draw.seed)
    result = compute(a, b, bias, result)
    if not torch.isfinite(result).all():
        return {-1: Error(math.inf, math.inf)}
    codes = pairs_of(problem, plain(problem) if draw.mixed is None else draw.mixed).to(result.device)
    tally = _Tally(_terms(problem), torch.finfo(result.dtype).tiny)
    first, second = problem.operands
    for sample in draw.compared:
        got = narrow(result, sample.ranges[problem.result]).double()
        operands = narrow(a, sample.ranges[first]), narrow(b, sample.ranges[second])
        if sample.problem is None:
            want, scale = torch.zeros_like(got), torch.zeros_like(got)
        else:
            want, scale = _reference(sample.problem, *operands)
        want, scale = want.add_(start), scale.add_(start)
        if bias is not None:
            channels = narrow(bias, [Range(0, r.start, r.length) for r in sample.ranges[problem.result] if r.dim == 1])
            added = channels.double().view(-1, *[1] * problem.dims)
            want, scale = want.add_(added), scale.add_(added.abs())
        tally.add(got, want, scale, _codes(problem, codes, sample))
    return tally.errors()


def _terms(problem: ConvProblem) -> int:
    """How many products a result is the sum of."""
    if problem.pass_ is Pass.WGRAD:
        return problem.batch * math.prod(axis.out for axis in problem.axes)
    channels = problem.in_channels if problem.pass_ is Pass.FPROP else problem.out_channels
    return channels // problem.groups * problem.taps


class _Tally:
    """Sums of squares and the worst spread in each block.

    A result that cancels is compared with what it would be if the signs of its terms were random: at least
    |a| conv |b| divided by the root of how many they are.
    """

    def __init__(self, terms: int, tiny: float) -> None:
        self._terms, self._tiny = terms, tiny  # results below it are rounded to multiples, in fp16 often
        self._found: dict[int, list[float]] = {}

    def add(self, got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor) -> None:
        """A sample of the result, which its first two axes cut into blocks."""
        gap = (got - want).abs_()
        square = _summed(gap.square())
        norm = _summed(want.square().clamp_min_(self._tiny**2))
        random = _summed(scale.square()) / self._terms
        spread = _spread(gap, scale, self._tiny).flatten(2).amax(2)
        for code in set(codes.flatten().tolist()):
            mine = codes == code
            found = self._found.setdefault(code, [0.0, 0.0, 0.0, 0.0])
            for index, values in enumerate((square, norm, random)):
                found[index] += float(values[mine].sum())
            found[3] = max(found[3], float(spread[mine].max()))

    def errors(self) -> dict[int, Error]:
        """The relative L2 error and the spread of each block."""
        return {
            code: Error(math.sqrt(square / max(norm, random)), spread)
            for code, (square, norm, random, spread) in self._found.items()
        }


def _summed(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(2).sum(2)


def _spread(gap: torch.Tensor, scale: torch.Tensor, tiny: float) -> torch.Tensor:
    """``gap`` in shares of ``scale``, which is |a| conv |b|. Where that is 0 nothing is read: all but 0 counts as 1."""
    return torch.where(scale == 0.0, (gap != 0.0).to(gap.dtype), gap / scale.clamp_min(tiny))


def error_limit(
    problem: ConvProblem, asked: float | None, found: Error, own: Callable[[], Error]
) -> tuple[float, float]:
    """What :func:`allowed` says of the problem's data types and precision."""
    exact = problem.dtype == problem.out_dtype == "fp32" and problem.precision == "ieee"
    return allowed(None if exact else _floor(problem), asked, found, own)


def _floor(problem: ConvProblem) -> float:
    """What may be off by in any case, without other instructions."""
    exact = problem.dtype == problem.out_dtype == "fp32" and problem.precision == "ieee"
    return LIMIT if exact else max(FLOOR[problem.dtype], FLOOR[problem.out_dtype])


def allowed(floor: float | None, asked: float | None, found: Error, own: Callable[[], Error]) -> tuple[float, float]:
    """Largest L2 error and spread allowed: 1e-5 in fp32 (``floor`` is ``None``), twice torch's own (and no less than
    its dtype's rounding) otherwise, or what was ``asked`` for.

    ``own`` gives torch's own errors, which take as long as those ``found`` did: it is called only where these are above
    what is allowed in any case. TF32 rounds operands to 10 bits, so 1e-3 is allowed where torch happens to pick an fp32
    engine.
    """
    if asked is not None:
        return asked, asked
    if floor is None:
        return LIMIT, LIMIT
    if found.l2 <= floor and found.spread <= floor:
        return floor, floor
    error = own()
    l2, spread = (2 * e if math.isfinite(e) else 0.0 for e in (error.l2, error.spread))
    return max(l2, floor), max(spread, floor)


def _reference(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and |a| conv |b| in float64; WGRAD in chunks of the batch and of images, so that copies stay small."""
    with without_benchmark(problem.device_type):  # torch's search would outlast the reference
        return _float64(problem, a, b)


def _float64(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.device_type == "cpu" and problem.depthwise and problem.taps >= MANY_TAPS:
        value = convolve_by_transform(problem, a, b)
        scale = convolve_by_transform(problem, a.abs(), b.abs())
        # It errs by a share of the largest, also where nothing meets.
        return value, scale.clamp_min_(RESOLVED * float(scale.max()))
    if problem.pass_ is not Pass.WGRAD:
        return problem.reference(a, b), problem.reference(a.abs(), b.abs())
    image = 8 * (math.prod(problem.shape("x")) + math.prod(problem.shape("y"))) // problem.batch
    chunk = max(1, min(problem.batch, samples.REFERENCE_BYTES // image))
    sizes = [min(chunk, problem.batch - i) for i in range(0, problem.batch, chunk)]
    value = torch.zeros(problem.shape("w"), dtype=torch.float64, device=a.device)
    scale = torch.zeros_like(value)
    rows = problem.extent(problem.space[0])
    stripe = max(1, min(rows, samples.REFERENCE_BYTES * rows // image))
    stripes = [min(stripe, rows - i) for i in range(0, rows, stripe)]
    for some in problem.split("batch", sizes):
        assert some.problem is not None
        for part in some.problem.split(problem.space[0], stripes):
            if part.problem is not None:
                x, dy = narrow(a, (*some.x, *part.x)), narrow(b, (*some.y, *part.y))
                value += part.problem.reference(x, dy)
                scale += part.problem.reference(x.abs(), dy.abs())
    return value, scale
