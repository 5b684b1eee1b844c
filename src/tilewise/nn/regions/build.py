"""From the chosen ways of a region's parts to its program: slots, steps, views and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tilewise import execute
from tilewise.nn.programs.pixels import KernelCall
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.rows import ALIGNMENT, RowNorm
from tilewise.nn.programs.slots import Operator, Place, Slot, Step, copied
from tilewise.nn.regions.constants import Constants, Gathered, Wanted
from tilewise.nn.regions.fused import Call
from tilewise.nn.regions.layouts import Way
from tilewise.nn.regions.products import Product
from tilewise.nn.regions.units import Strides, Unit, normal, value_of
from tilewise.nn.regions.ways import Deferred, OnFilter, Planned, View
from tilewise.problems.base import dense_strides, layout_of

__all__ = ["Builder"]

FORMATS = {
    ("contiguous", 0): torch.contiguous_format,
    ("channels_last", 4): torch.channels_last,
    ("channels_last", 5): torch.channels_last_3d,
}
"""What torch calls a layout of tensors with so many dimensions; 0 for any number."""
Bindings = dict[tuple[Any, Any], Any]


class Builder:
    """Slots and steps of a program, which grow as parts are added in order.

    ``constants`` keeps what is computed from parameters. All tensors are on ``device``. Equal plans are bound once.
    """

    def __init__(self, constants: Constants, device: torch.device) -> None:
        self._constants, self._device = constants, device
        self._slots: list[Slot] = []
        self._steps: list[Step] = []
        self._inputs: list[int] = []
        self._places: dict[tuple[fx.Node, Strides], int] = {}
        self._natural: dict[fx.Node, Strides] = {}
        self._held: dict[Wanted, int] = {}
        self._bound: Bindings = {}
        self._scaled: dict[fx.Node, int] = {}
        """The filters that gates were multiplied with, by gate."""
        self.conversions = 0

    def give(self, node: fx.Node, tensor: Tensor) -> None:
        """Let ``node`` be an input of the program that lies as ``tensor`` does."""
        strides = normal(tensor.shape, tensor.stride())
        slot = Slot(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, "input")
        self._inputs.append(self._new(slot))
        self._hold(node, strides, self._inputs[-1])

    def add(self, unit: Unit, way: Way, constant: set[fx.Node]) -> None:
        """Add one part, run in one of its ways."""
        places = [
            None if node in constant else self._in_format(node, strides)
            for node, strides in zip(unit.inputs, way.reads, strict=True)
        ]
        if isinstance(way.what, View):
            (base,) = places[:1]
            assert base is not None
            value = unit.value
            self._hold(unit.node, way.gives, self._view(base, tuple(value.shape), way.gives, way.what.offset))
        elif isinstance(way.what, Deferred):
            (first,) = places[:1]
            assert first is not None
            self._hold(unit.node, way.gives, first)  # what the layer reads, for the one that computes it
        elif isinstance(way.what, OnFilter):
            self._hold(unit.node, way.gives, self._on_filter(unit, way.what, places))
        elif isinstance(way.what, Planned):
            self._hold(unit.node, way.gives, self._planned(unit, way.what, places))
        else:
            inputs = [
                self._constant(node, tuple(value_of(node).shape), value_of(node).stride(), value_of(node).dtype)
                if place is None
                else place
                for node, place in zip(unit.inputs, places, strict=True)
            ]
            if isinstance(way.what, RowNorm):
                inputs = [self._aligned(place, ALIGNMENT) for place in inputs]
            output = self._new(Slot(tuple(unit.value.shape), way.gives, unit.value.dtype))
            if isinstance(way.what, Call | KernelCall | RowNorm):
                step = Step(unit.name, tuple(inputs), output, run=way.what, returns_new=isinstance(way.what, Call))
            else:
                step = Step(unit.name, tuple(inputs), output, operator=way.what)
            self._steps.append(step)
            self._hold(unit.node, way.gives, output)

    @property
    def last_step(self) -> int:
        """The number of the step that was added last."""
        return len(self._steps) - 1

    def finish(self, results: Sequence[tuple[fx.Node, Strides]]) -> Program:
        """The program, whose results are these nodes in these formats."""
        outputs = [self._in_format(node, strides) for node, strides in results]
        for index in outputs:
            root = index
            while (base := self._slots[root].view_of) is not None:
                root = base
            self._slots[root] = replace(self._slots[root], kind="output")
        return Program(self._slots, self._steps, self._inputs, outputs, self._device)

    def _new(self, slot: Slot) -> int:
        """The index of a new slot."""
        self._slots.append(slot)
        return len(self._slots) - 1

    def _hold(self, node: fx.Node, strides: Strides, place: int) -> None:
        """Remember where the tensor of ``node`` lies in a format, the first of which it was given in."""
        self._places[node, strides] = place
        self._natural.setdefault(node, strides)

    def _view(self, base: int, shape: tuple[int, ...], strides: Strides, offset: int = 0) -> int:
        """The slot of a view of slot ``base``."""
        return self._new(Slot(shape, strides, self._slots[base].dtype, view_of=base, offset=offset))

    def _in_format(self, node: fx.Node, strides: Strides) -> int:
        """The slot of a tensor in a format, which it is converted into where it does not lie so."""
        place = self._places.get((node, strides))
        if place is not None:
            return place
        source = self._places[node, self._natural[node]]
        shape = self._slots[source].shape
        output = self._new(Slot(shape, strides, self._slots[source].dtype))
        layout = layout_of(shape, strides)
        name = f"{node.name} to {layout}"
        of_torch = FORMATS.get((layout, len(shape)), FORMATS.get((layout, 0)))
        if of_torch is not None and normal(shape, dense_strides(shape, layout)) == strides:
            clone = Operator(torch.ops.aten.clone.default, (Place(0),), {"memory_format": of_torch})
            self._steps.append(Step(name, (source,), output, operator=clone))
        else:
            self._steps.append(Step(name, (source,), output, run=copied))
        self.conversions += 1
        self._hold(node, strides, output)
        return output

    def _constant(self, node: fx.Node | Gathered, shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> int:
        """The slot that holds a constant."""
        wanted = Wanted(node, shape, tuple(strides), dtype)
        if wanted not in self._held:
            self._held[wanted] = self._new(Slot.like(self._constants.keep(wanted), "constant"))
        return self._held[wanted]

    def _on_filter(self, unit: Unit, what: OnFilter, places: Sequence[int | None]) -> int:
        """The slot of a gate's image, which the layer behind it reads, once the step is there that scales its filter.

        The kernel takes a filter for an image: its outputs are pixels.
        """
        image, gate = places[what.image], places[1 - what.image]
        assert image is not None
        assert gate is not None
        shape = what.call.shape
        _, channels, outputs, _ = shape
        strides = dense_strides(shape, "channels_last")
        dtype = unit.value.dtype
        weight = self._constant(what.weight, (outputs, channels, 1, 1), (channels, 1, 1, 1), dtype)
        scaled = self._new(Slot(shape, strides, dtype))
        self._steps.append(Step(unit.name, (self._view(weight, shape, strides), gate), scaled, run=what.call))
        self._scaled[unit.node] = self._view(scaled, (outputs, channels, 1, 1), (channels, 1, 1, 1))
        return image

    def _planned(self, unit: Unit, planned: Planned, places: Sequence[int | None]) -> int:
        """The slot of the result of a fused layer or a pooling that runs by a plan."""
        product, problem = planned.product, planned.product.problem
        first, result = problem.operands[0], problem.results[0]
        inputs = [self._seen(places[0], product, first)]
        if len(problem.operands) > 1:
            inputs += self._added(unit, planned, places[-1])
        shape, strides = product.described(result)
        output = self._new(Slot(shape, strides, problem.torch_dtype(result)))
        key = problem, planned.plan
        if key not in self._bound:
            filters = [self._slots[index].tensor for index in inputs[1 : len(problem.operands)]]
            example = torch.empty_strided(
                *product.described(first), dtype=problem.torch_dtype(first), device=self._device
            )
            self._bound[key] = execute.bind(planned.plan, problem, example, *filters)
        self._steps.append(Step(unit.name, tuple(inputs), output, plan=self._bound[key]))
        own = tuple(unit.value.shape)
        return output if own == shape else self._view(output, own, product.gives)

    def _added(self, unit: Unit, planned: Planned, residual: int | None) -> list[int]:
        """The slots of what a fused layer's plan reads besides its input: the weight, the bias and the residual."""
        product, problem = planned.product, planned.product.problem
        result = problem.results[0]
        weight, bias = planned.weight or unit.node.args[1], unit.node.args[2]
        shape, strides = product.described(problem.operands[1])
        dtype = problem.torch_dtype(problem.operands[1])
        assert isinstance(weight, fx.Node | Gathered)
        inputs = [
            self._scaled[unit.node.args[0]]  # type: ignore[index]
            if planned.scaled
            else self._constant(weight, shape, strides, dtype)
        ]
        if isinstance(bias, fx.Node) and problem.bias:
            channels = problem.shape(result)[problem.bias_dim]
            inputs.append(self._constant(bias, (channels,), (1,), problem.torch_dtype(result)))
        if unit.node.args[3] is not None:
            inputs.append(self._seen(residual, product, result))
        return inputs

    def _aligned(self, place: int, alignment: int) -> int:
        """The slot, or that of a copy where a view begins between two multiples of ``alignment`` bytes."""
        offset, base = 0, place
        while (below := self._slots[base].view_of) is not None:
            offset, base = offset + self._slots[base].offset, below
        writer = next((step for step in self._steps if step.output == base), None)
        slot = self._slots[place]
        if offset * slot.dtype.itemsize % alignment == 0 and not (writer is not None and writer.may_alias):
            return place
        copy = self._new(Slot(slot.shape, slot.strides, slot.dtype))
        self._steps.append(Step("aligned copy", (place,), copy, run=copied))
        return copy

    def _seen(self, place: int | None, product: Product, role: str) -> int:
        """A slot as the problem sees it: of a linear layer that is a convolution, a view of the matrix."""
        assert place is not None
        shape, strides = product.described(role)
        place = self._aligned(place, product.problem.alignment_of(role))
        return place if self._slots[place].shape == shape else self._view(place, shape, strides)
