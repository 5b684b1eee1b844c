"""Layers that the papers measured, and problems made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.machine.device import device_name
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass


@dataclass(frozen=True)
class Layer:
    """A layer with cubic images and kernels: sizes in elements, ``dims`` spatial axes."""

    name: str
    batch: int
    in_channels: int
    out_channels: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 0

    def problem(
        self,
        pass_: Pass,
        device: torch.device,
        *,
        batch: int = 0,
        dtype: str = "fp32",
        precision: str = "ieee",
        layout: str = "contiguous",
    ) -> ConvProblem:
        """One pass of this layer, 2-D; ``batch`` replaces the paper's."""
        axis = Axis(self.size, self.kernel, self.stride, before=self.padding, after=self.padding)
        return convolution(
            pass_,
            device,
            batch or self.batch,
            self.in_channels,
            self.out_channels,
            (axis, axis),
            dtype=dtype,
            precision=precision,
            layout=layout,
        )


def convolution(
    pass_: Pass,
    device: torch.device,
    batch: int,
    in_channels: int,
    out_channels: int,
    axes: Sequence[Axis],
    *,
    dtype: str = "fp32",
    precision: str = "ieee",
    layout: str = "contiguous",
) -> ConvProblem:
    """A problem whose three tensors have one layout."""
    return ConvProblem(
        pass_,
        batch,
        in_channels,
        out_channels,
        tuple(axes),
        dtype=dtype,
        precision=precision,
        layouts=(layout, layout, layout),
        device=device_name(device),
    )


FBFFT_TABLE_4 = (
    Layer("L1", 128, 3, 96, 128, 11),
    Layer("L2", 128, 64, 64, 64, 9),
    Layer("L3", 128, 128, 128, 32, 9),
    Layer("L4", 128, 128, 128, 16, 7),
    Layer("L5", 128, 384, 384, 13, 3),
)
"""Vasilache et al. 2014, Table 4: S = 128, no padding."""

ALEXNET = (
    Layer("conv1", 256, 3, 64, 224, 11, stride=4, padding=2),
    Layer("conv2", 256, 64, 192, 27, 5, padding=2),
    Layer("conv3", 256, 192, 384, 13, 3, padding=1),
    Layer("conv4", 256, 384, 384, 13, 3, padding=1),
    Layer("conv5", 256, 384, 256, 13, 3, padding=1),
)
"""One-column AlexNet with the sizes and the batch that mu-cuDNN measured (Oyama et al. 2018, Section IV)."""

OVERFEAT_FAST = (
    Layer("conv1", 128, 3, 96, 231, 11, stride=4),
    Layer("conv2", 128, 96, 256, 28, 5),
    Layer("conv3", 128, 256, 512, 12, 3, padding=1),
    Layer("conv4", 128, 512, 1024, 12, 3, padding=1),
    Layer("conv5", 128, 1024, 1024, 12, 3, padding=1),
)
"""OverFeat's fast model (Sermanet et al. 2014, Table 1) with the batch of Vasilache et al. 2014, Table 3."""

PASSES = {pass_.value: pass_ for pass_ in Pass}
"""Passes by name."""


def by_name(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Layers by name."""
    return {layer.name: layer for layer in layers}
