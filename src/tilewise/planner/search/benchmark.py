"""Runs of one candidate: first for its memory, then for its time. One that raises or is far too slow ends early."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.execute.kept_filter import kept_bytes
from tilewise.machine import load
from tilewise.machine.allocations import countable
from tilewise.machine.turns import pause
from tilewise.plan import Measurement, Plan
from tilewise.planner.measuring.copies import Copies
from tilewise.planner.measuring.repeats import LOSES, counted, launches_of, repeats_of
from tilewise.planner.measuring.samples import sample_of
from tilewise.planner.measuring.times import NOISE, Timer, counted_bytes, lead_ms, peak_bytes, peak_is_known
from tilewise.planner.measuring.took import Took
from tilewise.planner.options import Options, first_line
from tilewise.planner.search.leaves import OverLimit, check_declared, has_exact_memory
from tilewise.problems.base import Problem, narrow
from tilewise.problems.operands import Tensors
from tilewise.solvers import SolverUnavailable, Split
from tilewise.solvers.common.shares import Shares

__all__ = ["OUT_OF_MEMORY", "Benchmark", "TooSlow", "as_counted", "kept_beside"]

OUT_OF_MEMORY = "out of memory"
"""How the reason begins why a candidate is lost that found too little memory."""

FAR, LOADING_MS = 4.0, 50.0
"""A first run this many times slower than the best, and by more than loading a module takes, ends a candidate."""
RECORDING_MS = 500.0
"""A first run that takes less is repeated before it ends a candidate: it may have recorded what others replay."""
FEW, FEW_MS = 32, 1.0
"""An unpredicted candidate is first run on one in ``FEW`` images, and may always take ``FEW_MS`` for them."""
WORTH_MS = 0.5
"""Milliseconds of the best below which there is no such first run: it would take as long as a very slow candidate."""
SHORT_MS = {"cuda": 1.0, "cpu": 0.0}
"""A first run up to so many ms is always repeated: the host may have been kept from launching it."""

Call = Callable[[], object]


class TooSlow(Exception):
    """A candidate was so slow when first run that it is not repeated."""

    def __init__(self, took_ms: float, best_ms: float, workspace: int, how: str = "when first run") -> None:
        super().__init__(f"took {took_ms:.0f} ms {how}, the best so far takes {best_ms:.3f}")
        self.took_ms, self.workspace = took_ms, workspace


def kept_beside(bound: execute.Bound) -> int:
    """Bytes of the problem's own device that a bound plan keeps for copies to others, which its calls do not show."""
    return bound.workspaces[bound.problem.device] - bound.workspace


def as_counted(plan: Plan, problem: Problem, times: Sequence[Took]) -> Sequence[Took]:
    """``times`` of ``plan`` as they count beside those of others.

    Where the CPU computes a share of a GPU's layer, the host's time is no time of launches: it is a part of what the
    devices compute, as on a CPU.
    """
    solver = solvers.get(plan.solver)
    if problem.device_type != "cuda" or not isinstance(solver, Split) or not solver.across:
        return times
    if "cpu" not in Shares.of(plan.config).places:
        return times
    return [Took(took.ms, 0.0) for took in times]


