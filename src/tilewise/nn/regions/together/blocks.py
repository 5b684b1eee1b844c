"""Layers that one plan can compute: a depthwise convolution with the pointwise ones before and behind it.

Where a depthwise convolution alone reads what a pointwise one gives, or a pointwise one alone reads what it gives, the
layers are also planned as one :class:`~tilewise.problems.separable.problem.SeparableProblem`. The last of them then has
ways that compute all, and the others ways that leave them to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.nn.regions import fused
from tilewise.nn.regions.constants import Gathered
from tilewise.nn.regions.layouts import Way, deferred
from tilewise.nn.regions.products import Product, axes_of, weight_shape
from tilewise.nn.regions.units import PRODUCT, Unit, formats, value_of
from tilewise.nn.regions.ways import Deferred, Planned
from tilewise.plan import Plan
from tilewise.problems.base import DTYPE_NAMES, Problem
from tilewise.problems.kinds import kind_of
from tilewise.problems.separable.problem import SeparableProblem

__all__ = ["Block", "blocks_of", "with_blocks"]


@dataclass(frozen=True)
class Block:
    """Parts, by number and in order, that are one problem, with the constant that holds its filters and biases."""

    parts: tuple[int, ...]
    product: Product
    weight: Gathered


def blocks_of(units: Sequence[Unit]) -> list[Block]:
    """The blocks of a region's parts, each with as many layers as there are.

    Those that only torch's own convolutions can compute are none. Where all three layers are no block, the depthwise
    one and the one behind it may be. Where the layer before is the last one of another block, these two are a block as
    well: two blocks that share a layer cannot be computed both.
    """
    layers = {unit.node: part for part, unit in enumerate(units) if unit.kind == PRODUCT and _is_layer(unit)}
    found: list[Block] = []
    for node, part in layers.items():
        if not _is_depthwise(node):
            continue
        before, behind = layers.get(node.args[0]), None  # type: ignore[arg-type]
        if before is not None and (not _is_pointwise(units[before].node) or not _is_read_by(units[before].node, node)):
            before = None
        readers = list(node.users)
        if len(readers) == 1 and readers[0] in layers and _is_pointwise(readers[0]) and _is_read_by(node, readers[0]):
            behind = layers[readers[0]]
        whole = _block(units, (before, part, behind))
        found += whole
        if before is not None and behind is not None and (not whole or _reads_depthwise(units[before].node, layers)):
            found += _block(units, (None, part, behind))
    return found


def with_blocks(
    units: Sequence[Unit],
    ways: Sequence[tuple[Way, ...]],
    blocks: Sequence[Block],
    plans: Mapping[Problem, Sequence[Plan]],
) -> list[tuple[Way, ...]]:
    """The ways of parts with those of blocks that have plans. Torch's own convolutions one by one are no gain."""
    found = [list(each) for each in ways]
    for block in blocks:
        problem = block.product.problem
        chosen = [plan for plan in plans.get(problem, ()) if plan.solver != kind_of(problem).baseline]
        if not chosen:
            continue
        *before, last = block.parts
        format_ = block.product.reads
        for number, part in enumerate(before):
            reads = format_, *ways[part][0].reads[1:]
            format_ = deferred(number + (len(before) - 1) * len(before))
            found[part].append(Way(reads, format_, 0.0, Deferred(units[last].name)))
        reads = format_, *ways[last][0].reads[1:]
        if problem.residual:
            reads = *reads[:-1], block.product.gives
        for plan in chosen:
            error = 0.0 if plan.error is None else plan.error.l2
            planned = Planned(block.product, plan, block.weight)
            found[last].append(Way(reads, block.product.gives, plan.time_ms, planned, error))
    return [tuple(each) for each in found]


def _is_layer(unit: Unit) -> bool:
    """Whether the part is a convolution of images of a type that is planned."""
    if unit.node.target is not fused.convolution:
        return False
    x = value_of(unit.inputs[0])
    planned = x.dtype in DTYPE_NAMES and unit.value.dtype is x.dtype and x.device.type in ("cpu", "cuda")
    return planned and x.dim() == 4 and unit.value.numel() > 0


def _is_depthwise(node: fx.Node) -> bool:
    """Whether a convolution has one filter to each channel."""
    arguments: Any = node.args
    channels = value_of(arguments[0]).shape[1]
    return arguments[8] == channels == value_of(node).shape[1] and channels > 1


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a convolution has 1x1 filters, strides of 1 and no padding."""
    arguments: Any = node.args
    _, weight, _, _, _, stride, padding, _, groups = arguments
    return groups == 1 and set(stride) == {1} and set(padding) == {0} and set(weight_shape(weight)[2:]) == {1}


def _is_read_by(node: fx.Node, reader: fx.Node) -> bool:
    """Whether only ``reader`` reads what ``node`` gives, as its image, and nothing is added before it."""
    return list(node.users) == [reader] and reader.args[0] is node and reader.args[3] is not node and not node.args[3]


def _reads_depthwise(node: fx.Node, layers: Mapping[fx.Node, int]) -> bool:
    """Whether a pointwise convolution may be the last one of a block."""
    source = node.args[0]
    return source in layers and _is_depthwise(source) and _is_read_by(source, node)  # type: ignore[arg-type]


def _is_solved(problem: SeparableProblem) -> bool:
    """Whether a solver other than torch's own convolutions can compute a block."""
    return any(
        not solver.baseline and not isinstance(solver, solvers.Split) and not solver.why_not(problem)
        for solver in solvers.solving(problem)
    )


def _block(units: Sequence[Unit], parts: tuple[int | None, int, int | None]) -> list[Block]:
    """The block of the parts before, of and behind a depthwise convolution, some of which may be missing.

    Empty where they are no block that can be planned.
    """
    numbers = tuple(number for number in parts if number is not None)
    if len(numbers) < 2:
        return []
    nodes = [units[number].node for number in numbers]
    first, last, depthwise = nodes[0], nodes[-1], units[parts[1]].node
    x, result = value_of(first.args[0]), value_of(last)  # type: ignore[arg-type]
    height, width = axes_of(depthwise)
    functions = [str(node.args[4]) for node in nodes]
    problem = SeparableProblem(
        x.shape[0], x.shape[1], value_of(depthwise).shape[1], result.shape[1], (height, width),
        expands=parts[0] is not None, projects=parts[2] is not None,
        inner=tuple(functions[:-1]), activation=functions[-1], residual=last.args[3] is not None,
        dtype=DTYPE_NAMES[x.dtype], device=device_name(x.device),
    )  # fmt: skip
    if not _is_solved(problem):
        return []
    pieces: list[fx.Node | int] = []
    for node in nodes:
        filters, bias = node.args[1], node.args[2]
        pieces += [filters, value_of(node).shape[1] if bias is None else bias]  # type: ignore[list-item]
    product = Product(problem, formats(x.shape)[-1], formats(result.shape)[-1])
    return [Block(numbers, product, Gathered(tuple(pieces)))]
