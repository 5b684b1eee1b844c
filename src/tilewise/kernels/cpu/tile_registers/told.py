"""What the kernels by tile registers are told: the places of their numbers, without Numba."""

from __future__ import annotations

from tilewise.kernels.cpu.channels_last.told import places

__all__ = [
    "DEPTH", "FILTER", "FILTER_NUMBERS", "GRADIENT", "GRADIENT_NUMBERS", "HALF", "LANES", "REGION", "REGION_NUMBERS",
    "SPLIT", "SPLIT_NUMBERS", "TILE", "VARIANT", "VARIANT_NUMBERS", "WIDE",
]  # fmt: skip

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

GRADIENT, GRADIENT_NUMBERS = places(
    "channels", "sources", "outputs", "panels", "output_panels", "channel_parts", "shares", "strips", "all_images",
    "images", "lines", "columns", "line_parts", "column_parts", ("begin", 2), ("end", 2), ("ahead", 2), "width",
    "image_lines", "reach", "taps", "regions", "parts", ("x", 4), ("y", 4), "x_count", "y_count", "x_row", "y_row",
    "x_apart", "y_apart", "tile", "table", "region_table", "variants", "written", "places", "output", "span", "partial",
    "adds", "outputs_strip", "lines_strip", "tiles", "spare", "sums", "sum_step", "x_lines", "y_lines", "pairs",
    "other_pairs", "products", "additions", "writes",
)  # fmt: skip
"""Numbers of gradients of filters.

``sources`` are the channels that tiles have: the input's ``channels``, or those for each tap of a line. A line of the
grid has ``width`` places, and an image ``image_lines`` lines where a strip has several. A strip has ``lines`` by
``columns`` of the output's gradient, of which those from ``begin`` to ``end`` count. The input's begin ``ahead`` lines
and columns further, and are read up to ``reach`` places behind the gradient's last one.

``x`` and ``y`` have the byte strides of images, lines, columns and channels, where those of x are of its grid.
``x_count`` and ``y_count`` say how often a line goes on. A channel's numbers are ``x_row`` and ``y_row`` bytes from the
next one's, parts ``x_apart`` and ``y_apart``, and tiles of one block of pixels ``tile``. The weight's output channels
are ``output`` bytes apart, and shares of the sums ``partial`` bytes; a source has ``span`` bytes of neighbours in
memory, or 0.
"""

REGION, REGION_NUMBERS = places("offset", "begin", "end", "variant", "odd")
"""Tiles of lines that are alike modulo the stride: how far they begin behind the image's first one, which ones of the
grid there are, and their first :data:`VARIANT`. ``odd`` is 0 where a tile begins with the first and second pixel, 1
where it begins with the second and third one, and 2 where it does and the tiles before it are of the same pixels."""
VARIANT, VARIANT_NUMBERS = places("offset", "begin", "end")
"""Columns that are alike modulo the stride, or that a tap reads: how far they begin behind the first one, and which
ones of the grid there are."""
