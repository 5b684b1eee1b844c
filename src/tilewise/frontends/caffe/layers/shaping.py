"""Layers that move, cut and join elements, and leave their values as they are."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.frontends.caffe.layers.base import MOST_AXES, Layer, Shape, Tops
from tilewise.frontends.caffe.layers.registry import register

__all__ = [
    "BatchReindex", "Concat", "Crop", "Filter", "Flatten", "Interp", "Permute", "Reshape", "ShuffleChannel", "Silence",
    "Slice", "Split", "Tile",
]  # fmt: skip


@register("Concat")
class Concat(Layer):
    """The bottoms one after the other along ``axis``."""

    bottoms: ClassVar = (1, None)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.concat_param
        if p.HasField("axis") and p.HasField("concat_dim"):
            self.fail("both axis and concat_dim are given; axis would do")
        value = int(p.concat_dim) if p.HasField("concat_dim") else p.axis
        self.along = self.axis(value, shapes[0])

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        first = list(shapes[0])
        for shape in shapes:
            if len(shape) != len(first) or any(
                a != b for place, (a, b) in enumerate(zip(shape, first, strict=True)) if place != self.along
            ):
                self.fail(f"the bottoms have shapes {', '.join(map(str, shapes))}; only axis {self.along} may differ")
        first[self.along] = sum(shape[self.along] for shape in shapes)
        return [tuple(first)]

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.along)


@register("Slice")
class Slice(Layer):
    """The bottom cut along ``axis``, at ``slice_point`` or into equal parts."""

    tops: ClassVar = (1, None)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.slice_param
        if p.HasField("axis") and p.HasField("slice_dim"):
            self.fail("both axis and slice_dim are given; axis would do")
        value = int(p.slice_dim) if p.HasField("slice_dim") else p.axis
        self.along, self.points = self.axis(value, shapes[0]), [int(point) for point in p.slice_point]
        if self.points and len(self.points) != self.top_count - 1:
            self.fail(f"slice_point = {self.points} for {self.top_count} tops; one less than the tops would do")

    def _sizes(self, shape: Shape) -> list[int]:
        size = shape[self.along]
        if not self.points:
            if size % self.top_count:
                self.fail(f"axis {self.along} of a bottom of shape {shape} does not divide into {self.top_count} tops")
            return [size // self.top_count] * self.top_count
        sizes = [end - start for start, end in itertools.pairwise([0, *self.points, size])]
        if min(sizes) < 1:
            self.fail(f"slice_point = {self.points}; rising numbers below {size}, the size along the axis, would do")
        return sizes

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape = shapes[0]
        return [(*shape[: self.along], size, *shape[self.along + 1 :]) for size in self._sizes(shape)]

    def forward(self, x: Tensor) -> Tops:
        parts = x.split(self._sizes(tuple(x.shape)), self.along)
        return parts[0] if len(parts) == 1 else tuple(parts)


@register("Split")
class Split(Layer):
    """The bottom, as each top."""

    tops: ClassVar = (1, None)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return shapes * self.top_count

    def forward(self, x: Tensor) -> Tops:
        return x if self.top_count == 1 else (x,) * self.top_count


@register("Silence")
class Silence(Layer):
    """Nothing: its bottoms are no outputs of the network."""

    bottoms: ClassVar = (1, None)
    tops: ClassVar = (0, 0)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return []

    def forward(self, *bottoms: Tensor) -> Tops:
        return ()


@register("Crop")
class Crop(Layer):
    """The first bottom, from ``axis`` on cut to the sizes of the second, beginning at ``offset``."""

    bottoms: ClassVar = (2, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.crop_param
        self.first, self.offsets = self.axis(p.axis, shapes[0]), [int(offset) for offset in p.offset]
        axes = len(shapes[0]) - self.first
        if len(self.offsets) not in (0, 1, axes):
            self.fail(f"offset = {self.offsets}; none, one, or one for each of {axes} axes would do")
        self.offsets = (self.offsets or [0]) * (1 if len(self.offsets) == axes else axes)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape, wanted = shapes
        if len(shape) != len(wanted):
            self.fail(f"the bottoms have shapes {shape} and {wanted}; as many axes of both would do")
        for axis, offset in enumerate(self.offsets, self.first):
            if shape[axis] < wanted[axis] + offset:
                self.fail(f"axis {axis} of {shape} has no {wanted[axis]} elements behind an offset of {offset}")
        return [(*shape[: self.first], *wanted[self.first :])]

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        for axis, offset in enumerate(self.offsets, self.first):
            x = x.narrow(axis, offset, reference.shape[axis])
        return x


@register("Flatten")
class Flatten(Layer):
    """The axes from ``axis`` to ``end_axis`` as one."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.flatten_param
        self.first, self.last = self.axis(p.axis, shapes[0]), self.axis(p.end_axis, shapes[0], "end_axis")
        if self.first > self.last:
            self.fail(f"axis = {p.axis} lies behind end_axis = {p.end_axis} of a bottom of shape {shapes[0]}")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape = shapes[0]
        return [(*shape[: self.first], math.prod(shape[self.first : self.last + 1]), *shape[self.last + 1 :])]

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.first, self.last)


