"""A model's forward as a chain of pieces: where it can be cut, and the pieces between cuts.

A cut is a place in the forward where a single tensor holds all that comes after depends on. The forward is traced by
:mod:`torch.fx` with the model's parts as leaves, except for ``nn.Sequential`` and what contains a layer that is to be
divided. What a trace does not show (a branch by a mode, a block without gradients) is refused, or found by a run of the
chain beside the model itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tilewise.machine import random_states
from tilewise.nn.branches.find import Shallow, Untraceable
from tilewise.nn.graphs.standing import Contents
from tilewise.nn.graphs.standins import buffers_aside

__all__ = ["Chain", "Cut", "Piece", "Span", "Untraceable", "chain_of", "chosen", "pieces_of", "stand_in"]


@dataclass(frozen=True)
class Cut:
    """A place after node ``after`` of the trace, where only ``value`` is needed later.

    ``sample_bytes`` is what the value has for each sample. ``weight_bytes`` are the bytes of the parameters that nodes
    after this cut and before the next one use for the first time, counted from the end of the forward.
    """

    after: int
    value: fx.Node
    sample_bytes: float = 0.0
    weight_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """The nodes ``first`` to ``last - 1`` as one piece, from ``source`` to ``result`` (``None``: what is returned).

    ``layer`` is the path of the linear layer that the span consists of, where its outputs are divided.
    """

    first: int
    last: int
    source: fx.Node
    result: fx.Node | None
    layer: str = ""


@dataclass(frozen=True)
class Chain:
    """The traced forward of a model, and where it can be cut, the first place first."""

    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    cuts: tuple[Cut, ...]

    @property
    def source(self) -> fx.Node:
        """The argument of the forward."""
        return _argument(self.graph)


class Own(torch.autograd.Function):
    """The same memory as a tensor that is no leaf, so that a layer in place may write to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Piece(nn.Module):
    """A part of a forward, of one tensor. ``later`` says that it is not the first of its chain."""

    def __init__(self, body: nn.Module, *, later: bool, empty: bool) -> None:
        super().__init__()
        self.body = body
        self.later, self.empty = later, empty

    def forward(self, x: torch.Tensor) -> Any:
        """What the piece makes of ``x``."""
        if self.empty:
            return self.body(x)
        return self.body(Own.apply(x) if self.later and x.requires_grad and torch.is_grad_enabled() else x)  # type: ignore[no-untyped-call]


def chain_of(model: nn.Module, layers: Collection[str], x: torch.Tensor) -> Chain:
    """The chain of ``model`` for a sample ``x``, in its present modes; ``layers`` are the paths of parts not to hide.

    The model is not run: a copy of it is, with its parameters. Raises :class:`Untraceable` with the reason where the
    forward cannot be traced, or where its pieces, run one after the other, do not give what it gives.
    """
    traced = stand_in(model)
    inside = {path.rpartition(".")[0] for path in layers}
    inside |= {".".join(path.split(".")[:count]) for path in layers for count in range(len(path.split(".")))}
    opened = {id(part) for name, part in traced.named_modules() if name in inside or _is_sequence(part)}
    contents = Contents(traced)
    try:
        graph = Opening(opened).trace(traced)
    except Untraceable:
        raise
    except Exception as error:  # whatever a forward does with what is no tensor
        raise Untraceable(f"torch.fx cannot trace it: {(str(error).splitlines() or [''])[0]}") from error
    changed = contents.difference()
    if changed:
        raise Untraceable(f"{changed} in a run of its forward")
    nodes = tuple(node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    chain = Chain(graph, nodes, tuple(_cuts(graph, nodes)))
    return _tried(model, chain, x)


def chosen(chain: Chain, cuts: Sequence[Cut], layers: Collection[str]) -> tuple[Span, ...]:
    """The spans of a chain that is cut at ``cuts``, and before and after each of the linear ``layers``.

    Raises :class:`Untraceable` where a layer does not lie between two cuts, or comes twice.
    """
    alone: dict[int, str] = {}
    for index, node in enumerate(chain.nodes):
        if node.op == "call_module" and node.target in layers:
            if node.target in alone.values():
                raise Untraceable(f"{node.target} is used twice in a forward")
            alone[index] = str(node.target)
    missing = set(layers) - set(alone.values())
    if missing:
        raise Untraceable(f"{min(missing)} is not called in the forward as a layer")
    places = {cut.after: cut.value for cut in chain.cuts} | {-1: chain.source}
    for index, path in alone.items():
        if chain.nodes[index].args != (places.get(index - 1),) or chain.nodes[index].kwargs:
            raise Untraceable(f"{path} is not the only one that reads its input: what skips it would be lost")
        if places.get(index) is not chain.nodes[index]:
            raise Untraceable(f"more than the result of {path} is needed after it")
    wanted = sorted({cut.after for cut in cuts} | {i - 1 for i in alone} | {*alone})
    spans, first, source = list[Span](), 0, chain.source
    for after in wanted:
        layer = alone.get(after, "") if after == first else ""
        if layer and spans and spans[-1].layer:
            spans.append(Span(first, first, source, source))  # samples are exchanged between two layers as well
        spans.append(Span(first, after + 1, source, places[after], layer))
        first, source = after + 1, places[after]
    spans.append(Span(first, len(chain.nodes), source, None))
    return tuple(spans)


def pieces_of(model: nn.Module, chain: Chain, spans: Sequence[Span]) -> list[Piece]:
    """The pieces of ``model`` between cuts. They have its parts, parameters and buffers."""
    pieces = []
    for number, span in enumerate(spans):
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {span.source: graph.placeholder("x")}

        def value(node: fx.Node, known: dict[fx.Node, fx.Node] = known, graph: fx.Graph = graph) -> fx.Node:
            if node not in known and node.op == "get_attr":
                known[node] = graph.node_copy(node)
            return known[node]

        for node in chain.nodes[span.first : span.last]:
            known[node] = graph.node_copy(node, value)
        last = next(node for node in reversed(chain.graph.nodes) if node.op == "output").args[0]
        graph.output(value(span.result) if span.result is not None else fx.map_arg(last, value))
        empty = span.first == span.last
        pieces.append(Piece(fx.GraphModule(model, graph), later=number > 0, empty=empty))
    return pieces


def stand_in(model: nn.Module) -> nn.Module:
    """A copy of a model with the same parameters and copies of its buffers."""
    parameters: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, parameters | {id(b): b.detach().clone() for b in model.buffers()})


