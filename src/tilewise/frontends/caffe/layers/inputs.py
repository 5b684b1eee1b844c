"""The layer without bottoms that is no source of data: a blob that is learned by itself."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import MOST_AXES, MOST_ELEMENTS, Layer, Shape
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["Parameter"]


def checked_shape(layer: Layer, dims: Any) -> Shape:
    """Sizes from a file as a shape. Raises ``CaffeError`` for what no blob has."""
    shape = tuple(int(size) for size in dims)
    if len(shape) > MOST_AXES or min(shape, default=1) < 0 or math.prod(shape) > MOST_ELEMENTS:
        layer.fail(f"shape = {list(shape)}; at most {MOST_AXES} sizes with at most {MOST_ELEMENTS} elements would do")
    return shape


@register("Parameter")
class Parameter(Layer):
    """A blob of its own, learned like any other, as the top."""

    weight: nn.Parameter

    bottoms: ClassVar = (0, 0)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.add_blob("weight", checked_shape(self, parameter.parameter_param.shape.dim), 0.0)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [tuple(self.weight.shape)]

    def forward(self) -> Tensor:
        return self.weight
