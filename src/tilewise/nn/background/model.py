"""The planning of one model's layers in the background, and the watch for its steps."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from tilewise.machine.device import torch_device
from tilewise.nn.background.later import LaterTable
from tilewise.nn.background.room import Room
from tilewise.nn.background.service import Job, service
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.layers.kinds import kind_of
from tilewise.nn.layers.swaps import copies_itself, swap, swap_back, swapped
from tilewise.planner import Progress
from tilewise.planner.search.estimate import estimate_ms
from tilewise.planner.search.foreseen import TYPICAL
from tilewise.problems.base import Problem
from tilewise.solvers import Cost

__all__ = ["Comparison", "LayersToPlan", "Modules", "begin", "cancel", "work_of"]


class Modules(Protocol):
    """The modules of a model that are planned."""

    @property
    def candidates(self) -> Mapping[str, nn.Module]:
        """Those that may be planned, by name."""
        ...

    def problems_of(self, name: str) -> list[Problem]:
        """The problems of one module."""
        ...

    def change_over(self, name: str) -> None:
        """Let one module run by its plans where they gain."""
        ...

    def leave(self, name: str, reason: str) -> None:
        """Let one module compute as torch does, for ``reason``."""
        ...

    def report(self) -> tuple[Any, ...]:
        """The report of every module."""
        ...


class Comparison(Protocol):
    """Compares the steps of the program by torch and by plans, once all is planned."""

    @property
    def over(self) -> bool:
        """Whether it is decided, so that steps are of no interest any more."""
        ...

    @property
    def report(self) -> Any:
        """What was decided, or how far it is."""
        ...

    def boundary(self, device: torch.device) -> None:
        """A step on ``device`` may be over."""
        ...

    def called(self, what: Hashable, *, with_gradients: bool) -> None:
        """The step under way has a call like this."""
        ...

    def disturb(self) -> None:
        """The step under way is not to count."""
        ...

    def rest(self) -> None:
        """Let plans run until the next step."""
        ...

    def stop(self, reason: str) -> None:
        """Let plans run, and compare no more."""
        ...

    def unseen(self, why: str) -> None:
        """Let plans run in steps that cannot be seen, for ``why``."""
        ...


class LayersToPlan:
    """The work of one model: its problems, those first of which a step spends the most time on all layers together.

    A layer changes over when the first of its passes has a plan that gains, and again with each further one. Where
    compiled code has the layers, it changes once, when all its problems are planned.
    ``names`` are the modules to plan, with the problems of ``modules``, under torch's ``deterministic`` flag as it was.
    At most ``share`` of the time is spent on it. ``progress`` hears of each problem, on the thread that plans. At last
    ``comparison``, where there is one, gets the steps of the program.
    """

    def __init__(
        self,
        table: LaterTable,
        modules: Modules,
        names: Iterable[str],
        deterministic: bool,
        share: float,
        progress: Progress | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.table, self.modules, self.share = table, modules, share
        self.deterministic, self.comparison = deterministic, comparison
        self.devices: set[torch.device] = set()
        self._progress = progress
        self._begun = 0
        problems = {name: modules.problems_of(name) for name in names}
        self._names = tuple(problems)
        users = Counter(problem for each in problems.values() for problem in dict.fromkeys(each))
        promise = {name: sum(users[p] * _typical_ms(p) for p in dict.fromkeys(problems[name])) for name in problems}
        self._waiting = {name: problems[name] for name in sorted(problems, key=lambda name: -promise[name])}
        """The modules of which something is still to be planned."""
        self._ran_by: dict[str, frozenset[Problem]] = {}
        """The problems by whose plans a module runs that has changed over in part."""
        for name in self._waiting:
            self.devices |= {torch_device(problem.device) for problem in self._waiting[name]}
            table.ask(self._waiting[name], deterministic)
        self._change_over()
        table.asked = _adding(self)

    @property
    def pending(self) -> int:
        """How many problems are still to be planned."""
        return self.table.pending

    @property
    def is_watching(self) -> bool:
        """Whether steps of the model are of interest: something is to be planned or compared."""
        return bool(self.table.pending) or not (self.comparison is None or self.comparison.over)

    def step_begins(self, inputs: object, *, training: bool) -> None:
        """A forward of the model begins with these ``inputs``: a step may be over."""
        service().boundary()
        if self.comparison is not None and not self.comparison.over:
            on_gpu = (device for device in self.devices if device.type == "cuda")
            self.comparison.boundary(next(on_gpu, torch.device("cpu")))
            shapes = tuple((t.shape, t.dtype, t.device) for t in tensors_in(inputs))
            self.comparison.called((shapes, training), with_gradients=torch.is_grad_enabled())

    def report(self) -> tuple[Any, ...]:
        """The report of every module as it is now, with torch's times where they are known by now."""
        self.table.torch_times(problem for name in self._names for problem in self.modules.problems_of(name))
        return self.modules.report()

    def next(self, room: Room | None) -> Job | None:
        """What plans the next problem; ``None`` where there is none, or none fits into ``room``.

        It does not hold this object, and so not the model either.
        """
        entry = self.table.next(room)
        if entry is None:
            self._change_over()  # a layer whose last problem was put off too often
            return self.table.wait if self.table.is_waiting else None
        table, device, planned = self.table, self._device_of(entry[0]), weakref.WeakMethod(self._planned)
        self._tell(entry[0].key)

        def job() -> None:
            """Plan it on its device, and let layers change over for which it was the last."""
            with device:
                done = planned() if table.advance(*entry) else None
                if done is not None:
                    done()

        return job

    def _planned(self) -> None:
        """One more problem is planned."""
        self._begun += 1
        self._change_over()
        if not self.pending:
            self._tell("")

    def _tell(self, text: str) -> None:
        """Tell the program's progress; one that raises is told no more."""
        if self._progress is None:
            return
        try:
            self._progress(self._begun, self._begun + self.pending, text)
        except Exception as error:
            self._progress = None
            warnings.warn(
                f"tilewise: progress raised {type(error).__name__}: {error}; it is told no more", stacklevel=2
            )

    def _change_over(self) -> None:
        """Let modules run by the plans that there are."""
        for name, problems in list(self._waiting.items()):
            missing = self.table.missing(problems, self.deterministic)
            if missing and not self._has_more(name, frozenset(problems).difference(missing)):
                continue
            if not missing:
                del self._waiting[name]
            self.table.partly.update(missing)
            try:
                self.modules.change_over(name)
            except Exception as error:  # nobody waits who could be told otherwise
                self._waiting.pop(name, None)
                self.modules.leave(name, f"changing over raised {type(error).__name__}: {error}")

    def _has_more(self, name: str, decided: frozenset[Problem]) -> bool:
        """Whether plans gain for more of a module's problems than it runs by. Those are noted."""
        if self.table.published:
            return False  # compiled code would be compiled anew each time
        by_plan = frozenset(p for p in decided if self.table.replacement(p, self.deterministic))
        if by_plan == self._ran_by.get(name, frozenset()):
            return False
        self._ran_by[name] = by_plan
        return True

    def _device_of(self, problem: Problem) -> AbstractContextManager[Any]:
        """A context in which the GPU of ``problem`` is the current one."""
        devices = [device for device in self.devices if device.type == "cuda"]
        if problem.device_type != "cuda" or not devices:
            return nullcontext()
        return torch.cuda.device(devices[0])


