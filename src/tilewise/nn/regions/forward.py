"""The forward of a module that is planned as a region: which calls run its program, and what becomes of the others.

A call runs by program where autograd, autocast and everything that watches torch's operators are off, where its tensors
lie as in a call that was planned, and where the module is as it was: no attribute, parameter, part or hook has changed.
Otherwise the module computes as its class does, and its layers by their own plans where they have some. Several threads
may call one module, since a call shares nothing with another but constants.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.comm.agreement import several_ranks
from tilewise.kernels.native.programs import usual_call
from tilewise.machine.device import is_capturing
from tilewise.machine.recent import Recent
from tilewise.nn.graphs.inputs import Inputs
from tilewise.nn.graphs.modes import entered, modes, undisturbed, watched
from tilewise.nn.graphs.obstacles import REGION
from tilewise.nn.graphs.standing import Standing
from tilewise.nn.layers.call import is_plain
from tilewise.nn.layers.swaps import swap, swapped
from tilewise.nn.programs.program import where_expected
from tilewise.nn.regions.compiled.operator import Known
from tilewise.nn.regions.compiled.traced import Compilations, trace
from tilewise.nn.regions.region import Planning
from tilewise.nn.regions.trace import Traced, Untraceable, obstacle

__all__ = ["MOST_PROGRAMS", "Ready", "Regional", "regional_of", "run_by_programs"]

MOST_PROGRAMS = 16
"""Programs of one module that are kept, at the most: the half that was used last is always among them."""
MOST_ON_SIGHT = 32
"""Kinds of calls of one module that are planned when they come, at the most."""
MOST_REASONS = 16
"""Different reasons that are counted."""


class Ready:
    """A program that computes a module for calls of one kind, while the module stands as it does now."""

    def __init__(self, module: nn.Module, traced: Traced, planning: Planning, code: str, inputs: Inputs) -> None:
        self.traced, self.planning, self.code = traced, planning, code
        self.shape, self.modes = inputs.shape, modes(inputs.tensors[0].device.type)
        self.standing = Standing(module)
        self._single = traced.leaves == ((True, 0),) and traced.structure.is_leaf()

    def standing_now(self, module: nn.Module) -> Ready:
        """Itself, for the module as it is now."""
        self.standing = Standing(module)
        return self

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns for these tensors."""
        planning = self.planning
        planning.constants.refresh()
        found = planning.program(*where_expected(tensors))
        if self._single:
            return found
        return self.traced.returned(found if isinstance(found, tuple) else (found,))


PlanCall = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Ready]
"""Plans a module for one call; raises :class:`Untraceable` with the reason where it is to compute as its class does."""
Retrace = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], tuple[Traced, str]]
"""Traces a module for one call, and gives the trace with the text of its rewritten code."""


