"""Inputs that a model meets after it was planned: what is said while they are planned, and what reports know of them.

An input of another size than the examples' (the last batch of an epoch, a validation batch) gives every layer a problem
of its own. Each is planned when its layer is called, while the program waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from tilewise.machine.recent import Recent
from tilewise.nn.notices.channel import say
from tilewise.nn.progress import Late
from tilewise.planner import Options, Planner
from tilewise.planner.options import MEASURING
from tilewise.problems.base import Problem

__all__ = ["Met", "NewInputs"]

MOST_MET = 4096
"""Kinds of calls that are remembered."""


class Called(Protocol):
    """A call of a layer, which can be hashed, see :class:`tilewise.nn.layers.kinds.Call`."""

    @property
    def deterministic(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Met:
    """A call that a layer has met: the shape of its input, torch's deterministic flag, and the problem of each pass.

    ``table`` is a weak reference to the plan table that has their plans.
    """

    shape: tuple[int, ...]
    deterministic: bool
    problems: Mapping[str, Problem]
    table: weakref.ref[Any]


class NewInputs:
    """The calls that the layers of one model have met.

    ``kinds`` has the class of each layer that can be planned by its name, in the order of the model. While it is empty,
    as for functions that are no layers, nothing is noted and nothing said.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._met: Recent[tuple[str, Any], Met] = Recent(MOST_MET)
        self._last = -1
        """The place in the model of the layer that was planned last."""

    def note(self, name: str, call: Called, problems: Mapping[str, Problem], table: object) -> None:
        """Remember that the layer called ``name`` is called in this way, with its plans in ``table``."""
        if name in self.kinds:
            self._met[name, call] = Met(call.shape, call.deterministic, problems, weakref.ref(table))

    def of(self, name: str) -> list[Met]:
        """The calls that the layer called ``name`` has met."""
        return [met for (layer, _), met in self._met.items() if layer == name]

    @contextmanager
    def told(self, planner: Planner, options: Mapping[Problem, Options]) -> Iterator[None]:
        """Around the planning of the problems of ``options`` for a call that was noted: say why it takes place.

        One line says it for the first layer that is planned for an input. For those behind it in the model nothing more
        is said, but progress is shown where it takes long. Nothing is said of what wisdom has, or what is not measured.
        """
        found = next((name for (name, _), met in reversed(self._met.items()) if _is_of(met, options)), None)
        if found is None:
            yield
            return
        if any(o.rigor in MEASURING and planner.remembered(p, o) is None for p, o in options.items()):
            place = list(self.kinds).index(found)
            if place <= self._last or self._last < 0:
                met = next(met for met in reversed(self.of(found)) if _is_of(met, options))
                say(_line(f"{self.kinds[found]} {found}".rstrip(), met.shape), shown=isinstance(planner.progress, Late))
            self._last = place
        with _briefly(planner.progress):
            yield


def _is_of(met: Met, problems: Mapping[Problem, object]) -> bool:
    """Whether these are problems of that call."""
    return set(problems) <= set(met.problems.values())


def _briefly(progress: Callable[..., object] | None) -> AbstractContextManager[None]:
    """Show the progress of planning in this block without the lines that say that it begins and ends."""
    return progress.planning(brief=True) if isinstance(progress, Late) else nullcontext()


def _line(layer: str, shape: tuple[int, ...]) -> str:
    """What is said of a new input.

    >>> print(_line("Conv2d stem", (5, 3, 96, 96)))
    planning for a new input of Conv2d stem: 5x3x96x96 (once; list it among the examples of optimize, or \
unplanned="torch" leaves it to torch)
    """
    remedies = 'list it among the examples of optimize, or unplanned="torch" leaves it to torch'
    return f"planning for a new input of {layer}: {'x'.join(map(str, shape))} (once; {remedies})"
