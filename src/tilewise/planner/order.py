"""The order in which problems are planned, so that kernels are compiled while others are measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from tilewise import execute
from tilewise.kernels.building.target import architecture_of
from tilewise.kernels.building.upcoming import Upcoming, upcoming
from tilewise.machine.device import torch_device
from tilewise.machine.turns import in_turns
from tilewise.plan import Plan
from tilewise.planner.options import Options
from tilewise.problems.base import Problem
from tilewise.solvers.common.triton_run import has_triton

__all__ = ["in_order", "ready_first"]

P = TypeVar("P", bound=Problem)
Begin = Callable[[Problem], Iterable[tuple[Problem, Plan]]]
SEVERAL = 2
"""From so many problems on kernels of one are compiled while another is measured."""

ROUNDS = 4
"""Most times that kernels are compiled for a problem before it is planned with what is there, and what it then lacks.
"""


def in_order(
    problems: Sequence[P], options: Options, is_known: Callable[[P], bool], begin: Begin
) -> Generator[P, None, None]:
    """``problems`` in the order in which they are planned: as they are given, where nothing is compiled for them.

    For those of a GPU of which no plan ``is_known``, worker processes compile kernels while others are measured:
    see :func:`ready_first`.
    """
    device = next((p.device for p in problems if p.device_type == "cuda"), None)
    if device is None or options.rigor != "measure" or len(problems) < SEVERAL or in_turns() or not has_triton():
        yield from problems
        return
    unknown = [p for p in problems if p.device == device and not is_known(p)]
    yield from (p for p in problems if p not in unknown)
    if len(unknown) < SEVERAL:
        yield from unknown
        return
    with upcoming(architecture_of(torch_device(device))) as kernels:
        yield from unknown if kernels is None else ready_first(unknown, begin, kernels)


def ready_first(problems: Sequence[P], begin: Begin, kernels: Upcoming) -> Generator[P, None, None]:
    """``problems``, each when its kernels are compiled, while those of the problems after it are.

    ``begin(problem)`` measures that whose kernels are there, and returns leaves that are to be measured as well. It is
    called again when these are compiled, until it returns none. Problems are begun in their order, as long as workers
    have too little to do; the first whose kernels are there comes first.
    """
    waiting, begun = list(problems), dict[P, int]()
    while waiting or begun:
        ready = next((problem for problem in begun if kernels.is_ready(problem.key)), None)
        if waiting and (ready is None or not kernels.has_enough):
            ready = waiting.pop(0)
        elif ready is None:
            kernels.wait()
            continue
        rounds = begun.pop(ready, 0)
        leaves = list(begin(ready)) if rounds < ROUNDS else []
        if leaves:
            begun[ready] = rounds + 1
            kernels.add(ready.key, [functools.partial(execute.compile_only, plan, part) for part, plan in leaves])
        else:
            yield ready
