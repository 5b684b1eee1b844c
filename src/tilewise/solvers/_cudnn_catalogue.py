"""What cuDNN offers for problems, asked once: listings, notes, workspaces and built plans, each cache bounded.

Heuristics leave engines out, the fastest at times, so that every engine number is tried besides, at default knobs.
Planning micro-batches asks often: of problems that differ in their batch size alone the first is asked in full, and the
others ask the heuristic that knows sizes and try what the first was given.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tilewise.problem import ConvProblem
from tilewise.solvers import _cudnn_api as api
from tilewise.solvers import _cudnn_graph as graphs
from tilewise.solvers._cudnn_graph import Built, Engine, Entry, Strides, Traits

__all__ = ["Bounded", "Catalogue", "Listing", "plain"]

Value = TypeVar("Value")
UNTOLD = Traits(frozenset({"TENSOR_CORE", "NONDETERMINISTIC"}))
"""What is taken for granted of an engine that does not tell: the worst."""


class Bounded(Generic[Value]):
    """A mapping that forgets what was not used for longest. Threads may share it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Value | None:
        """What is kept under ``key``."""
        with self._lock:
            value = self._items.get(key)
            if value is not None:
                self._items.move_to_end(key)
            return value

    def put(self, key: Hashable, value: Value) -> Value:
        """Keep ``value``, and give it back."""
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)
            return value

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is kept under ``key``, made where there is nothing (by two threads at once, one is kept)."""
        value = self.get(key)
        return value if value is not None else self.put(key, make())


@dataclass(frozen=True, slots=True)
class Listing:
    """What cuDNN offers for a problem at its precision, most promising first; or the ``reason`` why nothing."""

    entries: tuple[Entry, ...] = ()
    reason: str = ""


def plain(p: ConvProblem) -> ConvProblem:
    """``p`` without what a cuDNN convolution graph knows nothing of."""
    if p.accumulate or p.bias or p.constant_weight:
        return replace(p, accumulate=False, bias=False, constant_weight=False)
    return p


class Catalogue:
    """Answers for problems that are :func:`plain`. ``device`` is an index throughout."""

    def __init__(self) -> None:
        self._listings: Bounded[Listing] = Bounded(1024)
        self._families: Bounded[tuple[Engine, ...]] = Bounded(256)
        self._served: Bounded[bool] = Bounded(1024)
        self._counts: Bounded[int] = Bounded(256)
        self._traits: Bounded[Traits] = Bounded(4096)
        self._workspaces: Bounded[int] = Bounded(4096)
        self._built: Bounded[Built] = Bounded(128)

    def listing(self, p: ConvProblem, device: int) -> Listing:
        """Engines for ``p`` with their workspaces; those its precision rules out are left out."""
        return self._listings.find((device, p), lambda: self._ask(p, device))

    def _ask(self, p: ConvProblem, device: int) -> Listing:
        family = (device, replace(p, batch=1))
        known = self._families.get(family)
        reason = ""
        try:
            entries = graphs.listed(p, device, graphs.modes(p) if known is None else ["A"])
        except api.errors() as error:
            entries, reason = [], f"cuDNN offers no engine: {api.first_line(error)}"
        try:
            others = graphs.supported(p, device, self._unlisted(p, device, entries, known or ()))
        except api.errors() as error:
            return Listing(reason=f"cuDNN refuses the problem: {api.first_line(error)}")
        entries += (entry for entry in others if not self.traits(p, entry.engine, device).compiles)
        kept = tuple(entry for entry in entries if serves(p, self.traits(p, entry.engine, device)))
        if not kept:
            return Listing(reason=reason or f"cuDNN has engines for it, but none that serves precision={p.precision}")
        if known is None:
            self._families.put(family, tuple(entry.engine for entry in kept if entry.engine.settable))
        return Listing(kept)

    def _unlisted(
        self, p: ConvProblem, device: int, entries: Iterable[Entry], known: Iterable[Engine]
    ) -> Iterable[Engine]:
        """Configs to try: those known of the family, then the numbers in no list save such as are known not to do."""
        listed = {entry.engine for entry in entries}
        numbers = {engine.number for engine in listed}
        for engine in known:
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
        """Why cuDNN has nothing for ``p``, empty when it has.

        Heuristics are asked only where nothing is known of problems that differ in batch and channels alone; where
        cuDNN takes those but not ``p``, building says so.
        """
        kin = (device, replace(p, batch=1, in_channels=p.groups, out_channels=p.groups))
        if self._served.get(kin):
            return ""
        reason = self.listing(p, device).reason
        if not reason:
            self._served.put(kin, True)
        return reason

    def taken(self, p: ConvProblem, engines: list[Engine], device: int) -> list[tuple[Engine, int]]:
        """Those of ``engines`` that take ``p``, with their workspaces."""
        found = []
        for entry in graphs.supported(p, device, engines):
            if not serves(p, self.traits(p, entry.engine, device)):
                continue
            known = self._workspaces.get((device, p, entry.engine))
            needs = entry.workspace if known is None else known
            if needs is None:
                needs = self.build(p, entry.engine, graphs.canonical_strides(p), device).workspace
            found.append((entry.engine, self._workspaces.put((device, p, entry.engine), needs)))
        return found

    def traits(self, p: ConvProblem, engine: Engine, device: int) -> Traits:
        """Notes of an engine. They belong to it and to the kind of problem, not to its sizes."""
        key = (*_kind(p, device), engine.number)
        known = self._traits.get(key)
        if known is None:
            known = graphs.traits(p, device, engine)
            if known is None:
                return UNTOLD
            self._traits.put(key, known)
        return known

    def workspace(self, p: ConvProblem, engine: Engine, device: int) -> int:
        """Bytes. The most that any strides bound so far need, else those of the layout classes."""
        known = self._workspaces.get((device, p, engine))
        if known is not None:
            return known
        listing = self._listings.get((device, p))
        for entry in listing.entries if listing is not None else ():
            if entry.engine == engine and entry.workspace is not None:
                return entry.workspace
        return self.build(p, engine, graphs.canonical_strides(p), device).workspace

    def build(self, p: ConvProblem, engine: Engine, strides: Strides, device: int) -> Built:
        """The built plan for exact strides. Raises ``SolverUnavailable`` naming the engine."""
        built = self._built.find((device, p, engine, strides), lambda: graphs.build(p, engine, strides, device))
        key = (device, p, engine)
        self._workspaces.put(key, max(built.workspace, self._workspaces.get(key) or 0))
        return built


def _kind(p: ConvProblem, device: int) -> tuple[Hashable, ...]:
    return device, p.pass_, p.dims, p.dtype, p.out_dtype, p.groups > 1


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
