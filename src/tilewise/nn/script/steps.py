"""The steps of a program that stays as it is, as its calls show them: where one may begin, and how its passes run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import torch

from tilewise.nn.background.service import service
from tilewise.nn.script.recorder import Recorder
from tilewise.nn.step.live import LiveGoal
from tilewise.nn.step.search import Key

__all__ = ["Calls", "Steps"]

MOST_BETWEEN = 4096
"""Calls without the one by which steps are told before another one takes its place."""


class Calls:
    """The recorded calls of a session, whose passes may run by plan or by torch.

    ``forget()`` lets every layer look its plans up anew. While :attr:`by_torch`, all calls are torch's.
    """

    def __init__(self, table: Recorder, forget: Callable[[], object]) -> None:
        self._table, self._forget = table, forget
        self.by_torch = False

    def gains(self) -> dict[Key, float]:
        """As :meth:`Swappable.gains`: a call counts once for every weight that it was seen with."""
        gains: dict[Key, float] = {}
        calls = dict(self._table.calls)
        times = self._table.torch_times(problem for noted in calls for problem in noted.problems)
        for noted, count in calls.items():
            for problem in noted.problems:
                plan = self._table.replacement(problem, noted.deterministic)
                if plan is not None:
                    gain = count * (times.get(problem, float("nan")) - plan.time_ms)
                    key = problem, noted.deterministic
                    gains[key] = gains.get(key, 0.0) + gain
        return gains

    def withhold(self, keys: Collection[Key], note: str) -> None:
        """As :meth:`Swappable.withhold`."""
        self._table.withhold(keys, note)
        self._forget()

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """As :meth:`Swappable.switches`. No layer is looked up anew: the call itself is led to torch or not."""

        def by_torch() -> None:
            """Leave every call to torch."""
            self.by_torch = True

        def by_plans() -> None:
            """Let every call run by its plan."""
            self.by_torch = False

        return by_torch, by_plans


class Steps:
    """Tells from the calls of a program where its steps begin: for planning, which takes turns there, and ``goal``.

    Only the main thread and the one that this is made on have steps.
    """

    def __init__(self, goal: LiveGoal) -> None:
        self._goal = goal
        self._threads = {threading.get_ident(), threading.main_thread().ident}
        self._first: int | None = None
        self._since = 0

    def called(self, function: str, x: torch.Tensor, weight: torch.Tensor | None) -> None:
        """One of torch's functions is called, and a step may begin with it if it has a weight.

        With gradients planning takes its turn at every call outside of any graph, else at one of the weight that was
        seen first. Steps that are compared begin with that weight always: where the first layers are frozen, each of
        their calls is outside of any graph.
        """
        if weight is None or threading.get_ident() not in self._threads or not isinstance(x, torch.Tensor):
            return
        with torch._C.DisableTorchFunction():  # nobody is to see that attributes are read
            grad = torch.is_grad_enabled()
            outside = not grad or x.grad_fn is None
            needs = grad and (x.requires_grad or weight.requires_grad)
            shapes, device = (x.shape, weight.shape), x.device
        self._since += 1
        if outside and (self._first is None or self._since > MOST_BETWEEN):
            self._first = id(weight)
        first = outside and id(weight) == self._first
        if first:
            self._since = 0
        if first or (grad and outside):
            service().boundary()
        if first:
            self._goal.boundary(device)
        if not self._goal.over:
            self._goal.called((function, shapes), with_gradients=needs)
