"""Batches of a ``DummyData`` layer: constants and random numbers by its fillers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.data.draws import seed_of
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["DummyBatches"]

FILLERS = ("constant", "uniform", "gaussian")
LARGEST = 2**31
"""Most values of one top."""
SEEDS = 2**63


class DummyBatches:
    """All batches of a ``DummyData`` layer, by number.

    Sizes are ``shape``, or ``num``, ``channels``, ``height`` and ``width`` as before there was ``shape``: one for all
    tops or one for each. So are ``data_filler``; without any, all is 0. Random tops are drawn anew for each batch.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer and the field.
    """

    def __init__(self, layer: Any, training: bool, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.name = f"layer {layer.name!r}"
        self.seed, self.share = seed, share
        self.layer, self.phase = layer.name, "train" if training else "test"
        tops = len(layer.top)
        self.shapes = self._shapes(layer.dummy_data_param, tops)
        fillers = list(layer.dummy_data_param.data_filler)
        if len(fillers) not in (0, 1, tops):
            raise CaffeError(f"{self.name}: {len(fillers)} times data_filler for {tops} tops; one or {tops} would do")
        self.fillers = fillers * tops if len(fillers) == 1 else fillers
        for filler in self.fillers:
            if filler.type not in FILLERS:
                raise CaffeError(f"{self.name}: data_filler of type {filler.type!r}; {', '.join(FILLERS)} would do")

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``, one tensor for each top."""
        rank, count = self.share
        mixed = (seed_of(self.seed, self.layer, self.phase) + 1 + number * count + rank) % SEEDS
        generator = torch.Generator(device="cpu").manual_seed(mixed)
        return tuple(self._filled(top, generator) for top in range(len(self.shapes)))

    def told(self, number: int) -> str:
        """The batch's number."""
        return f"batch {number} of {self.name}"

    def release(self) -> None:
        """Nothing is kept open."""

    def _filled(self, top: int, generator: torch.Generator) -> Tensor:
        """One top's values."""
        made = torch.zeros(self.shapes[top], dtype=torch.float32, device="cpu")
        if not self.fillers:
            return made
        filler = self.fillers[top]
        if filler.type == "constant":
            return made.fill_(filler.value)
        if filler.type == "uniform":
            return made.uniform_(filler.min, filler.max, generator=generator)
        return made.normal_(filler.mean, filler.std, generator=generator)

    def _shapes(self, parameters: Any, tops: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each top."""
        if len(parameters.shape):
            found = [tuple(map(int, shape.dim)) for shape in parameters.shape]
        else:
            legacy = [list(getattr(parameters, name)) for name in ("num", "channels", "height", "width")]
            if len(set(map(len, legacy))) != 1:
                text = "num, channels, height and width are given differently often"
                raise CaffeError(f"{self.name}: {text}; a shape for each top would do")
            found = [tuple(map(int, sizes)) for sizes in zip(*legacy, strict=True)]
        if len(found) not in (1, tops):
            raise CaffeError(f"{self.name}: {len(found)} shapes for {tops} tops; one or {tops} would do")
        for shape in found:
            if min(shape, default=1) < 0 or math.prod(shape) > LARGEST:
                raise CaffeError(f"{self.name}: shape {shape} is out of range; at most {LARGEST} values would do")
        return tuple(found * tops if len(found) == 1 else found)
