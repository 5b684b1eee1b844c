"""Layers that combine bottoms element by element, and those that reduce axes to a number or a place."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops, choice
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["Accuracy", "ArgMax", "Axpy", "Eltwise", "Reduction"]


@register("Eltwise")
class Eltwise(Layer):
    """The sum of the bottoms times ``coeff``, their product, or their maximum.

    Where bottoms are equal, the gradient of the maximum goes to the later of the first two, and to the earlier
    afterwards, as in Caffe. ``stable_prod_grad`` has no effect: the gradient of the product is always the stable one.
    """

    bottoms: ClassVar = (2, None)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.eltwise_param
        self.operation, self.coefficients = choice(p, "operation"), [float(value) for value in p.coeff]
        if self.coefficients and len(self.coefficients) != len(shapes):
            self.fail(f"coeff = {self.coefficients} for {len(shapes)} bottoms; one for each would do")
        if self.coefficients and self.operation != "SUM":
            self.fail(f"coeff = {self.coefficients} belongs to operation = SUM, not {self.operation}")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_equal(shapes)
        return shapes[:1]

    def forward(self, *bottoms: Tensor) -> Tensor:
        if self.coefficients:
            bottoms = tuple(x if c == 1 else x * c for x, c in zip(bottoms, self.coefficients, strict=True))
        found = bottoms[0]
        for x in bottoms[1:]:
            if self.operation == "SUM":
                found = found + x
            elif self.operation == "PROD":
                found = found * x
            elif x is bottoms[1]:
                found = torch.where(found > x, found, x)
            else:
                found = torch.where(x > found, x, found)
        return found


@register("Axpy")
class Axpy(Layer):
    """a * x + y with one factor for each channel: the bottoms are a (N, C, 1, 1), x and y (N, C, H, W) (SENet)."""

    bottoms: ClassVar = (3, 3)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_equal(shapes[1:])
        if shapes[0][:2] != shapes[1][:2] or math.prod(shapes[0][2:]) != 1:
            self.fail(f"the first bottom has shape {shapes[0]}; {(*shapes[1][:2], 1, 1)} would do")
        return shapes[1:2]

    def forward(self, a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(y, a.reshape(*a.shape[:2], *(1,) * (x.dim() - 2)), x)


@register("Reduction")
class Reduction(Layer):
    """``coeff`` times the sum, the sum of absolute values or of squares, or the mean, of all axes from ``axis`` on."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.reduction_param
        self.operation, self.coefficient = choice(p, "operation"), float(p.coeff)
        self.first = self.axis(p.axis, shapes[0]) if shapes[0] else 0

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [shapes[0][: self.first]]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(*x.shape[: self.first], -1)
        if self.operation == "ASUM":
            rows = rows.abs()
        elif self.operation == "SUMSQ":
            rows = rows.square()
        return (rows.mean(-1) if self.operation == "MEAN" else rows.sum(-1)) * self.coefficient


@register("ArgMax")
class ArgMax(Layer):
    """The places, or with ``out_max_val`` the values, of the ``top_k`` largest elements along ``axis``.

    Without an axis the largest of all elements of each image: (N, 1, top_k), or (N, 2, top_k) with places and values.
    Of equal values those at later places come first.
    """

    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.argmax_param
        self.values, self.top_k = bool(p.out_max_val), int(p.top_k)
        self.along = self.axis(p.axis, shapes[0]) if p.HasField("axis") else None

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape = shapes[0]
        size = math.prod(shape[1:]) if self.along is None else shape[self.along]
        if not 1 <= self.top_k <= size:
            self.fail(f"top_k = {self.top_k}; 1 to {size} would do")
        if self.along is not None:
            return [(*shape[: self.along], self.top_k, *shape[self.along + 1 :])]
        return [(shape[0], 2 if self.values else 1, self.top_k, *(1,) * (len(shape) - 3))]

    def forward(self, x: Tensor) -> Tensor:
        """Places count as numbers of ``x``'s type."""
        x = x.detach()
        along = 1 if self.along is None else self.along
        rows = x.flatten(1) if self.along is None else x
        # From behind, and stable: so that the later of equal values comes first.
        values, places = rows.flip(along).sort(dim=along, descending=True, stable=True)
        values = values.narrow(along, 0, self.top_k)
        places = (rows.shape[along] - 1 - places.narrow(along, 0, self.top_k)).to(x.dtype)
        if self.along is not None:
            return values if self.values else places
        found = torch.stack([places, values], 1) if self.values else places[:, None]
        return found.reshape(self.output_shapes([tuple(x.shape)])[0])


@register("Accuracy")
class Accuracy(Layer):
    """The share of labels that are among the ``top_k`` largest scores, and of each class in a second top.

    The bottoms are scores with classes along ``axis``, and labels for all other axes. A class that scores as high as
    the label's counts as better. Labels equal to ``ignore_label`` do not count; without any other the share is 0.
    """

    bottoms: ClassVar = (2, 2)
    tops: ClassVar = (1, 2)
    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.accuracy_param
        self.top_k, self.along = int(p.top_k), self.axis(p.axis, shapes[0])
        self.ignored = int(p.ignore_label) if p.HasField("ignore_label") else None

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape, labels = shapes
        if math.prod(shape) // shape[self.along] != math.prod(labels):
            self.fail(f"the bottoms have shapes {shape} and {labels}; one label for each place of the scores would do")
        if not 1 <= self.top_k <= shape[self.along]:
            self.fail(f"top_k = {self.top_k}; 1 to {shape[self.along]}, the number of classes, would do")
        return [(), (shape[self.along],)][: self.top_count]

    def forward(self, scores: Tensor, labels: Tensor) -> Tops:
        scores = scores.detach()
        classes = scores.shape[self.along]
        rows = scores.movedim(self.along, -1).reshape(-1, classes)
        places = labels.detach().flatten().to(torch.int64)
        counts = torch.ones_like(places, dtype=torch.bool) if self.ignored is None else places != self.ignored
        places = torch.where(counts, places, torch.zeros_like(places))
        own = rows.gather(1, places[:, None])
        hits = ((rows >= own).sum(1) <= self.top_k) & counts
        share = hits.sum().to(scores.dtype) / counts.sum().clamp_min(1)
        if self.top_count == 1:
            return share
        zeros = scores.new_zeros(classes)
        seen = zeros.index_add(0, places, counts.to(scores.dtype))
        right = zeros.index_add(0, places, hits.to(scores.dtype))
        return share, right / seen.clamp_min(1)
