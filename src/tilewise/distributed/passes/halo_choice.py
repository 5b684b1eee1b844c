"""Decides whether fused kernels compute the terms that halos add to a convolution.

The kernels are checked against float64, and timed against :class:`LoopedTerms`, which computes term after term.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewise.distributed.parts.exchange import shape_of
from tilewise.distributed.passes.contracts import Passes, Terms
from tilewise.distributed.passes.halo_kernels import BLOCKS, HaloTerms, Kernels, nearest, why_not
from tilewise.distributed.passes.share import Share
from tilewise.distributed.passes.terms import LoopedTerms
from tilewise.distributed.passes.torch_passes import TorchPasses
from tilewise.kernels.building.ahead import side_by_side
from tilewise.machine.device import conv_precision
from tilewise.plan import Error
from tilewise.planner.measuring.times import Took, rounds
from tilewise.planner.measuring.verify import allowed
from tilewise.planner.options import Options
from tilewise.problems.base import DTYPE_NAMES
from tilewise.problems.checks import FLOOR

__all__ = ["Call", "Chosen", "choose"]

GAIN = 0.95
"""The fused kernels are used where they take less than this fraction of the loops' time."""
BUDGET_MS = 20.0
"""Milliseconds that a measurement may take."""


@dataclass(frozen=True)
class Call:
    """A layer with terms to compute: its share, and operands without data that have its shapes, strides and types."""

    share: Share
    groups: int
    x: torch.Tensor
    w: torch.Tensor
    device: torch.device

    @staticmethod
    def of(share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Call:
        """The call of a layer with the input ``x`` and the filter ``w``."""
        x_like, w_like = (
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta") for like in (x, w)
        )
        return Call(share, groups, x_like, w_like, x.device)


@dataclass(frozen=True)
class Chosen:
    """The choice for calls of one kind: ``terms``, or ``None`` for the loops, and the reason for these.

    Times are milliseconds of all three passes.
    """

    terms: HaloTerms | None
    reason: str = ""
    fused_ms: float | None = None
    looped_ms: float | None = None


def choose(call: Call, passes: Passes, options: Options) -> Chosen:
    """Choose the fused kernels where they are accurate and faster than the terms one by one, computed by ``passes``.

    It computes on the device of ``call``. ``options`` has the limits of workspace and error.
    """
    share = call.share
    if reason := why_not(call.groups, call.x, call.w):
        return Chosen(None, reason)
    operands = _random_operands(call)
    precision = conv_precision() if call.w.dtype is torch.float32 else "tf32"

    def terms_by(kernels: Kernels) -> HaloTerms:
        return HaloTerms(share, precision, kernels, options.workspace)

    accurate, reasons = _accurate([terms_by(Kernels.alike(blocks)) for blocks in BLOCKS], operands, options)
    if not accurate:
        return Chosen(None, "; ".join(dict.fromkeys(reasons)))
    launched = not options.cuda_graphs
    fused = terms_by(_fastest(accurate, operands, launched))
    fused_ms, looped_ms = _timed(
        [_all_steps(terms, operands) for terms in (fused, LoopedTerms(passes, share, call.groups))], operands, launched
    )
    if fused_ms > GAIN * looped_ms:
        return Chosen(None, f"{fused_ms:.4f} ms, the terms one by one {looped_ms:.4f}", fused_ms, looped_ms)
    return Chosen(fused, "", fused_ms, looped_ms)


def _fastest(candidates: list[HaloTerms], operands: list[torch.Tensor], launched: bool) -> Kernels:
    """The fastest blocks for each kernel, where each of ``candidates`` has the same blocks for all kernels."""
    y, _, w, *_ = operands
    dw = torch.zeros_like(w)
    steps = [_steps(terms, operands, y, dw) for terms in candidates]
    times = _timed([step for steps_of_one in steps for step in steps_of_one], operands, launched)
    times_by_step = (times[step::3] for step in range(3))
    add, sums, home = (candidates[step_times.index(min(step_times))].kernels for step_times in times_by_step)
    return Kernels(add.add, home.home, sums.sums)


def _accurate(
    candidates: list[HaloTerms], operands: list[torch.Tensor], options: Options
) -> tuple[list[HaloTerms], list[str]]:
    """The candidates that keep the limits of error and memory, and the reasons why others do not."""
    _, dy, w, *_ = operands
    by_torch = LoopedTerms(TorchPasses(), candidates[0].share, 1)
    wanted = _computed(by_torch, [tensor.double() for tensor in operands])
    floor = None if candidates[0].product == "tf32x3" else FLOOR[DTYPE_NAMES[w.dtype]]
    torch_error = functools.cache(lambda: _worst(_computed(by_torch, operands), wanted))
    limit = options.workspace
    needs = [(terms, terms.scratch(w, dy)) for terms in candidates]
    fitting = [terms for terms, needed in needs if limit is None or needed <= limit]
    reasons = [
        f"the filter takes {needed} bytes, the limit is {limit}" for terms, needed in needs if terms not in fitting
    ]
    accurate = []
    _compile_ahead(fitting, operands)
    for terms in fitting:
        try:
            computed = _computed(terms, operands)
        except Exception as error:  # whatever Triton or the device raises, the loops can compute the terms
            reasons.append(f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        worst = _worst(computed, wanted)
        most, _ = allowed(floor, options.error_limit, worst, torch_error)
        if worst.l2 > most:
            reasons.append(f"relative L2 error {worst.l2:.1e} above {most:.1e}")
        else:
            accurate.append(terms)
    return accurate, reasons


def _random_operands(call: Call) -> list[torch.Tensor]:
    """Random results, their gradient, a filter and boxes like those of ``call``.

    The state of the program's random numbers is left as it was.
    """
    generator = torch.Generator(call.device).manual_seed(0)
    share, x, w = call.share, call.x, call.w
    order = torch.contiguous_format
    if not x.is_contiguous() and x.dim() > 3:
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d

    def random(shape: Sequence[int], like: torch.memory_format) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=call.device)
        return values.to(x.dtype).contiguous(memory_format=like)

    channels = w.shape[1] * call.groups if share.transposed else w.shape[0]
    results = (x.shape[0], channels, *share.sizes)
    boxes = [shape_of(x, share.out.grid.dims, box) for _, box in share.transfer.receives]
    filters = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=call.device)
    return [
        random(results, order),
        random(results, order),
        filters.copy_(random(w.shape, torch.contiguous_format)),
        *(nearest(random(shape, torch.contiguous_format), 1) for shape in boxes),
    ]


