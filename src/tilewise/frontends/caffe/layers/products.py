"""Layers that multiply by a matrix: inner products, embeddings, and inner products with an angular margin."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops, choice
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["Embed", "InnerProduct", "MarginInnerProduct"]


@register("InnerProduct")
class InnerProduct(Layer):
    """All axes from ``axis`` on, taken as K values, times a matrix (num_output, K), plus a bias (num_output,).

    With ``transpose`` the blob is (K, num_output). Else ``linear`` is torch's module, so that
    :func:`tilewise.optimize` plans it.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.inner_product_param
        self.first = self.axis(p.axis, shapes[0])
        self.inputs, self.num_output = math.prod(shapes[0][self.first :]), int(p.num_output)
        self.transpose, self.has_bias = bool(p.transpose), bool(p.bias_term)
        if self.num_output < 1:
            self.fail(f"num_output = {self.num_output}; at least 1 would do")
        if self.transpose:
            self.add_blob("weight", (self.inputs, self.num_output), p.weight_filler)
            if self.has_bias:
                self.add_blob("bias", (self.num_output,), p.bias_filler)
        else:
            self.linear = nn.Linear(
                self.inputs, self.num_output, bias=self.has_bias, device="meta", dtype=torch.float32
            )
            self.add_blob("weight", (self.num_output, self.inputs), p.weight_filler, "linear")
            if self.has_bias:
                self.add_blob("bias", (self.num_output,), p.bias_filler, "linear")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        inputs = math.prod(shapes[0][self.first :])
        if inputs != self.inputs:
            self.fail(
                f"a bottom of shape {shapes[0]} has {inputs} values behind axis {self.first}; {self.inputs}, for which "
                f"its weights of shape {tuple(self.blob(0).shape)} are made, would do"
            )
        return [(*shapes[0][: self.first], self.num_output)]

    def forward(self, x: Tensor) -> Tensor:
        """The products, of shape (*axes before ``axis``, num_output)."""
        rows = x.flatten(self.first) if self.first < x.dim() - 1 else x
        if not self.transpose:
            found: Tensor = self.linear(rows)
            return found
        return F.linear(rows, self.weight.t(), self.bias if self.has_bias else None)


@register("Embed")
class Embed(Layer):
    """For each whole number of the bottom that row of a matrix (input_dim, num_output), plus a bias."""

    weight: nn.Parameter
    bias: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.embed_param
        self.num_output, self.has_bias = int(p.num_output), bool(p.bias_term)
        if self.num_output < 1 or p.input_dim < 1:
            self.fail(f"num_output = {self.num_output}, input_dim = {p.input_dim}; at least 1 would do")
        self.add_blob("weight", (p.input_dim, self.num_output), p.weight_filler)
        if self.has_bias:
            self.add_blob("bias", (self.num_output,), p.bias_filler)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [(*shapes[0], self.num_output)]

    def forward(self, x: Tensor) -> Tensor:
        """The rows, of shape (*bottom's, num_output)."""
        rows = F.embedding(x.to(torch.int64), self.weight)
        return rows + self.bias if self.has_bias else rows


MARGINS = {"SINGLE": 1, "DOUBLE": 2, "TRIPLE": 3, "QUADRUPLE": 4}


@register("MarginInnerProduct")
class MarginInnerProduct(Layer):
    """Inner products with rows of length 1 that make the angle to a sample's own class m times as large.

    The bottoms are features (N, K) and labels (N,). A second top has lambda, the weight of the plain product, which
    falls with each forward in training (Liu et al. 2017, SphereFace). Each forward in training scales the blob's rows
    to length 1; no gradient goes through the scaling.
    """

    weight: nn.Parameter

    bottoms: ClassVar = (2, 2)
    tops: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.margin_inner_product_param
        self.first = self.axis(p.axis, shapes[0])
        self.inputs, self.num_output = math.prod(shapes[0][self.first :]), int(p.num_output)
        if self.num_output < 1:
            self.fail(f"num_output = {self.num_output}; at least 1 would do")
        self.margin = MARGINS[choice(p, "type")]
        self.base, self.gamma, self.power = float(p.base), float(p.gamma), float(p.power)
        self.least, self.iteration = float(p.lambda_min), int(p.iteration)
        self.add_blob("weight", (self.num_output, self.inputs), p.weight_filler)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if math.prod(shapes[0][self.first :]) != self.inputs:
            self.fail(f"a bottom of shape {shapes[0]} does not have {self.inputs} values behind axis {self.first}")
        if math.prod(shapes[1]) != math.prod(shapes[0][: self.first]):
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; one label for each sample would do")
        return [(*shapes[0][: self.first], self.num_output), (1,)][: self.top_count]

    def forward(self, x: Tensor, labels: Tensor) -> Tops:
        """The products (N, num_output), and with a second top lambda (1,)."""
        if self.training:
            self.iteration += 1
        share = max(self.base * (1 + self.gamma * self.iteration) ** -self.power, self.least)
        rows = x.flatten(self.first)
        lengths = self.weight.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self.training:
            with torch.no_grad():
                self.weight.div_(lengths)
            weight: Tensor = self.weight
        else:
            weight = self.weight / lengths
        products = F.linear(rows, weight)
        if self.margin > 1:
            places = labels.reshape(-1, 1).to(torch.int64)
            lengths_x = rows.norm(dim=1, keepdim=True)
            cosines = (products.gather(1, places) / lengths_x.clamp_min(1e-12)).clamp(-1, 1)
            own = (share * cosines + self._psi(cosines)) / (1 + share) * lengths_x
            products = products.scatter(1, places, own)
        return (products, x.new_full((1,), share)) if self.top_count == 2 else products

    def _psi(self, cosines: Tensor) -> Tensor:
        """(-1)^k cos(m a) - 2 k for angles a between k pi / m and (k + 1) pi / m, which falls with a throughout."""
        with torch.no_grad():
            k = (self.margin * cosines.acos() / math.pi).floor().clamp(0, self.margin - 1)
            signs = 1 - 2 * (k % 2)
        squares = cosines * cosines
        multiples = {
            1: cosines,
            2: 2 * squares - 1,
            3: (4 * squares - 3) * cosines,
            4: 8 * squares * (squares - 1) + 1,
        }
        return signs * multiples[self.margin] - 2 * k