@dataclass(frozen=True)
class Benchmark:
    """Measures plans of ``problem`` on ``tensors``."""

    problem: Problem
    tensors: Tensors
    options: Options
    timer: Timer
    is_root: bool = True
    bias: torch.Tensor | None = None
    """The bias of a root problem that adds one."""
    watched: bool = True
    """Whether memory is watched that a solver should not take, beside what it declares and what torch hands out.

    Where nobody asks how much memory a candidate takes, that can wait until it is a finalist.
    """

    def measure(self, plan: Plan, best_ms: float, bind: Callable[[Plan], execute.Bound]) -> Measurement:
        """Bind a plan, run it once to see its memory, then time it. One that raises is lost, with the reason.

        A plan that takes much more than ``best_ms`` is not repeated. Raises :class:`OverLimit` for one that declares
        more workspace than the limit, and :class:`TooSlow` for one that was not even run whole, or only once.
        """
        pause()
        try:
            bound = bind(plan)  # which may compile: other processes do that, and it is no load on what is timed
            pause()
            begun = load.begin()
            times, workspace = self._run(plan, best_ms, bound)
            sample = sample_of(times, load.others_since(begun))
            return Measurement(
                plan.solver, plan.version, plan.config, sample.device_ms, workspace, host_ms=sample.host_ms,
                dispersion=sample.dispersion, runs=sample.runs, load=sample.load,
            )  # fmt: skip
        except (OverLimit, TooSlow):
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"{OUT_OF_MEMORY}: {first_line(error)}"
        except Exception as error:  # whatever a solver or its library does: the candidate is lost, planning goes on
            reason = f"raised {type(error).__name__}: {first_line(error)}"
        if reason.startswith(OUT_OF_MEMORY):
            gc.collect()
            if self.timer.device.type == "cuda":
                torch.cuda.empty_cache()
        return Measurement(plan.solver, plan.version, plan.config, reason=reason)

    def _run(self, plan: Plan, best_ms: float, bound: execute.Bound) -> tuple[Sequence[Took], int]:
        """The times of a bound plan's runs that count, and the bytes of its workspace."""
        check_declared(plan, self.problem, bound, self.options.workspace)
        solver = solvers.get(plan.solver)
        fresh = solver.own_output or (isinstance(solver, Split) and solver.across)  # which may pin its result
        new = fresh and self.is_root and not self.problem.accumulate
        call = self.tensors.call(bound, self.bias, new=new)
        new = new and not bound.pins  # pinned memory is not counted where a result's is
        if solver.unpredicted(self.problem, plan.config):
            self._run_on_few(plan, best_ms, bound.workspace)
        if self._keeps(plan):
            call()  # a filter is prepared once: that is neither the candidate's time nor its workspace
            pause()
        times: list[Took] = []
        timed = functools.partial(self._time_into, times, call)
        scratch = solver.baseline or solver.hidden_workspace(self.problem, plan.config) > 0
        exact = has_exact_memory(plan)
        workspace = self.peak(timed, bound.workspace, new, best_ms, scratch=scratch, exact=exact)
        first_ms = times[0].ms
        device = self.timer.device.type
        repeats, give_up = repeats_of(first_ms, device)
        if first_ms <= max(give_up * best_ms, SHORT_MS[device]):
            if self.shows_more(workspace, bound.workspace, exact=exact):
                # A first run also makes what a library keeps for good.
                workspace = self.peak(call, bound.workspace, new, exact=exact)
            calls = self._several(call, bound, times, new=new) if repeats else (call,)
            for _ in range(repeats):
                times.append(self.timer.time_each(calls, lead_ms(times[-1])))
                if min(took.device_ms for took in times) > LOSES[device] * best_ms:
                    break
        counting = as_counted(plan, self.problem, counted(times, device))
        workspace += kept_beside(bound)
        return [took.replayed() for took in counting] if self.options.cuda_graphs else counting, workspace

    def _several(self, call: Call, bound: execute.Bound, times: list[Took], *, new: bool) -> Sequence[Call]:
        """What is timed at once in place of ``call``: several calls on copies of the operands, where it is short.

        How short it is says a second run, which takes the place of the first one's time: that one waited for the host.
        """
        device = self.timer.device.type
        if launches_of(times[-1].device_ms, device) == 1 or bound.pins:
            return (call,)
        times[-1] = self.timer.time(call, lead_ms(times[-1]))
        return self._copies.calls(bound, self.bias, launches_of(times[-1].device_ms, device), new=new)

    @functools.cached_property
    def _copies(self) -> Copies:
        """Copies of all operands, of which no launch finds any in the second cache."""
        return Copies(self.problem, self.tensors)

    def _run_on_few(self, plan: Plan, best_ms: float, workspace: int) -> None:
        """Run a candidate on a few images first. Raises :class:`TooSlow` for one that would take far too long for all.

        The second run counts: the first loads modules.
        """
        p, count = self.problem, self.problem.batch_size // FEW
        if self.options.rigor == "patient" or not count or not WORTH_MS <= best_ms < float("inf"):
            return
        part = p.split("batch", (count, p.batch_size - count))[0]
        assert part.problem is not None
        few: Problem = part.problem.changed(accumulate=p.accumulate, out_dtype=p.out_dtype)
        views = [narrow(t, part.ranges(role)) for t, role in zip(self.tensors.all, p.roles, strict=True)]
        tensors = Tensors(tuple(views[: len(p.operands)]), tuple(views[len(p.operands) :]))
        try:
            call = tensors.call(execute.bind(replace(plan, problem=few.key), few, *tensors.all))
        except SolverUnavailable:
            return  # it takes the whole alone, which will tell
        pause()
        call()
        took_ms = self.timer.time(call).device_ms
        if took_ms > max(FAR * best_ms * count / p.batch_size, FEW_MS):
            whole_ms = took_ms * p.batch_size / count
            raise TooSlow(whole_ms, best_ms, workspace, f"by its rate on {count} of {p.batch_size} items of the batch")

    def _keeps(self, plan: Plan) -> bool:
        """Whether a first run on a CPU prepares a filter; on a GPU :meth:`_warm_up` is the first."""
        if self.timer.device.type != "cpu" or not self.problem.constant_operand:
            return False
        keeps_itself = plan.leaf and kept_bytes(solvers.get(plan.solver), self.problem, plan.config) > 0
        return keeps_itself or any(leaf.constant for leaf in plan.leaves())

    def _time_into(self, times: list[Took], call: Call) -> None:
        # The first run is also watched for memory, of which what clears a cache would take some.
        times.append(self.timer.time(call, lead_ms(times[-1]) if times else 0.0))

    def peak(
        self,
        call: Call,
        declared: int,
        new_result: bool,
        best_ms: float = float("inf"),
        *,
        scratch: bool = True,
        exact: bool = False,
    ) -> int:
        """Bytes one run takes at its peak beyond operands and result, what is declared included.

        ``new_result``: the call allocates the result; ``scratch``: it uses libraries' own workspaces; ``exact``: all
        it takes can be counted. Where nothing can tell and no limit asks: what is declared.
        """
        device = self.timer.device
        size = sum(t.numel() * t.element_size() for t in self.tensors.results) if new_result else 0
        if device.type == "cuda":
            self._warm_up(call, declared, best_ms)
            return peak_bytes(call, device, size, scratch)
        if declared:
            execute.touch_workspace(declared, device)
        if exact and not self.watched and countable():
            return declared + counted_bytes(call, size)
        if self.options.workspace is None and not peak_is_known(device):
            call()
            return declared
        return declared + peak_bytes(call, device, size, rough=not (exact and countable()))

    def shows_more(self, workspace: int, declared: int, *, exact: bool) -> bool:
        """Whether a first run on a CPU was seen to take more than is ``declared``.

        What may not show is counted too, and is looked at again only where memory is asked for.
        """
        unseen = 0 if self.watched or (exact and countable()) else NOISE
        return self.timer.device.type == "cpu" and workspace > declared + unseen

    def _warm_up(self, call: Call, declared: int, best_ms: float) -> None:
        """Load modules and make handles, which are no workspace; a candidate that is far too slow ends here."""
        most_ms = FAR * best_ms + LOADING_MS
        took = self._took_ms(call)
        if most_ms < took < RECORDING_MS:
            took = self._took_ms(call)
        if self.options.rigor != "patient" and took > most_ms:
            raise TooSlow(took, best_ms, declared)

    def _took_ms(self, call: Call) -> float:
        """Milliseconds until a call has ended on the device."""
        start = time.perf_counter()
        call()
        self.timer.synchronize()
        took = (time.perf_counter() - start) * 1e3
        pause()
        return took
