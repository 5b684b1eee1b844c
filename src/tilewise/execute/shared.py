"""Shares of a batch that several devices compute at once, each by plans of its own (the split ``devices``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.execute.lanes import Bind, Lane
from tilewise.execute.node import Node, Results, flat_call
from tilewise.execute.places import Place, carved_places
from tilewise.machine.device import is_capturing, torch_device
from tilewise.machine.places import HERE, place_on_this_machine
from tilewise.machine.threads import side_by_side
from tilewise.plan import Config, Plan
from tilewise.problems.base import Part, Problem, Range, Tensors, Write, narrow
from tilewise.solvers.common.shares import Shares

__all__ = ["Shared"]

Ranges = tuple[tuple[Range, ...], ...]
"""The ranges that a part uses of each of several tensors."""


class Shared(Node):
    """The parts of a batch on several devices at once. Results are on the device of the operands when it returns.

    On a GPU they are so in the order of its current stream, as after any operator. Terms of a sum are added in the
    order of the devices, so that the sum has the same bits every time. Where data lie on the host, each device has
    threads of the host for itself; where they lie on a GPU, the caller launches what GPUs do and then computes what the
    CPU does.
    """

    __slots__ = (
        "_direct",
        "_home",
        "_home_ranges",
        "_lanes",
        "_own",
        "_places",
        "_problem",
        "_shares",
        "_terms",
        "pins",
    )

    def __init__(
        self,
        problem: Problem,
        config: Config,
        parts: Sequence[Part[Any]],
        plans: Sequence[Plan],
        operands: Tensors,
        results: Tensors,
        bind: Bind,
    ) -> None:
        self._problem, self._shares = problem, Shares.of(config)
        self._home = operands[0].device
        if self._home.type == "meta":
            self._home = torch_device(problem.device)
        sums = any(part.write is not Write.SET for part in parts)
        self.adds, self.adds_residual, self.constant = problem.bias and not sums, False, -1
        self._places = [Place(problem, role, torch.float32) for role in problem.results] if sums else []
        self._direct = HERE in self._shares.places and (not sums or problem.out_dtype == "fp32")
        self._own: Node | None = None
        self._home_ranges: tuple[Ranges, Ranges] = ((), ())
        self._lanes: list[Lane] = []
        pairs, start = list(zip(parts, plans, strict=True)), 0
        for place, sizes in zip(self._shares.places, self._shares.parts, strict=True):
            of_place, start = pairs[start : start + len(sizes)], start + len(sizes)
            if place == HERE:
                self._bind_own(*of_place[0], operands, results, bind)
            else:
                there = place_on_this_machine(place)
                add = problem.accumulate and not sums
                self._lanes.append(Lane(self._home, there, of_place, bind, bias=self.adds, add=add))
        apart = HERE in self._shares.places and not self._direct
        count = len(self._lanes) + apart if sums else 0
        size = sum(place.size for place in self._places)
        self._terms = [size * index for index in range(count)]
        """Bytes of the workspace where each term of the sum begins that is not computed in the result itself."""
        own: Node | None = self._own
        self.workspace = size * count + (0 if own is None else own.workspace)
        self.elsewhere = self._bytes_elsewhere()
        self.pins = self._home.type == "cpu" and any(lane.there.type == "cuda" for lane in self._lanes) and not sums

    def _bind_own(self, part: Part[Any], plan: Plan, operands: Tensors, results: Tensors, bind: Bind) -> None:
        """Bind the part that is computed where the data lie."""
        problem = self._problem
        child: Any = part.problem
        child = child.changed(accumulate=problem.accumulate and self._direct)
        if self.adds:
            child = child.changed(bias=True)
        if not self._direct:
            results = tuple(place.described() for place in self._places)
        written = tuple(part.ranges(role) if self._direct else () for role in problem.results)
        used = tuple(part.ranges(role) for role in problem.operands)
        self._home_ranges = used, written
        inputs, outputs = _narrowed(operands, used), _narrowed(results, written)
        self._own = bind(plan, child, inputs, outputs)

    def _bytes_elsewhere(self) -> dict[str, int]:
        """Bytes by device, as torch writes it: ``cuda:1``. Pinned buffers are memory of the CPU."""
        found: dict[str, int] = {}
        for lane in self._lanes:
            for device, size in ((str(lane.there), lane.bytes_there), ("cpu", lane.bytes_pinned)):
                if size:
                    found[device] = found.get(device, 0) + size
        return found

    def shortest(self) -> Any:
        """The run as a flat call."""
        return flat_call(self, self._problem)

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *bias: Tensor) -> Tensors:
        """Compute all shares at the same time. Raises ``RuntimeError`` while a CUDA graph is being captured."""
        self._check(operands[0].device)
        outs = tuple(result for result in results if result is not None)
        terms = [carved_places(self._places, _after(workspace, start))[0] for start in self._terms]
        rest = _after(workspace, sum(place.size for place in self._places) * len(terms))
        others = list(terms)
        jobs: list[Callable[[], object]] = []
        lanes = iter(self._lanes)
        for place in self._shares.places:
            if place == HERE:
                target = outs if self._direct else others.pop(0)
                jobs.append(functools.partial(self._run_own, operands, target, rest, *bias))
            else:
                target = others.pop(0) if terms else outs
                jobs.append(functools.partial(next(lanes).run, operands, target, *bias))
        self._run_all(jobs)
        if not terms:
            return outs
        totals = outs if self._direct else terms.pop(0)
        for term in terms:
            for total, value in zip(totals, term, strict=True):
                total.add_(value)
        if totals is not outs:
            for out, total in zip(outs, totals, strict=True):
                out.add_(total) if self._problem.accumulate else out.copy_(total)
        return outs

    def _run_own(self, operands: Tensors, results: Tensors, workspace: Tensor | None, *bias: Tensor) -> None:
        """Compute the share of the device where the data lie."""
        assert self._own is not None
        used, written = self._home_ranges
        inputs, outputs, constant = _narrowed(operands, used), _narrowed(results, written), self._own.constant
        if constant >= 0:
            taken = self._own.taken(inputs[constant], workspace)
            inputs = (*inputs[:constant], taken, *inputs[constant + 1 :])
        self._own.run(inputs, outputs, workspace, *bias)

    def _run_all(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run a job for each device at once."""
        if self._home.type == "cpu":
            side_by_side(jobs, self._shares.threads("cpu", torch.get_num_threads()))
            return
        # Other GPUs have the longest way to their data. What the CPU computes holds the caller, so it comes last.
        order = {"cuda": 0, HERE: 1, "cpu": 2}
        pairs = zip(self._shares.places, jobs, strict=True)
        for _, job in sorted(pairs, key=lambda pair: order[pair[0].partition(":")[0]]):
            job()

    def _check(self, here: torch.device) -> None:
        """Raise while a CUDA graph is being captured."""
        if any(is_capturing(lane.there) for lane in self._lanes) or is_capturing(here):
            raise RuntimeError(
                "a CUDA graph is being captured, and a plan that shares a batch among devices waits for the host: "
                "share_with=() would do for layers that are captured"
            )


def _narrowed(tensors: Tensors, ranges: Sequence[tuple[Range, ...]]) -> Tensors:
    """Views of what ``ranges`` name of each tensor."""
    return tuple(narrow(t, each) for t, each in zip(tensors, ranges, strict=True))


def _after(workspace: Tensor | None, start: int) -> Tensor | None:
    """The workspace from byte ``start`` on."""
    return None if workspace is None else workspace[start:]
