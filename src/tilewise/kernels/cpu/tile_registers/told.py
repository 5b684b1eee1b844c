"""What the kernels by tile registers are told: the places of their numbers, without Numba."""

from __future__ import annotations

from tilewise.kernels.cpu.channels_last.told import places

__all__ = ["DEPTH", "FILTER", "FILTER_NUMBERS", "HALF", "LANES", "SPLIT", "SPLIT_NUMBERS", "TILE", "WIDE"]

LANES, DEPTH, HALF, TILE = 16, 32, 2, 1024
"""Numbers of fp32 in a row of a register, products of bf16 that an element sums at once, bytes of a number of bf16,
and bytes of a register."""
WIDE = 2 * LANES
"""Output channels of a panel."""

SPLIT, SPLIT_NUMBERS = places(
    "channels", "blocks", "outputs", "panels", "panel_parts", "all_images", "images", "lines", "columns", "line_parts",
    "column_parts", "rows",
    ("sizes", 2), ("outs", 2), ("taps", 2), ("stride", 2), ("dilation", 2), ("before", 2), ("x", 3), ("y", 3),
    "x_channel", "y_channel", "first", "residual", "bias", "zeros", "panel_bytes", "apart", "strip", "table", "sums",
    "biases", "splits", "planes", "products", "finishes", "dense",
)  # fmt: skip
"""Numbers of convolutions by tile registers. Sizes are of height and width.

``x`` and ``y`` have the byte strides of images, lines and columns, ``x_channel`` and ``y_channel`` those of channels.
Results begin ``first`` bytes behind the address of y. A unit has so many ``lines`` and ``columns`` of results of each
of ``images`` of ``all_images``, and a tile ``rows`` pixels. Parts of numbers lie ``apart`` bytes from each other.
``planes`` splits pixels whose channels are no neighbours; it is 0 where they are. ``dense`` says that pixels follow
each other, with channels in whole blocks.
"""

FILTER, FILTER_NUMBERS = places(
    "channels", "blocks", "outputs", "parts", "panel_bytes", "output", "channel", ("taps", 2), ("first", 2),
    ("step", 2), ("tap", 2), "fills",
)  # fmt: skip
"""Numbers of filters that are put into tiles.

``output``, ``channel`` and ``tap`` have the byte strides of output channels, of input channels and of taps along height
and width. Of these ``taps`` are taken, from ``first`` on, ``step`` from each other.
"""
