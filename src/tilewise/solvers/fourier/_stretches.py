"""Neighbouring tiles of signals that one launch transforms together, as overlapping windows are strides too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewise.kernels.cuda.operands import joined

__all__ = ["Batch", "Place", "Stretch", "batches", "stretches"]

Place = tuple[int, int, int]
"""Along one axis (start, count, lead): ``count`` elements from ``start`` on lie at place ``lead`` of the basis."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equal tiles at equal distances: the first is at ``place``, each next one ``step`` elements later."""

    place: tuple[Place, ...]
    tiles: int = 1
    step: int = 0

    def tile(self, number: int) -> tuple[Place, ...]:
        """The place of tile ``number``."""
        return tuple((start + number * self.step, count, lead) for start, count, lead in self.place)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one launch takes: a stretch of ``images`` from ``first`` on.

    The spectrum of the first image's first tile is row ``row`` of a matrix, the next image's is the next row, and the
    next tile's lies ``apart`` rows on.
    """

    stretch: Stretch
    first: int
    images: int
    row: int
    apart: int


def stretches(places: Sequence[tuple[Place, ...]]) -> list[Stretch]:
    """Neighbouring tiles of signals in as few stretches as possible; each tile of a plane is one by itself.

    The kernels count planes or signals along two dimensions. In a contiguous tensor images and channels merge into one,
    so that a signal's tiles can be the other. A plane's tiles go in two directions and cannot.
    """
    merged: list[Stretch] = []
    for place in places:
        last = merged[-1] if merged and len(place) == 1 else None
        if last is not None and last.place[0][1:] == place[0][1:]:
            step = place[0][0] - last.tile(last.tiles - 1)[0][0]
            if last.tiles == 1 or step == last.step:
                merged[-1] = Stretch(last.place, last.tiles + 1, step)
                continue
        merged.append(Stretch(place))
    return merged


def batches(
    places: Sequence[tuple[Place, ...]], first: int, images: int, channels: int, strides: Sequence[int]
) -> Iterator[Batch]:
    """The launches for these tiles of ``images`` images from ``first`` on, in a tensor with these strides.

    Spectra are rows of channels, tile by tile and within a tile image by image. Where a tensor's images and channels do
    not merge, tiles or images are launched one by one, whichever are fewer.
    """
    row = 0
    for stretch in stretches(places):
        steps = (stretch.step * strides[-1], *strides[:2])
        if len(joined((stretch.tiles, images, channels), steps, (images * channels, channels, 1))) <= 2:
            yield Batch(stretch, first, images, row, images)
        elif images <= stretch.tiles:
            for image in range(images):
                yield Batch(stretch, first + image, 1, row + image, images)
        else:
            for tile in range(stretch.tiles):
                yield Batch(Stretch(stretch.tile(tile)), first, images, row + tile * images, images)
        row += stretch.tiles * images
