"""A model's convolutions computed one pass at a time, with what is alive before each noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tilewise import solvers
from tilewise.execute import PlanMismatch
from tilewise.nn.book import Book
from tilewise.nn.geometry import Geometry, Weights
from tilewise.nn.layer import Layer
from tilewise.nn.meter import Meter, Trace
from tilewise.nn.modules import planned_forward
from tilewise.nn.runner import BoundPass
from tilewise.nn.swaps import standing_attributes, swap
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problem import ConvProblem, Pass
from tilewise.torch_state import undisturbed

__all__ = ["Kernel", "Moment", "Watch", "saved_swaps", "swaps_kept"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One pass of a module's call. ``deterministic`` is torch's flag in it; ``declared`` the workspace it asks for."""

    layer: str
    problem: ConvProblem
    deterministic: bool
    declared: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A kernel's run: bytes ``alive`` just before, of its ``result``, and ``beside`` it what may have been made first.

    ``most``: bytes at the most while it ran.
    """

    kernel: Kernel
    alive: int
    result: int
    beside: int
    most: int


class Watch:
    """Runs convolutions under the eyes of ``meter``: by the plans of ``books`` where those replace torch's choice.

    ``books`` are by module name; a module without one is computed by torch.
    """

    def __init__(self, meter: Meter, books: Mapping[str, Book]) -> None:
        self._meter, self._books = meter, books
        self._ran: list[Kernel] = []
        self._on = False

    @contextmanager
    def over(self, modules: Mapping[str, nn.Module], weights: Weights) -> Iterator[None]:
        """Every module of ``modules`` is watched meanwhile."""
        with swaps_kept(modules.values()):
            for name, module in modules.items():
                swap(module, planned_forward(module, self._layers(name, weights)))
            yield

    def _layers(self, name: str, weights: Weights) -> Callable[[Geometry], Layer]:
        found: dict[Geometry, Layer] = {}
        book = WatchedBook(name, self._books.get(name), self)

        def layers(geometry: Geometry) -> Layer:
            return found.setdefault(geometry, Layer(geometry, book, weights=weights))

        return layers

    def traced(self, step: Callable[[], object]) -> tuple[Trace, list[Moment], int]:
        """Run ``step`` to bind what it calls, to warm up, and once more.

        Returns the trace of the last run (its peak is over the one before, too), the kernels in it, and the most bytes
        outside all of them.
        """

        def noted() -> None:
            self._ran, self._on = [], True
            step()

        step()  # torch's choice, bound, may hold a stand-in for an operand: it is not there when torch runs by itself
        try:
            trace = self._meter.traced(step, noted)
        finally:
            self._on = False
        return trace, self._moments(trace), max(trace.most[::2])

    def _moments(self, trace: Trace) -> list[Moment]:
        """Each kernel has a mark before it and one after."""
        made = []
        for index, kernel in enumerate(self._ran):
            p = kernel.problem
            beside = p.nbytes("w") if p.pass_ is Pass.DGRAD else 0
            made.append(Moment(kernel, trace.alive[2 * index], p.nbytes(p.result), beside, trace.most[2 * index + 1]))
        return made

    def run(self, kernel: Kernel, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``call()``, noted where a step is."""
        if not self._on:
            return call()
        self._ran.append(kernel)
        self._meter.mark()
        try:
            return call()
        finally:
            self._meter.mark()


class WatchedBook(Book):
    """A book whose passes are watched: those of ``book`` where a plan is to run, torch's choice elsewhere."""

    traced = False

    def __init__(self, name: str, book: Book | None, watch: Watch) -> None:
        super().__init__(Options() if book is None else book.options, "torch")
        self._name, self._book, self._watch = name, book, watch

    def ready(self, problems: Iterable[ConvProblem], deterministic: bool, device: torch.device) -> bool:
        """Bind the plans there are; nothing is planned."""
        if self._book is not None:
            known = [p for p in problems if self._book.replacement(p, deterministic)]
            return self._book.ready(known, deterministic, device)
        return True

    def bound(self, problem: ConvProblem, deterministic: bool, device: torch.device) -> BoundPass | None:
        """What runs ``problem`` and is watched; ``None`` where torch must do it in its own way."""
        inner = None if self._book is None else self._book.bound(problem, deterministic, device)
        declared = 0 if inner is None else inner.bound.workspace
        if inner is None:
            baseline = solvers.baseline()
            try:
                with undisturbed():
                    own = Plan(problem.key, baseline.name, baseline.version, Config())
                    inner = BoundPass(own, problem, device)
            except PlanMismatch:
                return None
        return WatchedPass(inner, Kernel(self._name, problem, deterministic, declared), self._watch)


class WatchedPass(BoundPass):
    """A bound pass that tells a watch of its runs."""

    __slots__ = ("_inner", "_kernel", "_watch")

    def __init__(self, inner: BoundPass, kernel: Kernel, watch: Watch) -> None:
        self.plan, self.problem = inner.plan, inner.problem
        self.first, self.second = inner.first, inner.second
        self._inner, self._kernel, self._watch = inner, kernel, watch
        self.bound = self._run  # type: ignore[assignment]

    def _run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._watch.run(self._kernel, lambda: self._inner.bound(a, b, bias))


def saved_swaps(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """What has the modules compute as they do now, planned or not, whenever it is called."""
    saved = [(module, standing_attributes(module)) for module in modules]

    def put_back() -> None:
        for module, own in saved:
            for name in standing_attributes(module):
                del module.__dict__[name]
            module.__dict__.update(own)

    return put_back


@contextmanager
def swaps_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The modules compute as they did before when it ends."""
    put_back = saved_swaps(modules)
    try:
        yield
    finally:
        put_back()