@register("Reshape")
class Reshape(Layer):
    """The same elements in another shape: 0 keeps the bottom's size, one -1 takes what is left.

    Only ``num_axes`` axes from ``axis`` on are replaced.
    """

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.reshape_param
        axes = len(shapes[0])
        self.dims = [int(size) for size in p.shape.dim]
        if self.dims.count(-1) > 1 or min(self.dims, default=0) < -1 or len(self.dims) > MOST_AXES:
            self.fail(f"shape = {self.dims}; positive sizes, 0 and at most one -1 would do")
        self.first = self.axis(p.axis, shapes[0], end=True) if p.axis >= 0 else axes + p.axis + 1
        if not 0 <= self.first <= axes:
            self.fail(f"axis = {p.axis} is no axis of a bottom of shape {shapes[0]}")
        self.axes = axes - self.first if p.num_axes == -1 else int(p.num_axes)
        if p.num_axes < -1 or self.first + self.axes > axes:
            self.fail(f"num_axes = {p.num_axes} from axis {self.first} on does not fit a bottom of shape {shapes[0]}")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape = shapes[0]
        found = list(self.dims)
        for place, size in enumerate(found):
            if size == 0:
                if self.first + place >= len(shape):
                    self.fail(f"shape = {self.dims}: a 0 stands for no axis of a bottom of shape {shape}")
                found[place] = shape[self.first + place]
        before, behind = shape[: self.first], shape[self.first + self.axes :]
        count = math.prod(shape)
        if -1 in found:
            others = math.prod(size for size in (*before, *found, *behind) if size != -1)
            if not others or count % others:
                self.fail(f"shape = {self.dims}: a bottom of shape {shape} does not divide into it")
            found[found.index(-1)] = count // others
        whole = (*before, *found, *behind)
        if math.prod(whole) != count:
            self.fail(
                f"shape = {self.dims}: {whole} has {math.prod(whole)} elements, a bottom of shape {shape} {count}"
            )
        return [whole]

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.output_shapes([tuple(x.shape)])[0])


@register("Permute")
class Permute(Layer):
    """The axes in another ``order``; those that it does not name follow in theirs."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        order = [int(axis) for axis in parameter.permute_param.order]
        axes = len(shapes[0])
        if len(set(order)) != len(order) or any(axis >= axes for axis in order):
            self.fail(f"order = {order}; each of 0 to {axes - 1} at most once would do")
        self.order = (*order, *(axis for axis in range(axes) if axis not in order))

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], len(self.order))
        return [tuple(shapes[0][axis] for axis in self.order)]

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order).contiguous()


@register("Tile")
class Tile(Layer):
    """The bottom ``tiles`` times along ``axis``."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.tile_param
        self.along, self.tiles = self.axis(p.axis, shapes[0]), int(p.tiles)
        if self.tiles < 1:
            self.fail(f"tiles = {self.tiles}; at least 1 would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        shape = shapes[0]
        return [(*shape[: self.along], shape[self.along] * self.tiles, *shape[self.along + 1 :])]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.tiles, self.along)


