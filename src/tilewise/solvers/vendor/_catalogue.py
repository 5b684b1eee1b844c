"""What cuDNN offers for problems, asked once and kept in bounded caches: listings, notes, workspaces and built plans.

cuDNN's heuristics leave engines out, at times the fastest, so every engine number is tried too, at default knobs.
Planning micro-batches asks often. Of problems that differ only in their batch size the first is asked in full. The
others ask only the heuristic that knows sizes, and try the engines that the first was given.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.vendor import _api as api
from tilewise.solvers.vendor import _graph as graphs
from tilewise.solvers.vendor._graph import Built, Engine, Entry, Strides, Traits

__all__ = ["Bounded", "Catalogue", "Listing", "plain"]

Value = TypeVar("Value")
UNTOLD = Traits(frozenset({"TENSOR_CORE", "NONDETERMINISTIC"}))
"""The traits assumed of an engine that does not tell its own: the worst ones."""


class Bounded(Generic[Value]):
    """A mapping that drops the entry unused for longest when it is full. Threads may share it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Value | None:
        """The value under ``key``, or ``None``."""
        with self._lock:
            value = self._items.get(key)
            if value is not None:
                self._items.move_to_end(key)
            return value

    def put(self, key: Hashable, value: Value) -> Value:
        """Keep ``value`` under ``key`` and return it."""
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)
            return value

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under ``key``, made and kept where there is none. Of two threads that make it, one's is kept."""
        value = self.get(key)
        return value if value is not None else self.put(key, make())


@dataclass(frozen=True, slots=True)
class Listing:
    """Engines that cuDNN offers for a problem at its precision, most promising first; or the ``reason`` why none."""

    entries: tuple[Entry, ...] = ()
    reason: str = ""


def plain(p: ConvProblem) -> ConvProblem:
    """``p`` without the properties that a cuDNN graph of a single convolution does not have."""
    if p.accumulate or p.bias or p.residual or p.activation != "none" or p.constant_weight:
        return replace(p, accumulate=False, bias=False, residual=False, activation="none", constant_weight=False)
    return p


