"""The problems of fused layers: in each layout worth planning, and how a step's tensors are seen as the problem's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewise.machine.device import conv_precision, device_name, matmul_precision
from tilewise.nn.regions import fused
from tilewise.nn.regions.units import Strides, Unit, normal, value_of
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.base import DTYPE_NAMES, Problem, dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["Product", "axes_of", "products_of", "weight_shape"]


COLOURS = 4
"""The channels of an image up to which a convolution may read it contiguous and give channels_last."""
LONGEST = 64
"""The longest side of the images that rows of a matrix are seen as on a GPU."""


@dataclass(frozen=True)
class Product:
    """A problem that computes a fused layer. Its input and residual are in the format ``reads``, its result ``gives``.

    ``shapes`` and ``strides`` are those of the problem's tensors by role: of a linear layer that is computed as a
    convolution, they are other views of the same memory.
    """

    problem: Problem
    reads: Strides
    gives: Strides

    def described(self, role: str) -> tuple[tuple[int, ...], Strides]:
        """Shape and strides of the problem's tensor of ``role``."""
        shape = self.problem.shape(role)
        return shape, dense_strides(shape, self.problem.layout(role))


def products_of(unit: Unit) -> list[Product]:
    """The problems by which a fused layer may be computed; none where its dtype is not planned."""
    x = value_of(unit.inputs[0])
    known = x.device.type in ("cpu", "cuda")
    if x.dtype not in DTYPE_NAMES or value_of(unit.node).dtype is not x.dtype or not x.numel() or not known:
        return []
    try:
        return list(_convolutions(unit) if unit.node.target is fused.convolution else _linears(unit))
    except ValueError:  # an empty result or the like, which torch computes
        return []


def _convolutions(unit: Unit) -> Iterator[Product]:
    """A convolution with contiguous tensors, and of images with channels_last ones.

    Images of few channels, such as a network's input, may be contiguous where the result is not.
    """
    arguments: Any = unit.node.args
    x, w, b, residual, activation, *_, groups = arguments
    given: Any = value_of(x)
    weight, axes = weight_shape(w), axes_of(unit.node)
    on_gpu = given.device.type == "cuda"
    for read, written in _layouts(given, groups, len(axes)):
        problem = ConvProblem(
            Pass.FPROP,
            batch=given.shape[0],
            in_channels=given.shape[1],
            out_channels=weight[0],
            axes=axes,
            groups=groups,
            dtype=DTYPE_NAMES[given.dtype],
            bias=b is not None,
            residual=residual is not None,
            activation=activation,
            constant_weight=True,
            layouts=(read, written, written),
            precision=conv_precision() if on_gpu else "ieee",
            device=device_name(given.device),
        )
        shape = problem.shape("y")
        yield Product(
            problem, normal(given.shape, dense_strides(given.shape, read)), normal(shape, dense_strides(shape, written))
        )


def _layouts(x: torch.Tensor, groups: int, dims: int) -> list[tuple[str, str]]:
    """The layouts that a convolution of ``x`` is planned in: of its input, and of its result."""
    contiguous, last = ("contiguous", "contiguous"), ("channels_last", "channels_last")
    if dims != 2:
        return [contiguous]
    if x.device.type == "cuda":
        # Matrix units read channels side by side: of 16 bits all else is a copy into this layout first.
        return [last] if groups == 1 and x.element_size() == 2 else [contiguous, last]
    colours = [("contiguous", "channels_last")] if groups == 1 and x.shape[1] <= COLOURS else []
    return [contiguous, last, *colours]


def _linears(unit: Unit) -> Iterator[Product]:
    """A linear layer as a matrix product, and as a convolution of pixels whose weight is prepared once."""
    arguments: Any = unit.node.args
    x, w, b, residual, activation = arguments
    given = value_of(x)
    rows, inputs = given.shape
    outputs = weight_shape(w)[0]
    reads, gives = normal((rows, inputs), (inputs, 1)), normal((rows, outputs), (outputs, 1))
    dtype, device, on_gpu = DTYPE_NAMES[given.dtype], device_name(given.device), given.device.type == "cuda"
    if residual is None and activation in ACTIVATIONS:
        product = GemmProblem(
            rows,
            outputs,
            inputs,
            "NT",
            dtype=dtype,
            bias=b is not None,
            activation=activation,
            precision=matmul_precision() if on_gpu else "ieee",
            device=device,
        )
        yield Product(product, reads, gives)
    images, height, width = _divided(rows) if on_gpu else (1, rows, 1)
    problem = ConvProblem(
        Pass.FPROP,
        batch=images,
        in_channels=inputs,
        out_channels=outputs,
        axes=(Axis(height, 1), Axis(width, 1)),
        dtype=dtype,
        bias=b is not None,
        residual=residual is not None,
        activation=activation,
        constant_weight=True,
        layouts=("channels_last",) * 3,
        precision=conv_precision() if on_gpu else "ieee",
        device=device,
    )
    yield Product(problem, reads, gives)


def _divided(rows: int) -> tuple[int, int, int]:
    """Images, height and width of as many pixels: cuDNN's kernels fill their tiles with pixels of usual images.

    >>> _divided(100352)
    (28, 56, 64)
    """
    width = next(n for n in range(min(rows, LONGEST), 0, -1) if rows % n == 0)
    height = next(n for n in range(min(rows // width, LONGEST), 0, -1) if rows // width % n == 0)
    return rows // width // height, height, width


def axes_of(convolution: fx.Node) -> tuple[Axis, ...]:
    """The axes in space of a fused convolution."""
    arguments: Any = convolution.args
    x, w, _, _, _, stride, padding, dilation, _ = arguments
    return tuple(
        Axis(n, k, s, d, p, p)
        for n, k, s, d, p in zip(value_of(x).shape[2:], weight_shape(w)[2:], stride, dilation, padding, strict=True)
    )


def weight_shape(node: Any) -> tuple[int, ...]:
    """The shape of a constant weight: folding changes its values alone."""
    while not isinstance(node.meta.get("val"), torch.Tensor):
        node = node.args[0]
    return tuple(node.meta["val"].shape)