class Regional:
    """The programs of one module, and of what became of its calls.

    ``plan_call`` plans a call of a kind that was not seen before, where ``on_sight`` allows it, for tensors on
    ``device``. ``expected`` are the kinds that are planned at their first call in any case: those of the module that
    this one is a copy of. ``note`` is told what was faster where the module is compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        plan_call: PlanCall,
        retrace: Retrace,
        device: torch.device,
        *,
        on_sight: bool,
        note: Callable[[dict[str, Any]], object],
        expected: frozenset[tuple[Any, ...]] = frozenset(),
    ) -> None:
        self._module, self._device = weakref.ref(module), device
        self._plan_call, self._retrace, self._on_sight = plan_call, retrace, on_sight
        self._expected, self._note = expected, note
        self._ready: Recent[tuple[Any, ...], Ready] = Recent(2 * MOST_PROGRAMS)
        self._refused: Recent[tuple[Any, ...], str] = Recent(2 * MOST_ON_SIGHT)
        self._last: Ready | None = None
        self._usual: tuple[Any, Ready] | None = None
        """What tells that a call is like the last one that ran by a program, and that program."""
        self._lock = threading.RLock()
        self._seen = 0
        self.without: Counter[str] = Counter()
        self.compilations = Compilations(module, self, note)
        self.resting = False
        """Whether all calls run without programs for now."""

    @property
    def kinds(self) -> frozenset[tuple[Any, ...]]:
        """The kinds of calls that have a program or are to get one."""
        return self._expected | frozenset(self._ready)

    def is_of(self, module: nn.Module) -> bool:
        """Whether these are the programs of ``module``, and not of one that it is a copy of."""
        return self._module() is module

    @property
    def on_cpu(self) -> bool:
        """Whether its programs run on a CPU."""
        return self._device.type == "cpu"

    @property
    def standing(self) -> list[Ready]:
        """The programs that would run now: the module and torch's flags are as they were."""
        state = modes(self._device.type)
        with self._lock:
            return [each for each in self._ready.values() if each.modes == state and not each.standing.difference()]

    def add(self, ready: Ready) -> None:
        """Take a program that was planned ahead."""
        self._ready[ready.shape, ready.modes] = ready
        self._last = ready

    def copied(self, module: nn.Module) -> Regional:
        """The same for a copy of the module: its programs are made when it is called first."""
        return Regional(
            module, self._plan_call, self._retrace, self._device,
            on_sight=self._on_sight, note=self._note, expected=self.kinds,
        )  # fmt: skip

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns: by a program where there is one, else as its class computes."""
        if torch.is_grad_enabled() or self.resting:
            return type(module).forward(module, *args, **kwargs)
        usual = self._usual
        if usual is not None and not kwargs and usual[0].fits(args) and not entered() and usual[1].standing.holds():
            return usual[1](args)
        reason = watched() or ("called under autocast" if torch._C._is_any_autocast_enabled() else "")
        if not reason:
            inputs = Inputs.of(args, kwargs)
            found = self._fitting(module, inputs, args, kwargs)
            if isinstance(found, Ready):
                if not kwargs and args is inputs.tensors:
                    told = usual_call(*undisturbed(found.modes), args)
                    self._usual = None if told is None else (told, found)
                return found(inputs.tensors)
            reason = found
        if reason in self.without or len(self.without) < MOST_REASONS:
            self.without[reason] += 1
        return type(module).forward(module, *args, **kwargs)

    def _fitting(
        self, module: nn.Module, inputs: Inputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Ready | str:
        """The program for a call, or why there is none."""
        last = self._last
        state = modes(self._device.type)
        if last is not None and last.shape == inputs.shape and last.modes == state and last.standing.holds():
            return last
        if inputs.obstacle:
            return inputs.obstacle
        if not all(is_plain(t) and t.device == self._device for t in inputs.tensors):
            where = "the CPU" if self._device.type == "cpu" else self._device
            return f"called with tensors that are not plain tensors on {where}"
        if is_capturing(self._device):
            return "called while a CUDA graph is captured, in which nothing is planned"
        with self._lock:
            key = inputs.shape, state
            found = self._ready.get(key)
            if found is not None:
                reason = found.standing.difference()
                if not reason or self._renewed(module, found, args, kwargs):
                    self._last = found
                    return found
                del self._ready[key]
                self._expected |= {key}  # planned anew where the module can be a region again
                self._last = None
                return f"{reason}, so that it computes otherwise than planned"
            return self._planned(module, key, inputs, args, kwargs)

    def _renewed(self, module: nn.Module, ready: Ready, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take the module's new parameters into a program, where it computes the same with them as before."""
        try:
            traced, code = self._retrace(module, args, kwargs)
        except Untraceable:
            return False
        alike = code == ready.code and all(
            (new.shape, new.dtype) == (old.shape, old.dtype) and new.device == old.device
            for new, old in zip(traced.sources.values(), ready.traced.sources.values(), strict=True)
        )
        if alike:
            ready.planning.constants.renew(traced.sources)
            ready.standing = Standing(module)
        return alike

    def _planned(
        self,
        module: nn.Module,
        key: tuple[Any, ...],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Ready | str:
        """A program for a kind of call that has none, or why there is none."""
        refused = self._refused.get(key)
        if refused is not None:
            return refused
        passing = obstacle(module)
        if passing:  # a mode or a hook, which may go again: not kept as a refusal
            return passing
        expected = key in self._expected
        reason = ""
        if not expected and not self._on_sight:
            reason = f"called with {inputs.in_words()}, for which it was not planned"
        elif not expected and several_ranks():
            reason = "one rank of several does not plan by itself"
        elif self._seen >= MOST_ON_SIGHT:
            reason = f"called in more than {MOST_ON_SIGHT} ways"
        else:
            self._seen += 1
            try:
                ready = self._plan_call(module, args, kwargs)
            except Untraceable as error:
                reason = str(error)
            else:
                if ready.shape == inputs.shape:
                    self.add(ready)
                    return ready
                reason = "could not be planned"
        self._refused[key] = reason
        return reason


_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have programs. A module holds its own, by its forward: with a program lives all that it reads."""


def regional_of(module: nn.Module) -> Regional | None:
    """The programs by which a module runs; ``None`` where it does not."""
    regional = getattr(swapped(module), REGION, None)
    return regional if isinstance(regional, Regional) and regional.is_of(module) else None


def run_by_programs(module: nn.Module, regional: Regional) -> None:
    """Let ``module`` run by the programs of ``regional`` where a call fits. Copies of it get programs of their own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return trace(self, args, kwargs, _kinds_of)
        if regional.is_of(self):
            return regional(self, args, kwargs)
        run_by_programs(self, regional.copied(self))
        return self.forward(*args, **kwargs)

    setattr(forward, REGION, regional)
    _modules.add(module)
    swap(module, forward)


def _kinds_of(number: int) -> tuple[Known, ...]:
    """The kinds of calls of the module with this ``id`` that the graph being traced may hold as operators."""
    for module in list(_modules):
        regional = regional_of(module)
        if id(module) == number and regional is not None and regional.on_cpu:
            return regional.compilations.known(regional.standing)
    return ()


# What ``torch.compiler.assume_constant_result`` sets: calling that would import Dynamo here, which takes seconds.
_kinds_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
