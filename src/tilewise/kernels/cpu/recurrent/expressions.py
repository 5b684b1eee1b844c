"""What a recurrent cell computes, as an expression of one unit's numbers and of means over units, and its derivative.

A cell is a list of nodes, each of which names what it is made of by places in the list before it. So two cells that
compute the same in the same order are equal, and a cell's text can name a compiled kernel.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COMPARISONS", "INPUTS", "MOST_MEANS", "UNARY", "Cell", "Expressions", "backward_of", "operands_of"]

INPUTS = ("x", "h", "state", "parameter", "random", "seed")
"""What comes from outside, each with a number: what the input and what the state give gate i, state k before the step,
parameter j of the unit, a random number of its own, and for a derivative the gradient of state k after the step."""
UNARY = ("neg", "tanh", "sigmoid", "relu", "sqrt")
BINARY = ("add", "sub", "mul", "div")
COMPARISONS = ("less", "less_equal")
MOST_MEANS = 64
"""Means of a cell and its derivative that kernels compute: of each a thread keeps a vector in a page of memory."""
Node = tuple[Any, ...]
"""``(name, number)`` of an input, ``("constant", value)``, ``(operation, place, ...)``, ``("clamp", place, least,
most)``, ``("mean", place)``, which is the same for all units of a sequence, and ``("select", place, a, b)``, which is a
where the number at place is not 0. Comparisons are 1 or 0. Derivatives have ``("where_positive", place, x)``, the value
where x is above 0, and ``("where_within", place, x, least, most)``, the value where x lies between these numbers; both
are 0 elsewhere."""


@dataclass(frozen=True)
class Cell:
    """A cell: the numbers of its gates from the input, gates from the state, states and parameters; nodes and results.

    ``results`` are the places of the states after the step, h first. ``randoms`` is how many random numbers a unit has.
    """

    from_x: int
    from_h: int
    states: int
    parameters: int
    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    randoms: int = 0

    @property
    def name(self) -> str:
        """A name that tells it from other cells."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @functools.cached_property
    def means(self) -> tuple[tuple[int, ...], ...]:
        """The places of all means, by levels: a mean needs only means of levels before its own."""
        levels: list[int] = []
        found: list[list[int]] = []
        for place, node in enumerate(self.nodes):
            level = max((levels[operand] for operand in operands_of(node)), default=0)
            if node[0] == "mean":
                found += [[]] if level == len(found) else []
                found[level].append(place)
                level += 1
            levels.append(level)
        return tuple(map(tuple, found))

    def needed(self, wanted: Iterable[int], known: Iterable[int]) -> set[int]:
        """The places that must be evaluated for those ``wanted``, where the values of those ``known`` are."""
        left, found, given = list(wanted), set[int](), set(known)
        while left:
            place = left.pop()
            if place not in found:
                found.add(place)
                left += () if place in given else operands_of(self.nodes[place])
        return found


def operands_of(node: Node) -> tuple[int, ...]:
    """The places that a node is made of."""
    name, *rest = node
    if name in INPUTS or name == "constant":
        return ()
    if name == "select":
        return int(rest[0]), int(rest[1]), int(rest[2])
    if name in BINARY or name in COMPARISONS or name in ("where_positive", "where_within"):
        return int(rest[0]), int(rest[1])
    return (int(rest[0]),)