def _typical_ms(problem: Problem) -> float:
    """Milliseconds that a problem takes where its arithmetic or its bytes decide, on a typical machine."""
    return estimate_ms(problem, Cost(problem.flops, problem.bytes), TYPICAL[problem.device_type])


def _adding(work: LayersToPlan) -> Callable[[], None]:
    """A function that has ``work`` done, which it does not keep alive: for shapes that come later."""
    ref = weakref.ref(work)

    def add() -> None:
        alive = ref()
        if alive is not None and work_is_known(alive):
            service().add(alive)

    return add


_works: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LayersToPlan]] = weakref.WeakKeyDictionary()
"""The work of each model. The model itself keeps it, by the function that watches its steps."""
_unwatched: dict[int, tuple[weakref.ref[nn.Module], LayersToPlan]] = {}
"""Works of models whose steps cannot be seen, kept while the model lives."""
_within = threading.local()
COMPILED = "torch.compile traced the model; optimize(compiled, example, wait=True) compares compiled steps"
"""Why steps are not seen where Dynamo runs the model: what it made of the forward tells nobody when it runs."""
WATCH = "_tilewise_watch"
"""The mark of a function that watches the steps of a model."""


def work_is_known(work: LayersToPlan) -> bool:
    """Whether a model still has this work."""
    return any(ref() is work for ref in _works.values())


