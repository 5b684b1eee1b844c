"""Fillers: what a blob holds before training, by the distributions that Caffe's ``FillerParameter`` names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["FILLERS", "fill"]


def fill(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    """Fill ``tensor`` in place by ``filler``, a ``FillerParameter`` or a number, from torch's default generator.

    ``fail`` is called with what is wrong.
    """
    with torch.no_grad():
        if isinstance(filler, (int, float)):
            tensor.fill_(filler)
        elif filler.type not in FILLERS:
            fail(f"filler type = {filler.type!r}; one of {', '.join(sorted(FILLERS))} would do")
        elif tensor.numel():
            FILLERS[filler.type](tensor, filler, fail)


def _constant(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    tensor.fill_(filler.value)


def _uniform(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    if not filler.min <= filler.max:
        fail(f"filler min = {filler.min} is above max = {filler.max}")
    tensor.uniform_(filler.min, filler.max, generator=torch.default_generator)


def _gaussian(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    if not filler.std >= 0:
        fail(f"filler std = {filler.std}; 0 or more would do")
    tensor.normal_(filler.mean, filler.std, generator=torch.default_generator)
    if filler.sparse >= 0:
        if not tensor.dim():
            fail(f"filler sparse = {filler.sparse}; a blob without axes has no outputs to count")
        # Of all outputs, on average ``sparse`` have a weight from each input.
        share = filler.sparse / tensor.shape[0]
        if share > 1:
            fail(f"filler sparse = {filler.sparse}; at most {tensor.shape[0]}, the number of outputs, would do")
        tensor.mul_(torch.empty_like(tensor).bernoulli_(share, generator=torch.default_generator))


def _fan(tensor: Tensor, filler: Any) -> float:
    """The number of elements by which a variance is divided."""
    count = tensor.numel()
    fan_in = count / tensor.shape[0] if tensor.dim() else count
    fan_out = count / tensor.shape[1] if tensor.dim() > 1 else count
    kind = filler.DESCRIPTOR.fields_by_name["variance_norm"].enum_type.values_by_number[filler.variance_norm].name
    return {"FAN_IN": fan_in, "FAN_OUT": fan_out}.get(kind, (fan_in + fan_out) / 2)


def _xavier(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    scale = math.sqrt(3 / _fan(tensor, filler))
    tensor.uniform_(-scale, scale, generator=torch.default_generator)


def _msra(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    tensor.normal_(0, math.sqrt(2 / _fan(tensor, filler)), generator=torch.default_generator)


def _positive_unitball(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    rows = tensor.view(tensor.shape[0] if tensor.dim() else 1, -1)
    rows.uniform_(0, 1, generator=torch.default_generator)
    rows.div_(rows.sum(1, keepdim=True))


def _bilinear(tensor: Tensor, filler: Any, fail: Callable[[str], NoReturn]) -> None:
    if tensor.dim() != 4 or tensor.shape[2] != tensor.shape[3]:
        fail("filler type = 'bilinear' needs 4 axes and a square kernel")
    size = tensor.shape[3]
    factor = math.ceil(size / 2)
    centre = (2 * factor - 1 - factor % 2) / (2 * factor)
    places = torch.arange(size, dtype=torch.float64, device=tensor.device)
    line = 1 - (places / factor - centre).abs()
    tensor.copy_(line[:, None] * line)


FILLERS: dict[str, Callable[[Tensor, Any, Callable[[str], NoReturn]], None]] = {
    "bilinear": _bilinear,
    "constant": _constant,
    "gaussian": _gaussian,
    "msra": _msra,
    "positive_unitball": _positive_unitball,
    "uniform": _uniform,
    "xavier": _xavier,
}
"""Fillers by the name that a network gives."""
