"""Batches of a ``WindowData`` layer: parts of images, some with an object and some without (Girshick et al. 2014)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.frontends.caffe.data.draws import crops, seed_of
from tilewise.frontends.caffe.data.image_list import placed
from tilewise.frontends.caffe.data.images import Pixels, read_image, resized
from tilewise.frontends.caffe.data.transform import Transform
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Window", "WindowBatches", "read_windows"]

MODES = ("warp", "square")
LABELS = 2**31
PLACES = 2**24
"""Coordinates are whole numbers below this, of either sign."""


class Window(NamedTuple):
    """A part of an image, with its last column and row, and how much it overlaps an object of its class."""

    image: str
    label: int
    overlap: float
    box: tuple[int, int, int, int]


def read_windows(path: str, where: str) -> list[Window]:
    """The windows of a file in Caffe's layout.

    For each image it has ``# number``, the image's path, its channels, height and width, the number of windows, and for
    each of these a line of ``class overlap x1 y1 x2 y2``. Raises ``CaffeError`` that begins with ``where`` and names
    the line.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise CaffeError(f"{where}: {path} cannot be read: {error.strerror or error}") from error
    lines = iter([(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()])
    found: list[Window] = []
    for number, line in lines:
        if not line.startswith("#"):
            raise CaffeError(f"{where}: {path}: line {number} is {line!r}; '# ' and an image's number would do")
        name = _next(lines, path, where)[1]
        for what in ("channels", "height", "width"):
            _numbers(*_next(lines, path, where), 1, f"{where}: {path}", what)
        (count,) = _numbers(*_next(lines, path, where), 1, f"{where}: {path}", "a number of windows")
        for _ in range(int(count)):
            label, overlap, *box = _numbers(
                *_next(lines, path, where), 6, f"{where}: {path}", "class overlap x1 y1 x2 y2"
            )
            x1, y1, x2, y2 = (int(value) for value in box)
            if abs(label) >= LABELS or max(map(abs, box)) >= PLACES or x2 < x1 or y2 < y1:
                raise CaffeError(
                    f"{where}: {path}: a window of {name!r} is {box} of class {label:g}; x1 <= x2 would do"
                )
            found.append(Window(name, int(label), overlap, (x1, y1, x2, y2)))
    return found


def _next(lines: Iterator[tuple[int, str]], path: str, where: str) -> tuple[int, str]:
    """The next line and its number."""
    for found in lines:
        return found
    raise CaffeError(f"{where}: {path} ends within an image; a whole list of windows would do")


def _numbers(number: int, line: str, count: int, where: str, what: str) -> list[float]:
    """The numbers of a line."""
    try:
        found = [float(word) for word in line.split()]
    except ValueError:
        found = []
    if len(found) != count or not all(map(math.isfinite, found)) or (count == 1 and found[0] < 0):
        raise CaffeError(f"{where}: line {number} is {line!r}; {what} would do")
    return found


class WindowBatches:
    """All batches of a ``WindowData`` layer, by number.

    A share ``fg_fraction`` of each batch are windows that overlap an object by ``fg_threshold`` or more, and the others
    windows that overlap none by ``bg_threshold``, of class 0. Which ones is drawn anew for each batch. A window is
    scaled to ``crop_size``, with ``context_pad`` pixels around it in the result, as a square with
    ``crop_mode: "square"``. What lies beyond the image is 0.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer and the file.
    """

    def __init__(self, layer: Any, training: bool, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.name = f"layer {layer.name!r}"
        p = layer.window_data_param
        self.size, self.seed, self.share = int(p.batch_size), seed, share
        self.layer, self.phase = layer.name, "train" if training else "test"
        self.transform = Transform(layer.transform_param, training, self.name)
        self.scale = self.transform.scale * np.float32(p.scale)
        self.crop, self.context, self.square = self.transform.crop, int(p.context_pad), p.crop_mode == "square"
        self.root, self.source = p.root_folder, p.source
        if self.size < 1 or self.crop < 1:
            text = f"batch_size: {self.size}, crop_size: {self.crop}"
            raise CaffeError(f"{self.name}: {text}; 1 or more of window_data_param and transform_param would do")
        if 2 * self.context >= self.crop:
            raise CaffeError(f"{self.name}: context_pad: {self.context}; less than half of crop_size would do")
        if p.crop_mode not in MODES:
            raise CaffeError(f"{self.name}: crop_mode: {p.crop_mode!r}; {' or '.join(MODES)} would do")
        if not 0 <= p.fg_fraction <= 1:
            raise CaffeError(f"{self.name}: fg_fraction: {p.fg_fraction}; 0 to 1 would do")
        windows = read_windows(p.source, f"{self.name}: source")
        with_object = [window for window in windows if window.overlap >= p.fg_threshold]
        without = [window._replace(label=0) for window in windows if window.overlap < p.bg_threshold]
        if any(window.label <= 0 for window in with_object):
            raise CaffeError(f"{self.name}: {p.source}: a window with an object has the class 0; 1 or more would do")
        objects = int(self.size * p.fg_fraction)
        self.groups = [(without, self.size - objects), (with_object, objects)]
        for kind, (group, count) in zip(("without", "with"), self.groups, strict=True):
            if count and not group:
                raise CaffeError(
                    f"{self.name}: {p.source} has no window {kind} an object; {count} a batch are asked for"
                )
        shapes: tuple[tuple[int, ...], ...] = ((self.size, 3, self.crop, self.crop), (self.size,))
        self.shapes = shapes[: max(1, len(layer.top))]
        self._check_mean()

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``: images (batch, 3, crop_size, crop_size), those without objects first, and classes."""
        images = np.zeros((self.size, 3, self.crop, self.crop), np.float32)
        labels = np.zeros(self.size, np.float32)
        for place, (window, mirror) in enumerate(self._windows(number)):
            where = f"{self.name}: {self.source}"
            pixels = read_image(placed(self.root, window.image, where), "color", where)
            self._put(pixels, window.box, images[place], mirror)
            labels[place] = window.label
        return (torch.from_numpy(images), torch.from_numpy(labels))[: len(self.shapes)]

    def told(self, number: int) -> str:
        """The images of batch ``number``."""
        return ", ".join(dict.fromkeys(window.image for window, _ in self._windows(number)))

    def release(self) -> None:
        """Nothing is kept open."""

    def _windows(self, number: int) -> list[tuple[Window, bool]]:
        """The windows of a batch, and whether each is mirrored."""
        rank, count = self.share
        draws = crops(seed_of(self.seed, self.layer, self.phase), number * count + rank, self.size)
        groups = [group for group, wanted in self.groups for _ in range(wanted)]
        return [
            (group[int(draw[0]) % len(group)], self.transform.mirror and bool(draw[2] % 2))
            for group, draw in zip(groups, draws, strict=True)
        ]

    def _put(self, pixels: Pixels, box: tuple[int, ...], out: npt.NDArray[np.float32], mirror: bool) -> None:
        """Write a window of an image, at the size of the layer, into zeros of that size."""
        spans = [self._span(box, axis, pixels.shape[1 + axis]) for axis in (0, 1)]
        for axis, span in enumerate(spans):
            if span.stop <= span.start:
                side = ("height", "width")[axis]
                raise CaffeError(f"{self.name}: {self.source}: the window {box} lies beyond an image's {side}")
        part = pixels[:, spans[0].start : spans[0].stop, spans[1].start : spans[1].stop]
        part = resized(np.ascontiguousarray(part), spans[0].size, spans[1].size)
        part = part[:, :, ::-1] if mirror else part
        top, left = spans[0].before, spans[1].after if mirror else spans[1].before
        height, width = (min(n, self.crop - at) for n, at in zip(part.shape[1:], (top, left), strict=True))
        target = (slice(None), slice(top, top + height), slice(left, left + width))
        found = part[:, :height, :width].astype(np.float32)
        t = self.transform
        if t.mean is not None:
            off = (t.mean.shape[2] - self.crop) // 2
            found -= t.mean[:, off + top : off + top + height, off + left : off + left + width]
        elif len(t.mean_value):
            found -= t.mean_value[:, None, None]
        out[target] = found * self.scale

    def _span(self, box: tuple[int, ...], axis: int, size: int) -> Span:
        """Where a window lies along the rows (0) or the columns (1) of an image of ``size``, and in the result."""
        x1, y1, x2, y2 = box
        first, last = (y1, y2) if axis == 0 else (x1, x2)
        if self.context or self.square:
            half = (last - first + 1) / 2
            centre = first + half
            if self.square:
                half = max(y2 - y1 + 1, x2 - x1 + 1) / 2
            half *= self.crop / (self.crop - 2 * self.context)
            first, last = _rounded(centre - half), _rounded(centre + half)
        before, after = max(0, -first), max(0, last - size + 1)
        scale = self.crop / (last - first + 1)
        start, stop = first + before, last - after + 1
        length = max(1, _rounded((stop - start) * scale))
        return Span(start, stop, length, min(_rounded(before * scale), self.crop - 1), _rounded(after * scale))

    def _check_mean(self) -> None:
        mean, values = self.transform.mean, self.transform.mean_value
        if mean is not None and (mean.shape[0] != 3 or mean.shape[1] != mean.shape[2] or mean.shape[2] < self.crop):
            shape = "x".join(map(str, mean.shape))
            raise CaffeError(
                f"{self.name}: mean_file of {shape}; a square of 3 channels, {self.crop} or more, would do"
            )
        if len(values) not in (0, 1, 3):
            raise CaffeError(f"{self.name}: {len(values)} times mean_value for 3 channels; one or 3 would do")


class Span(NamedTuple):
    """Rows or columns of an image from ``start`` to below ``stop``, which become ``size`` behind ``before`` zeros."""

    start: int
    stop: int
    size: int
    before: int
    after: int


def _rounded(value: float) -> int:
    """The nearest whole number, halves away from zero, as in C."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))
