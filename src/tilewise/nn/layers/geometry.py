"""A layer's geometry in torch's terms, the problems of its three passes, and torch's own way to compute them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.nn.layers.weights import Weights
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

__all__ = ["Geometry", "Role", "named_padding"]


class Role(enum.StrEnum):
    """A pass of a layer. Which :class:`Pass` of the convolution it is depends on whether the layer is transposed."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


PASSES = {
    False: {Role.FORWARD: Pass.FPROP, Role.GRAD_INPUT: Pass.DGRAD, Role.GRAD_WEIGHT: Pass.WGRAD},
    True: {Role.FORWARD: Pass.DGRAD, Role.GRAD_INPUT: Pass.FPROP, Role.GRAD_WEIGHT: Pass.WGRAD},
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution layer without its sizes.

    Every tuple has one entry per spatial axis; an entry of ``padding`` is (before, after). A transposed layer computes
    the input gradient of a convolution with the same numbers: the layer's input is ``y`` of that convolution's problem,
    and its output is ``x``.
    """

    dims: int
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        dims: int,
        stride: int | Sequence[int],
        padding: int | str | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
        kernel: Sequence[int],
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
    ) -> Geometry | None:
        """The geometry of torch's arguments; ``None`` where torch itself must judge them."""
        strides, dilations = _each(stride, dims), _each(dilation, dims)
        extra = _each(output_padding, dims)
        if strides is None or dilations is None or extra is None or type(groups) is not int or len(kernel) != dims:
            return None
        if isinstance(padding, str):
            pads = named_padding(padding, strides, dilations, kernel)
        else:
            sides = _each(padding, dims)
            pads = None if sides is None else tuple((p, p) for p in sides)
        numbers = (*strides, *dilations, groups)
        if pads is None or min(numbers) < 1 or min(min(p) for p in pads) < 0 or min(extra) < 0:
            return None
        if any(e >= s for e, s in zip(extra, strides, strict=True)):
            return None  # torch allows it below the dilation: then another convolution has this one as its gradient
        return cls(dims, strides, pads, dilations, groups, transposed, extra)

    @property
    def symmetric(self) -> bool:
        """Whether every axis is padded equally before and after, as ATen's operator requires."""
        return all(before == after for before, after in self.padding)

    def without_excess(self) -> tuple[Geometry, tuple[int, ...]]:
        """A symmetric geometry, and the padding that :func:`torch.constant_pad_nd` must add before it.

        This is how torch computes ``same``.
        """
        least = [min(p) for p in self.padding]
        excess = [(b - p, a - p) for (b, a), p in zip(self.padding, least, strict=True)]
        pads = tuple(side for pair in reversed(excess) for side in pair)
        return replace(self, padding=tuple((p, p) for p in least)), pads

    def axes(self, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[Axis, ...]:
        """The axes of the layer's problems for spatial ``sizes``. Raises ``ValueError`` where the output is empty."""
        if not self.transposed:
            return tuple(
                Axis(n, k, s, d, before, after)
                for n, k, s, d, (before, after) in zip(
                    sizes, kernel, self.stride, self.dilation, self.padding, strict=True
                )
            )
        return tuple(
            Axis((n - 1) * s - before - after + (k - 1) * d + 1 + extra, k, s, d, before, after)
            for n, k, s, d, (before, after), extra in zip(
                sizes, kernel, self.stride, self.dilation, self.padding, self.output_padding, strict=True
            )
        )

    def result_shape(self, input_shape: Sequence[int], weight_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the layer's result. Raises ``ValueError`` where the result is empty."""
        axes = self.axes(input_shape[2:], weight_shape[2:])
        if self.transposed:
            return (input_shape[0], weight_shape[1] * self.groups, *(axis.size for axis in axes))
        return (input_shape[0], weight_shape[0], *(axis.out for axis in axes))

    def problem(
        self,
        role: Role,
        input_shape: Sequence[int],
        weight_shape: Sequence[int],
        *,
        dtype: str,
        precision: str,
        bias: bool,
        layouts: tuple[str, str, str],
        alignment: tuple[int, int, int],
        device: str,
        weights: Weights = Weights.CHANGING,
    ) -> ConvProblem:
        """The problem of the pass ``role``. ``layouts`` and ``alignment`` are those of input, weight and output.

        Only in the forward pass may something be kept of a weight. Raises ``ValueError`` for sizes that do not fit.
        """
        pass_ = PASSES[self.transposed][role]
        channels = (weight_shape[1] * self.groups, weight_shape[0])
        if input_shape[1] != channels[self.transposed]:
            raise ValueError(f"input has {input_shape[1]} channels, the weight is for {channels[self.transposed]}")
        if self.transposed:
            layouts, alignment = layouts[::-1], alignment[::-1]
        return ConvProblem(
            pass_,
            batch=input_shape[0],
            in_channels=channels[0],
            out_channels=channels[1],
            axes=self.axes(input_shape[2:], weight_shape[2:]),
            groups=self.groups,
            dtype=dtype,
            precision=precision,
            bias=bias and role is Role.FORWARD,
            layouts=layouts,
            alignment=alignment,
            device=device,
            constant_weight=role is Role.FORWARD and weights is not Weights.CHANGING,
            checked_weight=role is Role.FORWARD and weights is Weights.CHECKED,
        )

    def torch_forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, computed by torch."""
        if not self.symmetric:
            symmetric, pads = self.without_excess()
            return symmetric.torch_forward(torch.constant_pad_nd(x, pads), w, b)
        sides = [before for before, _ in self.padding]
        return torch.convolution(
            x, w, b, self.stride, sides, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def torch_backward(
        self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of input, weight and bias that ``mask`` asks for, by torch, and differentiable themselves."""
        if not self.symmetric:
            symmetric, pads = self.without_excess()
            dx, dw, db = symmetric.torch_backward(dy, torch.constant_pad_nd(x, pads), w, mask)
            return None if dx is None else torch.constant_pad_nd(dx, [-n for n in pads]), dw, db
        sides = [before for before, _ in self.padding]
        channels = [w.shape[1] * self.groups if self.transposed else w.shape[0]]
        grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
        grads = torch.ops.aten.convolution_backward.default(
            dy, x, w, channels if mask[2] else None, self.stride, sides, self.dilation, self.transposed,
            self.output_padding, self.groups, mask,
        )  # fmt: skip
        return grads


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...] | None:
    """One whole number per axis; ``None`` where the value is something else."""
    if isinstance(value, int):
        value = (value,)
    if not isinstance(value, (tuple, list)) or not all(type(v) is int for v in value):
        return None
    values = tuple(value) * dims if len(value) == 1 else tuple(value)
    return values if len(values) == dims else None


def named_padding(
    name: str, stride: Sequence[int], dilation: Sequence[int], kernel: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """The padding ``same`` or ``valid`` as (before, after) per axis; ``None`` for others and ``same`` with strides."""
    if name == "valid":
        return ((0, 0),) * len(kernel)
    if name != "same" or any(s != 1 for s in stride):
        return None
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)