class Catalogue:
    """Answers for problems that are :func:`plain`. Devices are given by index."""

    def __init__(self) -> None:
        self._listings: Bounded[Listing] = Bounded(1024)
        self._families: Bounded[tuple[Engine, ...]] = Bounded(256)
        self._served: Bounded[bool] = Bounded(1024)
        self._counts: Bounded[int] = Bounded(256)
        self._traits: Bounded[Traits] = Bounded(4096)
        self._workspaces: Bounded[int] = Bounded(4096)
        self._built: Bounded[Built] = Bounded(128)

    def listing(self, p: ConvProblem, device: int) -> Listing:
        """Engines for ``p`` with their workspaces, without those that its precision rules out."""
        return self._listings.find((device, p), lambda: self._ask(p, device))

    def _ask(self, p: ConvProblem, device: int) -> Listing:
        """The listing of ``p``, asked of cuDNN."""
        family = (device, replace(p, batch=1))
        family_engines = self._families.get(family)
        reason = ""
        try:
            entries = graphs.listed(p, device, graphs.modes(p) if family_engines is None else ["A"])
        except api.errors() as error:
            entries, reason = [], f"cuDNN offers no engine: {api.first_line(error)}"
        try:
            unlisted = graphs.supported(p, device, self._unlisted(p, device, entries, family_engines or ()))
        except api.errors() as error:
            return Listing(reason=f"cuDNN refuses the problem: {api.first_line(error)}")
        entries += (entry for entry in unlisted if not self.traits(p, entry.engine, device).compiles)
        kept = tuple(entry for entry in entries if serves(p, self.traits(p, entry.engine, device)))
        if not kept:
            return Listing(reason=reason or f"cuDNN has engines for it, but none that serves precision={p.precision}")
        if family_engines is None:
            self._families.put(family, tuple(entry.engine for entry in kept if entry.engine.settable))
        return Listing(kept)

    def _unlisted(
        self, p: ConvProblem, device: int, entries: Iterable[Entry], family_engines: Iterable[Engine]
    ) -> Iterable[Engine]:
        """Engine configs to try beside those in ``entries``.

        First the configs known from problems that differ only in their batch, then every engine number that no list
        has, save those known to be useless.
        """
        listed = {entry.engine for entry in entries}
        numbers = {engine.number for engine in listed}
        for engine in family_engines:
            if engine not in listed:
                numbers.add(engine.number)
                yield engine
        count = self._counts.find(_kind(p, device), lambda: graphs.engine_count(p, device))
        for number in range(count):
            traits = self._traits.get((*_kind(p, device), number))
            useless = traits is not None and (traits.compiles or not serves(p, traits))
            if number not in numbers and not useless:
                yield Engine(number)

    def refusal(self, p: ConvProblem, device: int) -> str:
        """Why cuDNN has nothing for ``p``; empty where it has something.

        Heuristics are asked only where nothing is known of problems that differ in batch and channels alone. Where
        cuDNN takes those but not ``p``, building it says so.
        """
        kin = (device, replace(p, batch=1, in_channels=p.groups, out_channels=p.groups))
        if self._served.get(kin):
            return ""
        reason = self.listing(p, device).reason
        if not reason:
            self._served.put(kin, True)
        return reason

    def taken(self, p: ConvProblem, engines: list[Engine], device: int) -> list[tuple[Engine, int]]:
        """Those of ``engines`` that take ``p``, with their workspaces in bytes."""
        taken = []
        for entry in graphs.supported(p, device, engines):
            if not serves(p, self.traits(p, entry.engine, device)):
                continue
            measured = self._workspaces.get((device, p, entry.engine))
            needs = entry.workspace if measured is None else measured
            if needs is None:
                needs = self.build(p, entry.engine, graphs.canonical_strides(p), device).workspace
            taken.append((entry.engine, self._workspaces.put((device, p, entry.engine), needs)))
        return taken

    def traits(self, p: ConvProblem, engine: Engine, device: int) -> Traits:
        """cuDNN's notes of an engine. They depend on the kind of problem, but not on its sizes."""
        key = (*_kind(p, device), engine.number)
        known = self._traits.get(key)
        if known is None:
            known = graphs.traits(p, device, engine)
            if known is None:
                return UNTOLD
            self._traits.put(key, known)
        return known

    def workspace(self, p: ConvProblem, engine: Engine, device: int) -> int:
        """Workspace in bytes: the most that any strides bound so far need, else that for canonical strides."""
        known = self._workspaces.get((device, p, engine))
        if known is not None:
            return known
        listing = self._listings.get((device, p))
        for entry in listing.entries if listing is not None else ():
            if entry.engine == engine and entry.workspace is not None:
                return entry.workspace
        return self.build(p, engine, graphs.canonical_strides(p), device).workspace

    def build(self, p: ConvProblem, engine: Engine, strides: Strides, device: int) -> Built:
        """The plan built for exact strides. Raises ``SolverUnavailable`` naming the engine."""
        built = self._built.find((device, p, engine, strides), lambda: graphs.build(p, engine, strides, device))
        key = (device, p, engine)
        self._workspaces.put(key, max(built.workspace, self._workspaces.get(key) or 0))
        return built


def _kind(p: ConvProblem, device: int) -> tuple[Hashable, ...]:
    """What an engine's traits may depend on."""
    return device, p.pass_, p.dims, p.dtype, p.out_dtype, p.groups > 1, p.bias, p.residual, p.activation


def serves(p: ConvProblem, traits: Traits) -> bool:
    """Whether an engine may serve ``p`` as far as its notes tell; the planner measures its error all the same.

    In fp32 tensor cores mean TF32. An engine that converts its inputs to 16 bits loses range too, so that it keeps
    neither precision. cuDNN's FFT engines take uneven padding but leave its trailing side out (seen with cuDNN 9.19).
    """
    if "FFT" in traits.notes and any(axis.before != axis.after for axis in p.axes):
        return False
    if p.dtype != "fp32":
        return True
    if "DOWN_CONVERT_INPUTS" in traits.notes:
        return False
    return p.precision == "tf32" or "TENSOR_CORE" not in traits.notes
