"""The problems that training a network's convolution layers poses: the very ones that ``tilewise.optimize`` plans."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.frontends.layers import LayerCall
from tilewise.nn.layers.call import Call, Operand
from tilewise.nn.layers.convolution import geometry_of, obstacle
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.layer import Layer as PlannedLayer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.planner import Options
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES, dense_strides
from tilewise.problems.conv.problem import ConvProblem
from tilewise.report.values import Layer

__all__ = ["grouped", "layer_of"]


def layer_of(call: LayerCall, precision: str, device: torch.device) -> Layer:
    """The passes of one layer that training computes: the gradient of its input only where it is needed."""
    name = call.name if call.count == 1 else f"{call.name} (call {call.count})"
    module: Any = call.module
    left = obstacle(module)
    if not left and call.dtype not in DTYPE_NAMES:
        left = f"computes in {call.dtype}"
    geometry = geometry_of(module)
    if left or geometry is None:
        return Layer((name,), (), module.transposed, left)
    try:
        return Layer((name,), _problems(call, geometry, precision, device), module.transposed)
    except ValueError as error:
        return Layer((name,), (), module.transposed, str(error))


def _problems(call: LayerCall, geometry: Geometry, precision: str, device: torch.device) -> tuple[ConvProblem, ...]:
    """The problem of each pass that a recorded call needs."""
    module: Any = call.module
    shape = call.input_shape if len(call.input_shape) == geometry.dims + 2 else (1, *call.input_shape)
    if module.padding_mode != "zeros":
        shape = _padded(shape, module._reversed_padding_repeated_twice)
    weight, bias = module.weight, module.bias
    needs = (call.needs_input_grad, weight.requires_grad, bias is not None and bias.requires_grad)

    def described(shape: tuple[int, ...]) -> Call:
        strides = dense_strides(shape, "contiguous" if call.layout == "view" else call.layout)
        return Call(
            x=Operand(shape, strides, ALIGNMENT),
            w=Operand.of(weight),
            dtype=call.dtype,
            device=device,
            bias=None if bias is None else len(bias),
            needs=needs,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            precision=precision if call.dtype is torch.float32 else "ieee",
            autocast=None,
        )

    plan_table = PlanTable(Options(), "torch")
    layer = PlannedLayer(geometry, plan_table)
    if layer.adapted(described(shape)) is not None:
        geometry, pads = geometry.without_excess()
        layer, shape = PlannedLayer(geometry, plan_table), _padded(shape, pads)
    return tuple(layer.problems(described(shape)).values())


def _padded(shape: tuple[int, ...], pads: tuple[int, ...]) -> tuple[int, ...]:
    """What :func:`torch.nn.functional.pad` makes of a shape; ``pads`` are pairs, the last axis first."""
    sides = [before + after for before, after in zip(pads[-2::-2], pads[::-2], strict=True)]
    kept = len(shape) - len(sides)
    return (*shape[:kept], *(size + extra for size, extra in zip(shape[kept:], sides, strict=True)))


def grouped(layers: list[Layer]) -> tuple[Layer, ...]:
    """Equal layers as one, under all their names, where the first of them stood."""
    alike: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        alike.setdefault((layer.problems, layer.transposed, layer.left), []).append(layer)
    return tuple(
        Layer(tuple(name for layer in same for name in layer.names), same[0].problems, same[0].transposed, same[0].left)
        for same in alike.values()
    )
