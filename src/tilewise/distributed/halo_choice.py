"""Whether fused kernels compute what halos add: they are checked against float64 and timed against the terms' loops."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewise.device import conv_precision
from tilewise.distributed.exchange import shape_of
from tilewise.distributed.halo_terms import BLOCKS, HaloTerms, Kernels, nearest, why_not
from tilewise.distributed.passes import Passes, TorchPasses
from tilewise.distributed.share import Share
from tilewise.distributed.terms import LoopedTerms, Terms
from tilewise.kernels.triton.ahead import side_by_side
from tilewise.plan import Error
from tilewise.planner.measure import Took, rounds
from tilewise.planner.options import Options
from tilewise.planner.verify import FLOOR, allowed
from tilewise.problem import DTYPE_NAMES

__all__ = ["Call", "Chosen", "choose"]

GAIN = 0.95
"""Part of the loops' time below which the fused kernels are taken."""
BUDGET_MS = 20.0


@dataclass(frozen=True)
class Call:
    """A layer whose boxes bring terms: its share, and what its operands are like, of which only that is kept."""

    share: Share
    groups: int
    x: torch.Tensor
    w: torch.Tensor
    device: torch.device

    @staticmethod
    def of(share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Call:
        """The call with these operands."""
        x_like, w_like = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (x, w))
        return Call(share, groups, x_like, w_like, x.device)


@dataclass(frozen=True)
class Chosen:
    """``terms`` for calls of one kind, ``None`` for the loops, and why. Times are milliseconds of all three passes."""

    terms: HaloTerms | None
    reason: str = ""
    fused_ms: float | None = None
    looped_ms: float | None = None


def choose(call: Call, passes: Passes, options: Options) -> Chosen:
    """The fused kernels where they are right and faster than each term by ``passes``. Computes on the call's device."""
    share = call.share
    if reason := why_not(call.groups, call.x, call.w):
        return Chosen(None, reason)
    operands = _made(call)
    precision = conv_precision() if call.w.dtype is torch.float32 else "tf32"

    def made(kernels: Kernels) -> HaloTerms:
        return HaloTerms(share, precision, kernels, options.workspace)

    right, reasons = _right([made(Kernels.alike(blocks)) for blocks in BLOCKS], operands, options)
    if not right:
        return Chosen(None, "; ".join(dict.fromkeys(reasons)))
    launched = not options.cuda_graphs
    fused = made(_fastest(right, operands, launched))
    fused_ms, looped_ms = _timed(
        [_all_steps(terms, operands) for terms in (fused, LoopedTerms(passes, share, call.groups))], operands, launched
    )
    if fused_ms > GAIN * looped_ms:
        return Chosen(None, f"{fused_ms:.4f} ms, the terms one by one {looped_ms:.4f}", fused_ms, looped_ms)
    return Chosen(fused, "", fused_ms, looped_ms)


def _fastest(right: list[HaloTerms], operands: list[torch.Tensor], launched: bool) -> Kernels:
    """The fastest blocks of each kernel among those of ``right``, which each have the same for all."""
    y, _, w, *_ = operands
    into = torch.zeros_like(w)
    steps = [_steps(terms, operands, y, into) for terms in right]
    times = _timed([step for one in steps for step in one], operands, launched)
    add, sums, home = (right[each.index(min(each))].kernels for each in (times[n::3] for n in range(3)))
    return Kernels(add.add, home.home, sums.sums)


def _right(
    candidates: list[HaloTerms], operands: list[torch.Tensor], options: Options
) -> tuple[list[HaloTerms], list[str]]:
    """Those whose results are near enough to float64's and whose memory is within the limit, and why others are not."""
    _, dy, w, *_ = operands
    by_torch = LoopedTerms(TorchPasses(), candidates[0].share, 1)
    wanted = _computed(by_torch, [t.double() for t in operands])
    floor = None if candidates[0].product == "tf32x3" else FLOOR[DTYPE_NAMES[w.dtype]]
    own = functools.cache(lambda: _worst(_computed(by_torch, operands), wanted))
    limit = options.workspace
    needs = [(terms, terms.scratch(w, dy)) for terms in candidates]
    fitting = [terms for terms, needed in needs if limit is None or needed <= limit]
    reasons = [
        f"the filter takes {needed} bytes, the limit is {limit}" for terms, needed in needs if terms not in fitting
    ]
    right = []
    _compile_ahead(fitting, operands)
    for terms in fitting:
        try:
            found = _computed(terms, operands)
        except Exception as error:  # whatever Triton or the device does: the loops compute it
            reasons.append(f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        worst = _worst(found, wanted)
        most, _ = allowed(floor, options.error_limit, worst, own)
        if worst.l2 > most:
            reasons.append(f"relative L2 error {worst.l2:.1e} above {most:.1e}")
        else:
            right.append(terms)
    return right, reasons


def _made(call: Call) -> list[torch.Tensor]:
    """Random results, their gradient, filter and boxes as the call has them; the program's random state stays."""
    generator = torch.Generator(call.device).manual_seed(0)
    share, x, w = call.share, call.x, call.w
    order = torch.contiguous_format
    if not x.is_contiguous() and x.dim() > 3:
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d

    def random(shape: Sequence[int], like: torch.memory_format) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float32, device=call.device)
        return made.to(x.dtype).contiguous(memory_format=like)

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
    """Compile all that will be run, a dozen kernels of a second or so each, before it is run one after the other."""
    y, _, w, *_ = operands
    if y.device.type != "cuda" or not candidates:
        return
    into = torch.zeros_like(y), torch.zeros_like(w)
    torch.cuda.synchronize(y.device)  # threads have streams of their own
    side_by_side([step for terms in candidates for step in _steps(terms, operands, *into)], y.device)
    torch.cuda.synchronize(y.device)


def _steps(
    terms: Terms, operands: list[torch.Tensor], results: torch.Tensor, dw: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], Sequence[torch.Tensor]]]:
    """What adds to results, what adds to the filter's gradient, and what gives the boxes'."""
    _, dy, w, *boxes = operands
    return (
        lambda: terms.add(results, terms.results(boxes, w), terms.filters(w, back=False)),
        lambda: terms.add_sums(dw, terms.sums(boxes, w, dy)),
        lambda: terms.home(dy, terms.filters(w, back=True), boxes),
    )


def _computed(terms: Terms, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the terms alone are: of the results, of the filter's gradient, of the boxes'."""
    y, _, w, *_ = operands
    results, dw = torch.zeros_like(y), torch.zeros_like(w)
    add, add_sums, home = _steps(terms, operands, results, dw)
    add()
    add_sums()
    return [results, dw, *home()]


def _worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> Error:
    """The largest relative L2 error, infinite where something is not a number; no spread, which is of transforms."""
    worst = 0.0
    for got, want in zip(found, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm().clamp_min(1e-300))
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return Error(worst, 0.0)


def _all_steps(terms: Terms, operands: list[torch.Tensor]) -> Callable[[], object]:
    """All three passes, one after the other."""
    y, _, w, *_ = operands
    steps = _steps(terms, operands, y, torch.zeros_like(w))

    def run() -> None:
        for step in steps:
            step()

    return run


def _timed(calls: Sequence[Callable[[], object]], operands: list[torch.Tensor], launched: bool) -> list[float]:
    """Milliseconds of each call, in turns."""
    times: list[list[Took]] = rounds(calls, operands[0].device, budget_ms=BUDGET_MS, launched=launched)
    return [statistics.median(took.weighed_ms for took in values) for values in times]