@dataclass
class Expressions:
    """Nodes under construction. Equal ones are one node, and what is known is folded."""

    nodes: list[Node] = field(default_factory=list)
    _places: dict[Node, int] = field(default_factory=dict)
    _same: set[int] = field(default_factory=set)
    """The places of what is the same for all units of a sequence."""

    def input(self, name: str, number: int) -> int:
        """The place of an input."""
        return self._place((name, number))

    def constant(self, value: float) -> int:
        """The place of a number."""
        return self._place(("constant", float(value)))

    def apply(self, name: str, *places: int, numbers: tuple[float, ...] = ()) -> int:
        """The place of an operation on nodes."""
        found = self._folded(name, places)
        return self._place((name, *places, *numbers)) if found is None else found

    def _folded(self, name: str, places: tuple[int, ...]) -> int | None:
        """The place of something simpler that is the same, where there is one."""
        values = [self._value(place) for place in places]
        if name == "mean" and places[0] in self._same:
            return places[0]
        if name in BINARY and None not in values:
            a, b = values
            assert a is not None
            assert b is not None
            if name != "div" or b:
                return self.constant({"add": a + b, "sub": a - b, "mul": a * b, "div": a / b if b else 0.0}[name])
        if name in ("add", "sub") and values[1] == 0:
            return places[0]
        if name == "add" and values[0] == 0:
            return places[1]
        if name in ("mul", "div") and values[1] == 1:
            return places[0]
        if name == "mul" and values[0] == 1:
            return places[1]
        return None

    def _value(self, place: int) -> float | None:
        """The number at a place; ``None`` where it is not known."""
        node = self.nodes[place]
        return float(node[1]) if node[0] == "constant" else None

    def _place(self, node: Node) -> int:
        """The place of a node, which is added where it is not there."""
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
            if node[0] in ("constant", "mean") or (node[0] not in INPUTS and self._same.issuperset(operands_of(node))):
                self._same.add(self._places[node])
        return self._places[node]


def backward_of(cell: Cell) -> tuple[Cell, dict[str, list[int]]]:
    """The derivative of a cell: a cell with seeds for its results, and the places of the gradients of each input.

    Gradients are listed by the input's name and number. An input that nothing depends on has the constant 0.
    """
    made = Expressions()
    for node in cell.nodes:
        made._place(node)
    gradients: dict[int, int] = {}

    def add(place: int, gradient: int) -> None:
        before = gradients.get(place)
        gradients[place] = gradient if before is None else made.apply("add", before, gradient)

    for number, place in enumerate(cell.results):
        add(place, made.input("seed", number))
    for place in range(len(cell.nodes) - 1, -1, -1):
        if place in gradients:
            for operand, gradient in _slopes(made, cell.nodes[place], place, gradients[place]):
                add(operand, gradient)
    counts = {"x": cell.from_x, "h": cell.from_h, "state": cell.states, "parameter": cell.parameters}
    found = {
        name: [gradients.get(made.input(name, number), made.constant(0.0)) for number in range(count)]
        for name, count in counts.items()
    }
    whole = Cell(cell.from_x, cell.from_h, cell.states, cell.parameters, tuple(made.nodes), cell.results, cell.randoms)
    return whole, found


def _slopes(made: Expressions, node: Node, place: int, of: int) -> list[tuple[int, int]]:
    """The operands of a node with the gradient that each gets, where ``of`` is that of the node itself."""
    name = node[0]
    if name in INPUTS or name == "constant" or name in COMPARISONS:
        return []
    a = int(node[1])
    if name == "select":
        zero = made.constant(0.0)
        return [(int(node[2]), made.apply(name, a, of, zero)), (int(node[3]), made.apply(name, a, zero, of))]
    if name in BINARY:
        b = int(node[2])
        if name == "add":
            return [(a, of), (b, of)]
        if name == "sub":
            return [(a, of), (b, made.apply("neg", of))]
        if name == "mul":
            return [(a, made.apply("mul", of, b)), (b, made.apply("mul", of, a))]
        share = made.apply("div", of, b)
        return [(a, share), (b, made.apply("neg", made.apply("mul", share, place)))]
    if name in ("neg", "mean"):  # a mean's gradient is the sum of all units', of which each unit gets its share
        return [(a, made.apply(name, of))]
    if name == "sqrt":
        return [(a, made.apply("div", made.apply("mul", of, made.constant(0.5)), place))]
    if name == "relu":
        return [(a, made.apply("where_positive", of, a))]
    if name == "clamp":
        return [(a, made.apply("where_within", of, a, numbers=(float(node[2]), float(node[3]))))]
    one = made.constant(1.0)
    if name == "tanh":
        slope = made.apply("sub", one, made.apply("mul", place, place))
    else:
        slope = made.apply("mul", place, made.apply("sub", one, place))
    return [(a, made.apply("mul", of, slope))]
