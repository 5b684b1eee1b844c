"""Which parts of a region our kernels compute: means, gates of channels, images that are joined, norms, poolings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewise.machine.device import device_name
from tilewise.nn.programs.joined import Joined
from tilewise.nn.programs.pixels import MOST_PIXELS, KernelCall, Pixels
from tilewise.nn.programs.rows import RowNorm, can_run
from tilewise.nn.programs.slots import Place
from tilewise.nn.regions.products import Product
from tilewise.nn.regions.units import Strides, Unit, formats, normal, value_of
from tilewise.problems.base import DTYPE_NAMES, dense_strides
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.base import SolverUnavailable

__all__ = ["join_ways", "norm_ways", "pixel_ways", "pooling_products"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
MEANS = (torch.ops.aten.mean.dim,)
PRODUCTS = (torch.ops.aten.mul.Tensor,)
POOLINGS = {
    torch.ops.aten.max_pool2d_with_indices.default: "max", torch.ops.aten.max_pool3d_with_indices.default: "max",
    torch.ops.aten.avg_pool2d.default: "avg", torch.ops.aten.avg_pool3d.default: "avg",
}  # fmt: skip
NAMES = {
    "max": ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    "avg": ("kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor"),
}
"""What the arguments of these operators are, behind the images."""
SIZES = ("kernel", "stride", "padding", "dilation")


def pixel_ways(unit: Unit) -> Iterator[tuple[Pixels, tuple[Strides, ...], Strides]]:
    """The call of ours that computes a part, if there is one, with the formats that it reads and the one it gives."""
    values = [value_of(node) for node in unit.inputs]
    if any(t.dtype is not torch.float32 or t.dim() != 4 or not t.numel() or t.device.type != "cpu" for t in values):
        return
    found = _call(unit, values)
    if found is not None and _is_there(found):
        yield found, *_formats(found)


def join_ways(unit: Unit) -> Iterator[tuple[Joined, tuple[Strides, ...], Strides]]:
    """As :func:`pixel_ways`, for images that are joined, scaled and shifted."""
    *parts, _, _ = unit.inputs
    if any(value_of(node).device.type != "cpu" or not value_of(node).numel() for node in parts):
        return
    images, _, height, width = unit.value.shape
    channels = tuple(value_of(node).shape[1] for node in parts)
    found = Joined(images, channels, height, width, str(unit.node.args[3]))
    if _is_there(found):
        yield found, *_formats(found)


def norm_ways(unit: Unit) -> Iterator[tuple[RowNorm, tuple[Strides, ...], Strides]]:
    """As :func:`pixel_ways`, for layer normalization over the last dimension on a GPU."""
    if unit.overload is not torch.ops.aten.native_layer_norm.default or unit.result:
        return
    place, shape, weight, bias, eps, *_ = unit.arguments
    x, columns = value_of(unit.inputs[0]), unit.value.shape[-1]
    alike = all(value_of(node).dtype is x.dtype for node in unit.inputs) and x.dtype in TYPES
    if place != Place(0) or list(shape) != [columns] or not alike or not can_run(columns, x.device) or not x.numel():
        return
    norm = RowNorm(tuple(x.shape), float(eps), weight is not None, bias is not None, x.dtype)
    contiguous = formats(x.shape)[0]
    yield norm, (contiguous, *[(1,)] * (len(unit.inputs) - 1)), contiguous


def pooling_products(unit: Unit) -> Iterator[Product]:
    """The problems by which a pooling may be computed, one for each layout; none for what is torch's to compute."""
    op = POOLINGS.get(unit.overload)
    if op is None or unit.result or unit.keywords or unit.arguments[0] != Place(0):
        return
    x, result = value_of(unit.inputs[0]), unit.value
    dims = x.dim() - 2
    if x.dtype not in TYPES or x.device.type not in ("cpu", "cuda") or not x.numel():
        return
    given: dict[str, Any] = dict(zip(NAMES[op], unit.arguments[1:], strict=False))
    given |= {name: _repeated(given.get(name), dims) for name in NAMES[op] if name in SIZES}
    given["stride"] = given["stride"] or given["kernel"]
    given["divisor"] = given.get("divisor") or 0
    for layout in ("contiguous", "channels_last") if dims == 2 else ("contiguous",):
        try:
            problem = PoolingProblem(
                op, x.shape[0], x.shape[1], tuple(x.shape[2:]), **given, layout_name=layout,
                dtype=DTYPE_NAMES[x.dtype], device=device_name(x.device),
            )  # fmt: skip
        except ValueError:  # sizes that are torch's to judge
            return
        if problem.shape("y") != tuple(result.shape):
            return
        reads, gives = (normal(shape, dense_strides(shape, layout)) for shape in (x.shape, result.shape))
        yield Product(problem, reads, gives)


def _repeated(sizes: Any, dims: int) -> tuple[int, ...]:
    """One number for each axis; none where nothing is given."""
    numbers = tuple(sizes or ())
    return numbers * dims if len(numbers) == 1 else numbers


def _is_there(call: KernelCall) -> bool:
    """Whether a call's kernel can be had: without Numba torch computes the part."""
    try:
        call.words()
    except SolverUnavailable:
        return False
    return True


def _formats(call: KernelCall) -> tuple[tuple[Strides, ...], Strides]:
    """The formats of a call's operands, and that of its result."""
    *reads, gives = (formats(shape)[-1] for shape in call.shapes)
    return tuple(reads), gives


def _call(unit: Unit, values: list[Tensor]) -> Pixels | None:
    """The call that computes a part."""
    result = tuple(unit.value.shape)
    if unit.overload in MEANS and unit.value.dim() == 4:
        shape, options = tuple(values[0].shape), dict(unit.keywords or {})
        arguments: list[Any] = list(unit.arguments)
        axes = sorted(axis % 4 for axis in arguments[1]) if len(arguments) > 1 and arguments[1] else []
        if axes == [2, 3] and result == (*shape[:2], 1, 1) and not any(options.values()):
            return Pixels("means", shape) if shape[2] * shape[3] <= MOST_PIXELS else None  # type: ignore[arg-type]
    elif unit.overload in PRODUCTS and unit.arguments == (Place(0), Place(1)):
        for image in (0, 1):
            shape, gate = tuple(values[image].shape), tuple(values[1 - image].shape)
            if shape == result and gate == (*shape[:2], 1, 1) and shape != gate:
                return Pixels("scaled", shape, image)  # type: ignore[arg-type]
    return None