def begin(model: nn.Module, work: LayersToPlan) -> None:
    """Plan ``work`` in the background from the next step of ``model`` on."""
    _works[model] = weakref.ref(work)
    unseen = _why_unseen(model)
    if unseen:
        if work.comparison is not None:
            work.comparison.stop(f"its steps are not seen: {unseen}")
        key = id(model)
        forget = functools.partial(_unwatched.pop, key, None)  # at the program's end a model may outlive module's names
        _unwatched[key] = weakref.ref(model, lambda _: forget()), work
    else:
        swap(model, _watching(work, weakref.ref(model)))
    service().add(work)


def cancel(model: nn.Module) -> None:
    """Plan nothing more for ``model``; layers that changed over stay as they are."""
    ref = _works.pop(model, None)
    work = None if ref is None else ref()
    _unwatched.pop(id(model), None)
    if work is not None:
        service().remove(work)
        if work.comparison is not None:
            work.comparison.stop("planning was begun anew or undone")
    if hasattr(swapped(model), WATCH):
        swap_back(model)


def work_of(model: nn.Module) -> LayersToPlan | None:
    """The work of ``model``, done or not; ``None`` where there is none."""
    ref = _works.get(model)
    return None if ref is None else ref()


def _why_unseen(model: nn.Module) -> str:
    """Why the forward of ``model`` cannot be watched; empty where it can."""
    if kind_of(model) is not None:
        return "it is a layer itself, whose computation is swapped"
    if "forward" in model.__dict__:
        return "a forward is set on the instance"
    return copies_itself(model)


def _watching(work: LayersToPlan, model: weakref.ref[nn.Module]) -> Callable[..., Any]:
    """The ``forward`` of ``model`` as its class has it, at whose beginning a step may be over.

    It holds ``work`` for the model. Only the outermost of watched forwards counts, on the main thread or the one that
    called :func:`begin`: others may run parts of a step. In a copy of the model it only lends turns.
    """
    program = {threading.get_ident(), threading.main_thread().ident}

    def note_compiled() -> bool:
        """Called once for each trace, and no part of it."""
        if work.comparison is not None:
            work.comparison.unseen(COMPILED)
        return True

    note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            note_compiled()
            return type(self).forward(self, *args, **kwargs)
        if not work.is_watching or getattr(_within, "watched", False) or threading.get_ident() not in program:
            return type(self).forward(self, *args, **kwargs)
        module: nn.Module = self
        if module is model():
            work.step_begins((args, kwargs), training=module.training)
        else:
            service().boundary()
        _within.watched = True
        try:
            outputs = type(self).forward(self, *args, **kwargs)
        except BaseException:
            if work.comparison is not None:
                work.comparison.disturb()
            raise
        finally:
            _within.watched = False
        service().graphs.add(outputs)
        return outputs

    forward.__name__ = "forward"
    setattr(forward, WATCH, True)
    return forward
