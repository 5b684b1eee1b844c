"""The source of a ``MemoryData`` layer: arrays that the program holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.frontends.caffe.data.source import Place
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Memory"]


class Memory:
    """Batches of tensors that the caller gives by :meth:`set`, in order, again from the start at their end.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for sizes that make no sense, and where a batch is asked
    for before anything was set.
    """

    def __init__(self, layer: Any) -> None:
        self.name = f"layer {layer.name!r}"
        parameters = layer.memory_data_param
        sizes = {name: int(getattr(parameters, name)) for name in ("batch_size", "channels", "height", "width")}
        if min(sizes.values()) < 1:
            text = ", ".join(f"{name}: {value}" for name, value in sizes.items())
            raise CaffeError(f"{self.name}: memory_data_param has {text}; 1 or more of each would do")
        self.size, *image = sizes.values()
        self._shapes = ((self.size, *image), (self.size,))[: max(1, len(layer.top))]
        self._data: tuple[Tensor, ...] = ()
        self._batch = 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of images and labels."""
        return self._shapes

    def set(self, data: Tensor, labels: Tensor) -> None:
        """Draw batches from these from now on, from the first.

        ``data`` has shape (n, channels, height, width) and ``labels`` shape (n,), with ``n`` a multiple of the batch.
        """
        rows = len(data)
        if tuple(data.shape[1:]) != self._shapes[0][1:] or not rows or rows % self.size or labels.numel() != rows:
            found = f"data of shape {tuple(data.shape)} and labels of shape {tuple(labels.shape)}"
            image = "x".join(map(str, self._shapes[0][1:]))
            raise CaffeError(f"{self.name}: {found}; n x {image} and n, n a multiple of {self.size}, would do")
        self._data = (
            data.detach().to(device="cpu", dtype=torch.float32),
            labels.detach().to(device="cpu", dtype=torch.float32).reshape(rows),
        )
        self._batch = 0

    def next(self) -> tuple[Tensor, ...]:
        """The next batch of what was set."""
        if not self._data:
            raise CaffeError(f"{self.name}: MemoryData holds nothing yet; its source's set(data, labels) would do")
        first = self._batch * self.size % len(self._data[0])
        self._batch += 1
        return tuple(each[first : first + self.size] for each in self._data[: len(self._shapes)])

    def place(self) -> Place:
        """The number of the next batch; ``seed`` is 0, as nothing is drawn."""
        return {"seed": 0, "batch": self._batch}

    def go_to(self, place: Place) -> None:
        """Go on from a place, in the same data."""
        batch = place.get("batch")
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise CaffeError(f"{self.name}: place in the data: batch is {batch!r}; a whole number would do")
        self._batch = batch

    def told(self) -> str:
        """The batch's number."""
        return f"batch {self._batch - 1} of {self.name}" if self._batch else ""

    def close(self) -> None:
        """Nothing to end."""
