"""Gates of channels as part of the product behind them: the filter is multiplied in place of the image.

A gate has one factor for each channel, as in squeeze and excitation (Hu et al. 2018, section 3). Where a 1x1
convolution alone reads what the gate gives, conv(x * g, w) is conv(x, w * g). Of one image with many pixels the filter
is far smaller than the image, which then is neither read nor written once more. Each image of a batch would need a
filter of its own, so batches keep the gate as a pass over the image.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tilewise.nn.programs.pixels import Pixels
from tilewise.nn.regions import fused
from tilewise.nn.regions.gates import pixel_ways
from tilewise.nn.regions.layouts import Way, deferred
from tilewise.nn.regions.products import Product, products_of, weight_shape
from tilewise.nn.regions.units import PRODUCT, Unit, formats
from tilewise.nn.regions.ways import OnFilter, Planned, Times
from tilewise.plan import Plan
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["Gated", "gated_of", "with_gated"]

PIXELS = 2
"""An image must have so many times as many pixels as the filter has outputs, or there is nothing to gain."""
MOST_PLANS = 3
"""Plans of the convolution that are timed in their place."""


@dataclass(frozen=True)
class Gated:
    """A gate and the convolution that reads it, by the numbers of their parts.

    ``product`` is the convolution with a filter that each call computes, ``kept`` the one with a constant filter.
    """

    gate: int
    reader: int
    product: Product
    kept: ConvProblem
    what: OnFilter


def gated_of(units: Sequence[Unit]) -> list[Gated]:
    """The gates of a region that can be part of the product behind them: those of one image, before 1x1 filters."""
    parts = {unit.node: part for part, unit in enumerate(units)}
    found = []
    for part, unit in enumerate(units):
        calls = list(pixel_ways(unit)) if unit.kind != PRODUCT else []
        readers = list(unit.node.users)
        if not calls or calls[0][0].name != "scaled" or len(readers) != 1 or readers[0] not in parts:
            continue
        call, reader = calls[0][0], units[parts[readers[0]]]
        for product in _products(call, unit.node, reader):
            kept: Any = product.problem
            weight: Any = reader.node.args[1]
            outputs, channels = weight_shape(weight)[:2]
            what = OnFilter(Pixels("scaled", (1, channels, outputs, 1)), weight, reader.name, call.image)
            changing = replace(product, problem=replace(kept, constant_weight=False))
            found.append(Gated(part, parts[reader.node], changing, kept, what))
    return found


def with_gated(
    units: Sequence[Unit],
    ways: Sequence[tuple[Way, ...]],
    gates: Sequence[Gated],
    plans: Mapping[Problem, Sequence[Plan]],
    times: Times,
) -> list[tuple[Way, ...]]:
    """The ways of parts with those of ``gates`` whose convolutions have plans of ours for a filter that changes."""
    found = [list(each) for each in ways]
    for gated in gates:
        product, call = gated.product, gated.what.call
        chosen = plans.get(product.problem, ())[:MOST_PLANS]
        like = next((way for way in ways[gated.reader] if _is_like(way, product)), None)
        gate = next((way for way in ways[gated.gate] if isinstance(way.what, Pixels)), None)
        if not chosen or like is None or gate is None:
            continue
        dtype = units[gated.gate].value.dtype
        tensors = [times.example(shape, formats(shape)[-1], dtype) for shape in call.shapes]
        ms = times.of(call, functools.partial(call, *tensors))
        found[gated.gate].append(Way(gate.reads, deferred(0), ms, gated.what))
        for plan in chosen:
            error = 0.0 if plan.error is None else plan.error.l2
            planned = Planned(product, plan, scaled=True)
            found[gated.reader].append(Way((deferred(0), *like.reads[1:]), product.gives, plan.time_ms, planned, error))
    return [tuple(each) for each in found]


def _is_like(way: Way, product: Product) -> bool:
    """Whether a convolution's way is by a plan, and for images that lie as those of ``product`` do."""
    return isinstance(way.what, Planned) and (way.reads[0], way.gives) == (product.reads, product.gives)


def _products(call: Pixels, gate: fx.Node, reader: Unit) -> list[Product]:
    """The convolution that reads a gate, in channels_last; empty where it is none, or there is nothing to gain."""
    images, _, height, width = call.shape
    node = reader.node
    if reader.kind != PRODUCT or node.target is not fused.convolution or images != 1:
        return []
    if node.args[0] is not gate or node.args[3] is gate:
        return []
    outputs, _, *taps = weight_shape(node.args[1])
    if node.args[8] != 1 or math.prod(taps) != 1 or height * width < PIXELS * outputs:
        return []
    last = formats(call.shape)[-1]
    return [each for each in products_of(reader) if isinstance(each.problem, ConvProblem) and each.reads == last][:1]