class Opening(Shallow):
    """A tracer of a forward of one tensor and of those of some parts, which have the ids ``opened``."""

    def __init__(self, opened: Collection[int]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to record a call of the module as it is."""
        return id(m) not in self._opened


def _argument(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op == "placeholder")
    return found


def _is_sequence(part: nn.Module) -> bool:
    return type(part) is nn.Sequential and "forward" not in part.__dict__


def _cuts(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[Cut]:
    """The places at which one value holds all that comes after depends on."""
    places = {node: index for index, node in enumerate(nodes)}
    source = _argument(graph)
    values = {source: -1, **places}
    last = {value: max((places.get(user, len(nodes)) for user in value.users), default=-1) for value in values}
    found = []
    for index in range(len(nodes)):
        alive = [value for value, made in values.items() if made <= index < last[value]]
        if len(alive) == 1:
            found.append(Cut(index, alive[0]))
    return found


def _tried(model: nn.Module, chain: Chain, x: torch.Tensor) -> Chain:
    """The chain with the sizes of its cuts, after a run of all its pieces that gave what the model gives.

    Places whose value is no tensor with the samples along its first axis are left out.
    """
    whole = stand_in(model)
    spans, first, source = list[Span](), 0, chain.source
    for cut in chain.cuts:
        spans.append(Span(first, cut.after + 1, source, cut.value))
        first, source = cut.after + 1, cut.value
    spans.append(Span(first, len(chain.nodes), source, None))
    pieces = pieces_of(whole, chain, spans)
    with torch.no_grad():
        with random_states.kept(whole.modules()), buffers_aside(whole):
            wanted = whole(x.detach().clone())
        with random_states.kept(whole.modules()), buffers_aside(whole):
            value, made = x.detach().clone(), list[Any]()
            for piece in pieces:
                value = piece(value)
                made.append(_seen(value, len(x)))
    _same(value, wanted)
    weights = _weight_bytes(pieces)
    cuts = []
    waiting = weights[-1]
    for index in reversed(range(len(chain.cuts))):
        if made[index]:
            cuts.append(Cut(chain.cuts[index].after, chain.cuts[index].value, made[index], waiting))
            waiting = 0
        waiting += weights[index]
    return Chain(chain.graph, chain.nodes, tuple(reversed(cuts)))


def _seen(value: Any, samples: int) -> float:
    """The bytes of a value for each sample; 0 for one that does not lie along samples, or has no gradient."""
    if type(value) is not torch.Tensor or not value.dim() or len(value) != samples or not value.is_floating_point():
        return 0.0
    return value.numel() * value.element_size() / samples


def _weight_bytes(pieces: Sequence[nn.Module]) -> list[int]:
    """The bytes of the parameters of each piece that no earlier piece has: theirs are the last gradients."""
    seen, found = set[int](), []
    for piece in pieces:
        own = [p for p in piece.parameters() if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for p in own}
        found.append(sum(p.numel() * p.element_size() for p in own))
    return found


def _same(got: Any, wanted: Any) -> None:
    """Raise :class:`Untraceable` where the chain did not give what the model gave."""
    pairs = list(zip(tree_leaves(got), tree_leaves(wanted), strict=False))
    if len(tree_leaves(got)) != len(tree_leaves(wanted)):
        raise Untraceable("its pieces return other values than the model")
    for mine, its in pairs:
        if not isinstance(its, torch.Tensor):
            alike = type(mine) is type(its) and mine == its
        else:
            alike = isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype) == (its.shape, its.dtype)
            alike = alike and _near(mine, its)
        if not alike:
            raise Untraceable("its pieces, run one after the other, do not give what the model gives")


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal but for the rounding of kernels that add in any order."""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    apart, size = (a.double() - b.double()).norm(), b.double().norm()
    return bool(apart <= math.sqrt(torch.finfo(a.dtype).eps) * size)
