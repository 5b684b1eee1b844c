"""Loads kernels for images whose channels lie innermost, as :mod:`tilewise.kernels.cpu.compiling` does others."""

from __future__ import annotations

import functools

from tilewise.kernels.building.elsewhere import compiled_elsewhere
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.compiling import LOCK, Made, address_of, sandwiches_of, words_of

__all__ = [
    "load_depthwise_last", "load_filters", "load_grouped", "load_indirect", "load_joined", "load_pixels",
    "load_separable", "load_winograd_last",
]  # fmt: skip


@functools.cache
def _worker_last(lanes: int, name: str) -> int:
    """The address of a worker for channels that lie innermost, which the function called ``name`` makes."""

    def make() -> Made:
        from tilewise.kernels.cpu.channels_last import (
            depthwise,
            filters,
            indirect,
            pixels,
            separable,
            winograd,
        )

        makers = (
            indirect.indirect, depthwise.depthwise_last, winograd.winograd_last, pixels.means, pixels.scaled,
            separable.separable, filters.filters,
        )  # fmt: skip
        return next(maker for maker in makers if maker.__name__ == name)(lanes), 0

    return address_of(words_of(name, lanes), make)


@functools.cache
def _tile(
    lanes: int,
    rows: int,
    vectors: int,
    activation: str,
    groups: int = 1,
    outputs: int = 0,
    far: bool = False,
    ahead: bool = False,
    deep: bool = False,
) -> int:
    """The address of the products of a tile of pixels."""

    def make() -> Made:
        from tilewise.kernels.cpu.channels_last.tiles import WORDS, tile

        return tile(lanes, rows, vectors, activation, groups, outputs, far, ahead, deep), WORDS + 2 * ahead

    words = lanes, rows, vectors, word_of(activation), groups, outputs, int(far), int(ahead), int(deep)
    return address_of(words_of("tile", *words), make)


@functools.cache
def _interleave(lanes: int, groups: int, channels: int) -> int:
    """The address of what interleaves the channels of groups."""

    def make() -> Made:
        from tilewise.kernels.cpu.channels_last.interleaving import WORDS, interleave

        return interleave(lanes, groups, channels), WORDS

    return address_of(words_of("interleave", lanes, groups, channels), make)


@compiled_elsewhere
def load_indirect(
    lanes: int,
    rows: int,
    vectors: tuple[int, int],
    activation: str,
    far: bool = False,
    ahead: bool = False,
    deep: bool = False,
) -> tuple[int, int, int]:
    """The addresses of the worker of indirect convolution and of its tiles, loaded as in :func:`load`.

    Tiles have ``rows`` pixels and as many vectors as are given, for all panels of the filter but the last, and for that
    one. ``activation`` is what they apply as they write, ``far`` whether that is to memory that is in no near cache.
    With ``ahead`` they prefetch the next panel; ``deep`` ones sum block by block.
    """
    with LOCK:
        whole, last = (_tile(lanes, rows, count, activation, far=far, ahead=ahead, deep=deep) for count in vectors)
        return _worker_last(lanes, "indirect"), whole, last


@compiled_elsewhere
def load_grouped(
    lanes: int, rows: int, vectors: int, activation: str, groups: int, sizes: tuple[int, int]
) -> tuple[int, int, int]:
    """The addresses of the worker of indirect convolution, of its tile of several groups, and of what interleaves them.

    ``groups`` groups are computed side by side, and each has the numbers of input and output channels in ``sizes``.
    """
    channels, outputs = sizes
    with LOCK:
        tile = _tile(lanes, rows, vectors, activation, groups, outputs, far=True)
        return _worker_last(lanes, "indirect"), tile, _interleave(lanes, groups, channels)


@compiled_elsewhere
def load_filters(lanes: int) -> int:
    """The address of the worker that brings filters into the panels of indirect convolution."""
    with LOCK:
        return _worker_last(lanes, "filters")


