"""Batches of an ``ImageData`` layer: image files that a list names, each with its label."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.frontends.caffe.data.draws import crops, order, seed_of, skipped
from tilewise.frontends.caffe.data.images import Pixels, read_image, resized
from tilewise.frontends.caffe.data.transform import Transform
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["ImageBatches", "read_list"]

LABELS = 2**31
"""Labels are whole numbers below this, of either sign."""


def read_list(path: str, where: str) -> list[tuple[str, int]]:
    """Names and labels in a list: a name, a blank and a whole number in each line. Empty lines are left out.

    Raises ``CaffeError`` that begins with ``where`` and names the line.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise CaffeError(f"{where}: {path} cannot be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        if not name.strip() or not label.lstrip("+-").isascii() or not label.lstrip("+-").isdigit():
            text = f"{where}: {path}: line {number} is {line!r}"
            raise CaffeError(f"{text}; a file's name, a blank and a whole number as its label would do")
        if not -LABELS <= int(label) < LABELS:
            raise CaffeError(f"{where}: {path}: line {number}: label {label} is out of range; 32 bits would do")
        found.append((name, int(label)))
    if not found:
        raise CaffeError(f"{where}: {path} lists no file; at least one line with a name and a label would do")
    return found


def placed(root: str, name: str, where: str) -> Path:
    """The file that a list's ``name`` is, in the folder ``root`` as Caffe writes it: simply before the name.

    A name that leads out of a ``root`` that is given is refused. Without one the list's names are as they stand.
    """
    path = root + name
    folder = os.path.abspath(os.path.dirname(root))
    if root and os.path.commonpath([os.path.abspath(path), folder]) != folder:
        raise CaffeError(f"{where}: {name!r} leads out of {root!r}; a name without .. would do")
    return Path(path)


class ImageBatches:
    """All batches of an ``ImageData`` layer, by number.

    With ``shuffle`` each epoch has an order of its own. With ``new_height`` and ``new_width`` images are resized.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer and the file.
    """

    def __init__(self, layer: Any, training: bool, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.name = f"layer {layer.name!r}"
        parameters = layer.image_data_param
        if parameters.batch_size < 1:
            raise CaffeError(f"{self.name}: batch_size: {parameters.batch_size}; 1 or more would do")
        if (parameters.new_height > 0) != (parameters.new_width > 0):
            sizes = f"new_height: {parameters.new_height} and new_width: {parameters.new_width}"
            raise CaffeError(f"{self.name}: {sizes}; both or neither would do")
        self.size, self.labels, self.seed, self.share = int(parameters.batch_size), len(layer.top) > 1, seed, share
        self.training, self.layer = training, layer.name
        self.root, self.source = parameters.root_folder, parameters.source
        self.resize = (int(parameters.new_height), int(parameters.new_width))
        self.colour = parameters.is_color
        self.shuffle, self.most_skipped = bool(parameters.shuffle), int(parameters.rand_skip)
        self.lines = read_list(parameters.source, f"{self.name}: source")
        self.transform = Transform(layer.transform_param, training, self.name)
        self._epoch: tuple[int, int, Any] = (-1, -1, None)
        first = self._pixels(self._line(0))
        self.channels = first.shape[0]
        self.image = self.transform.size(first.shape, self._told(self._line(0)))
        shapes: tuple[tuple[int, ...], ...] = ((self.size, *self.image), (self.size,))
        self.shapes = shapes[: 1 + self.labels]

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``: images of shape (batch, channels, height, width), and labels of shape (batch,)."""
        rank, count = self.share
        draws = crops(self._own_seed(), number * count + rank, self.size)
        images = np.empty((self.size, *self.image), np.float32)
        labels = np.empty(self.size, np.float32)
        for place in range(self.size):
            line = self._line((number * self.size + place) * count + rank)
            pixels = self._pixels(line)
            if self.transform.size(pixels.shape, self._told(line)) != self.image:
                here, first = "x".join(map(str, pixels.shape)), "x".join(map(str, self.image))
                text = f"{self.name}: {self._told(line)} is {here}, but batches of this layer are {first}"
                raise CaffeError(f"{text}; a crop_size, or new_height and new_width, would do")
            self.transform.put(pixels, images[place], draws[place])
            labels[place] = self.lines[line][1]
        found = (torch.from_numpy(images), torch.from_numpy(labels))
        return found[: 1 + self.labels]

    def told(self, number: int) -> str:
        """The first and the last image of batch ``number``."""
        rank, count = self.share
        first, last = (self._line((number * self.size + place) * count + rank) for place in (0, self.size - 1))
        return f"{self.lines[first][0]} to {self.lines[last][0]} of {self.source}"

    def release(self) -> None:
        """Nothing is kept open."""

    def _own_seed(self) -> int:
        return seed_of(self.seed, self.layer, "train" if self.training else "test")

    def _line(self, position: int) -> int:
        """Which line of the list is at a position of the endless sequence of epochs."""
        total = len(self.lines)
        # rand_skip leaves lines out of the first epoch only, as Caffe does.
        epoch, place = divmod(position + skipped(self._own_seed(), min(self.most_skipped, total)), total)
        if not self.shuffle:
            return place
        if self._epoch[:2] != (self.seed, epoch):
            self._epoch = (self.seed, epoch, order(self._own_seed(), epoch, total))
        return int(self._epoch[2][place])

    def _told(self, line: int) -> str:
        """An image, for messages."""
        return f"{self.source}: {self.lines[line][0]}"

    def _pixels(self, line: int) -> Pixels:
        """An image of the list, resized where the layer asks for it."""
        where = f"{self.name}: {self.source}"
        path = placed(self.root, self.lines[line][0], where)
        pixels = read_image(path, "color" if self.colour else "gray", where)
        return resized(pixels, *self.resize) if self.resize[0] > 0 else pixels