def _compile_ahead(candidates: list[HaloTerms], operands: list[torch.Tensor]) -> None:
    """Compile all kernels of the candidates at once, about a dozen of about a second each, before they run in turn."""
    y, _, w, *_ = operands
    if y.device.type != "cuda" or not candidates:
        return
    results, dw = torch.zeros_like(y), torch.zeros_like(w)
    torch.cuda.synchronize(y.device)  # the threads that compile have streams of their own
    side_by_side([step for terms in candidates for step in _steps(terms, operands, results, dw)], y.device)
    torch.cuda.synchronize(y.device)


def _steps(
    terms: Terms, operands: list[torch.Tensor], results: torch.Tensor, dw: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], Sequence[torch.Tensor]]]:
    """Calls that add to ``results``, that add to the filter's gradient ``dw``, and that return the boxes' gradients."""
    _, dy, w, *boxes = operands
    return (
        lambda: terms.add(results, terms.results(boxes, w), terms.filters(w, back=False)),
        lambda: terms.add_sums(dw, terms.sums(boxes, w, dy)),
        lambda: terms.home(dy, terms.filters(w, back=True), boxes),
    )


def _computed(terms: Terms, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The terms alone: those of the results, of the filter's gradient, and the gradient of each box."""
    y, _, w, *_ = operands
    results, dw = torch.zeros_like(y), torch.zeros_like(w)
    add, add_sums, home = _steps(terms, operands, results, dw)
    add()
    add_sums()
    return [results, dw, *home()]


def _worst(computed: list[torch.Tensor], wanted: list[torch.Tensor]) -> Error:
    """The largest relative L2 error, infinite where a result is not finite; the spread, which only FFTs have, is 0."""
    worst = 0.0
    for got, want in zip(computed, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm().clamp_min(1e-300))
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return Error(worst, 0.0)


def _all_steps(terms: Terms, operands: list[torch.Tensor]) -> Callable[[], object]:
    """A call that runs all three passes in turn."""
    y, _, w, *_ = operands
    steps = _steps(terms, operands, y, torch.zeros_like(w))

    def run() -> None:
        for step in steps:
            step()

    return run


def _timed(calls: Sequence[Callable[[], object]], operands: list[torch.Tensor], launched: bool) -> list[float]:
    """The median milliseconds of each call, timed in turn: the device's, or the host's where launches take longer."""
    times: list[list[Took]] = rounds(calls, operands[0].device, budget_ms=BUDGET_MS, launched=launched)
    return [statistics.median(took.ms for took in values) for values in times]
