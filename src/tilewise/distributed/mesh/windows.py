"""The windows over an image by which pooling and interpolation read it, from an operator's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise.distributed.parts.ghosts import Reader, Resized, Sliding
from tilewise.problems.conv.axis import Axis

__all__ = ["window_of"]

TAPS = {"nearest": 1, "nearest_exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}
"""How many positions of the input along one axis an interpolated one is made of."""


def window_of(
    func: Any, args: Any, kwargs: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor], space: int
) -> tuple[tuple[Reader, ...], torch.Tensor | None]:
    """The window of a pooling or an interpolation along each of ``space`` axes, and the tensor whose halos it needs.

    ``func`` is the operator, ``args`` and ``kwargs`` are its arguments. For other operators there is no window and no
    tensor.
    """
    name = func._schema.name.removeprefix("aten::")
    is_backward = name.endswith("_backward")
    if name.startswith(("max_pool", "avg_pool")):
        named = _named_arguments(func, args, kwargs)
        x, kernel = named["self"], named["kernel_size"]
        readers = _pooling_window(
            x,
            named["grad_output"] if is_backward else results[0],
            space,
            kernel,
            named["stride"] or kernel,
            named["padding"],
            named.get("dilation", 1),
        )
        return readers, results[0] if is_backward else x
    if name.startswith(("upsample_", "_upsample_")):
        mode = name.strip("_").removeprefix("upsample_").removesuffix("_backward").rstrip("0123456789d")
        taps = TAPS.get(mode, 4)
        small, large = operands[0], results[0]
        if is_backward:
            small, large = results[0], _named_arguments(func, args, kwargs)["grad_output"]
        sizes = zip(small.shape[2:], large.shape[2:], strict=True)
        return tuple(Resized(int(size), int(out), taps) for size, out in sizes), small
    return (), None


def _named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name; torch leaves those at their defaults out of ``args``."""
    arguments = func._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    named |= kwargs
    return named


def _pooling_window(
    x: torch.Tensor, y: torch.Tensor, space: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Reader, ...]:
    """The window of a pooling from ``x`` to ``y``; none where ``x`` has another number of spatial axes."""
    if x.dim() != space + 2:
        return ()

    def per_axis(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * space if len(values) == 1 else values

    options = [per_axis(value) for value in (kernel, stride, padding, dilation)]
    readers = []
    for size, out, k, s, p, d in zip(x.shape[2:], y.shape[2:], *options, strict=True):
        after = (out - 1) * s + (k - 1) * d + 1 - size - p  # with ceil_mode it may be larger than p
        readers.append(Sliding(Axis(int(size), k, s, d, p, int(after))))
    return tuple(readers)
