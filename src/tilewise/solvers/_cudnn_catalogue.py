"""What cuDNN offers for problems, asked once: listings, notes, workspaces and built plans, each cache bounded.

The full question (three heuristics and every engine number) takes about 20 ms. Problems that differ in their batch size
alone are asked about again and again while micro-batches are planned, so the first of such a family is asked in full
and the others take over its engines, each checked against the new problem, beside heuristic A's own list (2-3 ms).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tilewise.problem import ConvProblem
from tilewise.solvers import _cudnn_api as api
from tilewise.solvers import _cudnn_graph as graphs
from tilewise.solvers._cudnn_graph import Built, Engine, Entry, Strides, Traits

__all__ = ["Bounded", "Catalogue", "Listing", "plain"]

Value = TypeVar("Value")
UNTOLD = Traits(frozenset({"TENSOR_CORE", "NONDETERMINISTIC"}))
"""What is assumed of an engine that does not tell: the worst."""


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
        self._traits: Bounded[Traits] = Bounded(4096)
        self._workspaces: Bounded[int] = Bounded(4096)
        self._built: Bounded[Built] = Bounded(128)

    def listing(self, p: ConvProblem, device: int) -> Listing:
        """Engines for ``p`` with their workspaces; those its precision rules out are left out."""
        return self._listings.find((device, p), lambda: self._ask(p, device))

    def _ask(self, p: ConvProblem, device: int) -> Listing:
        family = (device, replace(p, batch=1))
        known = self._families.get(family)
        try:
            if known is None:
                entries = self._in_full(p, device)
                self._families.put(family, tuple(e.engine for e in entries if e.engine.settable))
            else:
                entries = self._allowed(p, device, graphs.listed(p, device, ["A"]))
                seen = {entry.engine for entry in entries}
                entries += graphs.supported(p, device, [engine for engine in known if engine not in seen])
        except api.errors() as error:
            return Listing(reason=f"cuDNN offers no engine: {api.first_line(error)}")
        if not entries:
            return Listing(reason=f"cuDNN offers engines, but none that keeps precision={p.precision}")
        return Listing(tuple(entries))

    def _in_full(self, p: ConvProblem, device: int) -> list[Entry]:
        """What the heuristics list, then, at default knobs, the engines that none of them does."""
        entries = graphs.listed(p, device)
        numbers = {entry.engine.number for entry in entries}
        others = [Engine(n) for n in range(graphs.engine_count(p, device)) if n not in numbers]
        unlisted = graphs.supported(p, device, others)
        unlisted = [e for e in unlisted if not self.traits(p, e.engine, device).compiles]
        return self._allowed(p, device, entries + unlisted)

    def _allowed(self, p: ConvProblem, device: int, entries: list[Entry]) -> list[Entry]:
        return [e for e in entries if keeps_precision(p, self.traits(p, e.engine, device))]

    def traits(self, p: ConvProblem, engine: Engine, device: int) -> Traits:
        """Notes of an engine. They belong to it and to the kind of problem, not to its sizes."""
        kind = (device, p.pass_, p.dims, p.dtype, p.out_dtype, p.groups > 1, engine.number)
        return self._traits.find(kind, lambda: graphs.traits(p, device, engine) or UNTOLD)

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


def keeps_precision(p: ConvProblem, traits: Traits) -> bool:
    """Whether an engine may serve ``p`` as far as its notes tell; the planner measures its error all the same.

    In fp32 tensor cores mean TF32. An engine that converts its inputs to 16 bits loses range too, so that it keeps
    neither precision.
    """
    if p.dtype != "fp32":
        return True
    if "DOWN_CONVERT_INPUTS" in traits.notes:
        return False
    return p.precision == "tf32" or "TENSOR_CORE" not in traits.notes
