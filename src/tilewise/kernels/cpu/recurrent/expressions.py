"""What a recurrent cell computes, as an expression of one unit's numbers, and its derivative.

A cell is a list of nodes, each of which names what it is made of by places in the list before it. So two cells that
compute the same in the same order are equal, and a cell's text can name a compiled kernel.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

__all__ = ["INPUTS", "UNARY", "Cell", "Expressions", "backward_of"]

INPUTS = ("x", "h", "state", "parameter", "seed")
"""What comes from outside, each with a number: what the input and what the state give gate i, state k before the step,
parameter j of the unit, and for a derivative the gradient of state k after it."""
UNARY = ("neg", "tanh", "sigmoid", "relu")
BINARY = ("add", "sub", "mul", "div")
Node = tuple[Any, ...]
"""``(name, number)`` of an input, ``("constant", value)``, ``(operation, place, ...)``, ``("clamp", place, least,
most)``. Derivatives have ``("where_positive", place, x)``, the value where x is above 0, and ``("where_within", place,
x, least, most)``, the value where x lies between these numbers; both are 0 elsewhere."""


@dataclass(frozen=True)
class Cell:
    """A cell: the numbers of its gates from the input, gates from the state, states and parameters; nodes and results.

    ``results`` are the places of the states after the step, h first.
    """

    from_x: int
    from_h: int
    states: int
    parameters: int
    nodes: tuple[Node, ...]
    results: tuple[int, ...]

    @property
    def name(self) -> str:
        """A name that tells it from other cells."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass
class Expressions:
    """Nodes under construction. Equal ones are one node, and what is known is folded."""

    nodes: list[Node] = field(default_factory=list)
    _places: dict[Node, int] = field(default_factory=dict)

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
    whole = Cell(cell.from_x, cell.from_h, cell.states, cell.parameters, tuple(made.nodes), cell.results)
    return whole, found


def _slopes(made: Expressions, node: Node, place: int, of: int) -> list[tuple[int, int]]:
    """The operands of a node with the gradient that each gets, where ``of`` is that of the node itself."""
    name = node[0]
    if name in INPUTS or name == "constant":
        return []
    a = int(node[1])
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
    if name == "neg":
        return [(a, made.apply("neg", of))]
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