@register("Filter")
class Filter(Layer):
    """Of each bottom but the last those images for which the last one, the selector (N, 1, 1, 1), is not 0."""

    bottoms: ClassVar = (2, None)
    tops: ClassVar = (1, None)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        *found, selector = shapes
        if len(found) != self.top_count:
            self.fail(f"it has {len(shapes)} bottoms and {self.top_count} tops; one bottom more than tops would do")
        if math.prod(selector[1:]) != 1 or any(shape[0] != selector[0] for shape in found):
            self.fail(f"the selector has shape {selector}; one number for each image of {found} would do")
        return found

    def forward(self, *bottoms: Tensor) -> Tops:
        """The chosen images. Their number depends on the selector's values."""
        *found, selector = bottoms
        places = selector.detach().flatten().nonzero().flatten()
        chosen = tuple(x.index_select(0, places) for x in found)
        return chosen[0] if len(chosen) == 1 else chosen


@register("BatchReindex")
class BatchReindex(Layer):
    """The images of the first bottom that the numbers of the second name."""

    bottoms: ClassVar = (2, 2)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if len(shapes[1]) != 1:
            self.fail(f"the second bottom has shape {shapes[1]}; one axis would do")
        return [(shapes[1][0], *shapes[0][1:])]

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x.index_select(0, places.to(torch.int64))


@register("ShuffleChannel")
class ShuffleChannel(Layer):
    """The channels in turns, one of each of ``group`` groups (Zhang et al. 2018, ShuffleNet)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.group = int(parameter.shuffle_channel_param.group)
        if len(shapes[0]) < 2:
            self.fail(f"a bottom has shape {shapes[0]}; two axes or more would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if self.group < 1 or shapes[0][1] % self.group:
            self.fail(f"group = {self.group} does not divide the {shapes[0][1]} channels")
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(x.shape[0], self.group, x.shape[1] // self.group, -1)
        return groups.transpose(1, 2).reshape(x.shape)


@register("Interp")
class Interp(Layer):
    """(N, C, H, W) resized by linear interpolation, corners onto corners (PSPNet, DeepLab).

    ``shrink_factor`` and ``zoom_factor``, or ``height`` and ``width``, or a second bottom say to which size. Negative
    ``pad_beg`` and ``pad_end`` cut rows and columns off before.
    """

    bottoms: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.interp_param
        self.cut = (int(p.pad_beg), int(p.pad_end))
        self.sizes = (int(p.height), int(p.width)) if p.HasField("height") and p.HasField("width") else None
        self.shrink = int(p.shrink_factor) if p.HasField("shrink_factor") else None
        self.zoom = int(p.zoom_factor) if p.HasField("zoom_factor") else None
        if max(self.cut) > 0:
            self.fail(f"pad_beg = {self.cut[0]}, pad_end = {self.cut[1]}; 0 or less would do")
        if len(shapes) == 1 and self.sizes is None and self.shrink is None and self.zoom is None:
            self.fail("none of height and width, shrink_factor and zoom_factor is given")
        for name, value in (("shrink_factor", self.shrink), ("zoom_factor", self.zoom)):
            if value is not None and value < 1:
                self.fail(f"{name} = {value}; at least 1 would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        left = [size + sum(self.cut) for size in shapes[0][2:]]
        if min(left) < 1:
            self.fail(f"pad_beg = {self.cut[0]}, pad_end = {self.cut[1]} leave nothing of {shapes[0]}")
        if len(shapes) == 2:
            sizes = list(shapes[1][2:])
        elif self.shrink is not None or self.zoom is not None:
            sizes = [(size - 1) // (self.shrink or 1) + 1 for size in left]
            sizes = [size + (size - 1) * ((self.zoom or 1) - 1) for size in sizes]
        else:
            sizes = list(self.sizes or left)
        if len(sizes) != 2 or min(sizes) < 1:
            self.fail(f"the top's height and width would be {sizes}; at least 1 would do")
        return [(*shapes[0][:2], *sizes)]

    def forward(self, x: Tensor, reference: Tensor | None = None) -> Tensor:
        shapes = [tuple(x.shape), *(() if reference is None else (tuple(reference.shape),))]
        (shape,) = self.output_shapes(shapes)
        if any(self.cut):
            x = x[:, :, -self.cut[0] : x.shape[2] + self.cut[1], -self.cut[0] : x.shape[3] + self.cut[1]]
        return F.interpolate(x, shape[2:], mode="bilinear", align_corners=True)
