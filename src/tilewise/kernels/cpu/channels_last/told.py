"""What the kernels for channels that lie innermost are told: the places of their numbers, without Numba."""

from __future__ import annotations

__all__ = [
    "AHEAD", "FILTERS", "FILTERS_NUMBERS", "INDIRECT", "JOINED", "JOINED_NUMBERS", "NUMBERS", "PIXELS", "SEPARABLE",
    "SEPARABLE_NUMBERS", "UNROLLED", "WINOGRAD", "WINOGRAD_NUMBERS", "places", "word_of",
]  # fmt: skip

UNROLLED = 4
"""Channels that tiles multiply in one pass of the inner loop."""
AHEAD = 128
"""Bytes of the next panel that tiles prefetch in such a pass, where they prefetch any."""


def word_of(activation: str) -> str:
    """The activation's name with its parameters, as part of a kernel's name."""
    return activation.replace(":", "_").replace(".", "p").replace("-", "m").replace("+", "")


def places(*names: tuple[str, int] | str) -> tuple[dict[str, int], int]:
    """The place of each name, with as many places as are given with it, and how many places there are in all."""
    places, count = {}, 0
    for entry in names:
        name, size = (entry, 1) if isinstance(entry, str) else entry
        places[name] = count
        count += size
    return places, count


INDIRECT, NUMBERS = places(
    "channels", "outputs", "groups", "planes", "parts", "panel_parts", "panels", "tiles", "pixels", "rows", "width",
    ("sizes", 3), ("outs", 3), ("kernel", 3), ("stride", 3), ("dilation", 3), ("before", 3), ("x", 4), ("y", 4),
    ("added", 4), "residual", "bias", "zeros", "panel_bytes", "group_bytes", "table", "strip", "dummy", "biases",
    "strip_line", "lines", "kernels", "last_kernel", "apart", "interleaved", "interleave", "all_channels",
    "all_outputs", "ahead",
)  # fmt: skip
"""Numbers of indirect convolution. Sizes and strides are of depth, height and width.

``x``, ``y`` and ``added`` have the byte strides of images, planes, rows and columns. Channels of x are neighbours, or
``apart`` bytes apart where that is not 0. Where ``interleaved`` is not 0, so many groups are computed side by side and
count as one; ``interleave`` is what brings their channels into that order, and the last group may have fewer of
``all_channels`` and ``all_outputs``. Where ``ahead`` is not 0, tiles prefetch so many bytes of the next panel in each
pass of their inner loop.
"""

FILTERS, FILTERS_NUMBERS = places(
    "channels", "outputs", "panels", "width", ("kernel", 3), "output", "channel", ("tap", 3), "panel_bytes",
    "group_bytes",
)  # fmt: skip
"""Numbers of a filter that is brought into panels.

``output``, ``channel`` and ``tap`` are its byte strides; the others are those of :data:`INDIRECT`, with taps along
depth, height and width.
"""

WINOGRAD, WINOGRAD_NUMBERS = places(
    "channels", "outputs", "blocks", "panel_parts", "panels", "tiles", "down", "along", "rows", "width", "padded",
    "points_down", "points_along", "outputs_down", "outputs_along", ("sizes", 2), ("outs", 2), ("before", 2), ("x", 3),
    ("y", 3), "residual", "bias", "zeros", "panel_bytes", "group_bytes", "read", "sums", "written", "added", "biases",
    "dummy", "inputs", "input_row", "input_point", "products", "product_point", "to", "back", "kernels", "last_kernel",
)  # fmt: skip
"""Numbers of Winograd convolution. Sizes are of height and width.

``x`` and ``y`` have the byte strides of images, rows and columns.
"""

SEPARABLE, SEPARABLE_NUMBERS = places(
    "pieces", "strip", "expands", "projects", "reach", "kept_rows", "line", "pixel", "ring", "middle", "middle_line",
    "middle_pixel", ("filters", 3), ("stages", 3 * NUMBERS),
)  # fmt: skip
"""Numbers of a separable convolution: those of the whole, then those of its three stages as in :data:`INDIRECT`.

The rows that the depthwise stage reads are ``line`` bytes long and ``kept_rows`` at a time; what it writes is
``middle_line`` bytes long. ``filters`` are the places of each stage's filters behind the address of all.
"""

PIXELS, _ = places("channels", "count", "chunks", "parts", "image")
"""Numbers of kernels over pixels: ``count`` pixels of ``channels`` in an image of ``image`` bytes."""

JOINED, JOINED_NUMBERS = places("pixels", "channels", "parts", "inputs", "scale", "shift")
"""Numbers of images that are joined: ``pixels`` of ``channels`` in all, and so many ``parts`` of the work.

Each channel's factor lies at ``scale`` and its summand at ``shift``. Then follow the channels and the address of each
of the ``inputs``.
"""