@functools.cache
def _line_tile(lanes: int, rows: int, vectors: int, line: tuple[int, int, int], activation: str, ragged: bool) -> int:
    """The address of the sums of a tile of neighbouring pixels of a depthwise layer."""

    def make() -> Made:
        from tilewise.kernels.cpu.channels_last.depthwise import line_tile
        from tilewise.kernels.cpu.channels_last.tiles import WORDS

        return line_tile(lanes, rows, vectors, line, activation, ragged), WORDS

    return address_of(words_of("line_tile", lanes, rows, vectors, *line, word_of(activation), int(ragged)), make)


@compiled_elsewhere
def load_depthwise_last(
    lanes: int, rows: int, vectors: tuple[int, int], line: tuple[int, int, int], activation: str, ragged: bool
) -> tuple[int, int, int]:
    """The addresses of the worker of depthwise convolution with channels innermost and of its tiles.

    Tiles have ``rows`` pixels and as many vectors as are given, for all panels of the channels but the last, and for
    that one, whose last vector is not whole if ``ragged``. ``line``: taps along a row, stride and dilation.
    """
    with LOCK:
        whole = _line_tile(lanes, rows, vectors[0], line, activation, False)
        return (
            _worker_last(lanes, "depthwise_last"),
            whole,
            _line_tile(lanes, rows, vectors[1], line, activation, ragged),
        )


@compiled_elsewhere
def load_separable(lanes: int) -> int:
    """The address of the worker of separable convolution, whose tiles are those of its convolutions."""
    with LOCK:
        return _worker_last(lanes, "separable")


@functools.cache
def _joined(lanes: int, activation: str) -> int:
    """The address of the worker over images that are joined."""

    def make() -> Made:
        from tilewise.kernels.cpu.channels_last.joined import joined

        return joined(lanes, activation), 0

    return address_of(words_of("joined", lanes, word_of(activation)), make)


@compiled_elsewhere
def load_joined(lanes: int, activation: str) -> int:
    """The address of a worker that joins images along channels, scales and shifts them and applies an activation."""
    with LOCK:
        return _joined(lanes, activation)


@compiled_elsewhere
def load_pixels(lanes: int, name: str) -> int:
    """The address of a worker over the pixels of images, ``means`` or ``scaled``."""
    with LOCK:
        return _worker_last(lanes, name)


@functools.cache
def _transforms_last(lanes: int, m: tuple[int, int], r: tuple[int, int], activation: str, back: bool) -> int:
    """The address of the transform of tiles with channels innermost, or with ``back`` of that of their sums."""
    words = words_of(*m, *r)

    def make() -> Made:
        from tilewise.kernels.cook_toom import transforms, turned
        from tilewise.kernels.cpu.channels_last import transforms as last

        rows, columns = (transforms(*axis) for axis in zip(m, r, strict=True))
        if back:
            matrices = turned(rows.output), turned(columns.output)
            return last.back(lanes, words, activation, *matrices), last.BACK_WORDS
        return last.to(lanes, words, rows.input, columns.input), last.TO_WORDS

    return address_of(words_of("transforms_last", lanes, words, word_of(activation), "back" if back else "to"), make)


@compiled_elsewhere
def load_winograd_last(
    lanes: int, m: tuple[int, int], r: tuple[int, int], rows: int, vectors: tuple[int, int], activation: str
) -> tuple[int, ...]:
    """The addresses of the worker of Winograd convolution with channels innermost, and of what it calls.

    Tiles have ``m`` outputs and filters ``r`` taps along height and width. The functions are the transforms of the
    image, of sums and of filters, then the products of ``rows`` tiles with as many vectors as are given, for all panels
    of the filter but the last and for that one.
    """
    with LOCK:
        to, back = (_transforms_last(lanes, m, r, activation if way else "none", way) for way in (False, True))
        height, width = zip(m, r, strict=True)
        products = (_tile(lanes, rows, count, "none") for count in vectors)
        return (
            _worker_last(lanes, "winograd_last"),
            to,
            back,
            sandwiches_of(lanes, "filter", height, width, False),
            *products,
        )
