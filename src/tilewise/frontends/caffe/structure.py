"""The layers of a network in order, checked: which tensor each of them reads, and what becomes of its tops."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Node", "node_of", "outputs_of", "unique_name"]


@dataclass(frozen=True, slots=True)
class Node:
    """A layer in a network.

    ``module`` is the name of its module, empty for a layer of data. ``weights`` are the loss weights of its tops, 0 for
    those that are no loss. ``blocked`` has the places of bottoms to which no gradient goes.
    """

    name: str
    type: str
    module: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    weights: tuple[float, ...]
    blocked: tuple[int, ...] = ()


def node_of(parameter: Any, module: str, made: dict[str, str], later: dict[str, str], *, is_loss: bool) -> Node:
    """A layer, whose bottoms must be among ``made``: which layer made each tensor. Adds its tops there.

    ``later`` says which layers make which tensors later on, for messages. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError`.
    """
    name, bottoms, tops = str(parameter.name), tuple(parameter.bottom), tuple(parameter.top)
    what = f"layer {name!r} ({parameter.type})"
    for bottom in bottoms:
        if bottom not in made:
            if bottom in later:
                raise CaffeError(
                    f"{what}: bottom {bottom!r} is made only later, by layer {later[bottom]!r}; a layer must follow "
                    "those that it reads, and none may read its own result"
                )
            known = ", ".join(made) or "none"
            raise CaffeError(f"{what}: bottom {bottom!r} is made by no layer; one of these would do: {known}")
    for place, top in enumerate(tops):
        in_place = place < len(bottoms) and bottoms[place] == top
        if (top in made and not in_place) or top in tops[:place]:
            raise CaffeError(
                f"{what}: top {top!r} is already made by layer {made.get(top, name)!r}; another name, or the name of "
                "its bottom in the same place, would do"
            )
    given, down = [float(weight) for weight in parameter.loss_weight], list(parameter.propagate_down)
    if given and len(given) != len(tops):
        raise CaffeError(f"{what}: {len(given)} loss_weight for {len(tops)} tops; none, or one for each, would do")
    if down and len(down) != len(bottoms):
        raise CaffeError(f"{what}: {len(down)} propagate_down for {len(bottoms)} bottoms; one for each would do")
    made.update(dict.fromkeys(tops, name))
    weights = given or [float(is_loss and place == 0) for place in range(len(tops))]
    blocked = tuple(place for place, go in enumerate(down) if not go)
    return Node(name, str(parameter.type), module, bottoms, tops, tuple(weights), blocked)


def outputs_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The tensors that no layer reads after they are made, in the order in which they are made."""
    found: dict[str, None] = {}
    for node in nodes:
        for bottom in node.bottoms:
            found.pop(bottom, None)
        found.update(dict.fromkeys(node.tops))
    return tuple(found)


def unique_name(name: str, taken: Collection[str]) -> str:
    """A name for a layer's module: its own, without dots, with underscores behind it where it is ``taken``."""
    found = re.sub(r"\.", "_", name) or "_"
    while found in taken:
        found += "_"
    return found
