"""Layers of detectors: pooled regions, prior boxes, and what is left of many overlapping boxes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Layer, Shape, choice
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["DetectionOutput", "PriorBox", "ROIPooling"]


@register("ROIPooling")
class ROIPooling(Layer):
    """The largest values of pooled_h x pooled_w bins of each region (Girshick 2015, Fast R-CNN).

    The bottoms are features (N, C, H, W) and regions (R, 5): the number of the image, x1, y1, x2 and y2 in units of
    1 / spatial_scale. The top is (R, C, pooled_h, pooled_w), 0 for a bin that lies outside. Of equal values the
    gradient goes to the first.
    """

    bottoms: ClassVar = (2, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.roi_pooling_param
        self.size, self.scale = (int(p.pooled_h), int(p.pooled_w)), float(p.spatial_scale)
        if min(self.size) < 1:
            self.fail(f"pooled_h = {self.size[0]}, pooled_w = {self.size[1]}; at least 1 would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        if math.prod(shapes[1][1:]) != 5:
            self.fail(f"the regions have shape {shapes[1]}; (regions, 5) would do")
        return [(shapes[1][0], shapes[0][1], *self.size)]

    def forward(self, x: Tensor, regions: Tensor) -> Tensor:
        regions = regions.detach().reshape(-1, 5).to(x.dtype)
        corners = regions[:, 1:] * self.scale
        corners = corners.sign() * (corners.abs() + 0.5).floor()
        rows = self._bins(corners[:, 1], corners[:, 3], self.size[0], x.shape[2])
        columns = self._bins(corners[:, 0], corners[:, 2], self.size[1], x.shape[3])
        found = [
            self._pool(x[image], rows[region], columns[region])
            for region, image in enumerate(regions[:, 0].to(torch.int64).tolist())
        ]
        return torch.stack(found) if found else x.new_zeros((0, x.shape[1], *self.size))

    @staticmethod
    def _bins(first: Tensor, last: Tensor, bins: int, size: int) -> Tensor:
        """(regions, bins, size): which rows or columns are in each bin."""
        numbers = torch.arange(bins, dtype=first.dtype, device=first.device)
        step = ((last - first + 1).clamp_min(1) / bins)[:, None]
        starts = ((numbers * step).floor() + first[:, None]).clamp(0, size)
        ends = (((numbers + 1) * step).ceil() + first[:, None]).clamp(0, size)
        places = torch.arange(size, dtype=first.dtype, device=first.device)
        return (places >= starts[..., None]) & (places < ends[..., None])

    @staticmethod
    def _pool(plane: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """(C, bins, bins) of (C, H, W). The place of each maximum is found without a gradient, then read."""
        height, width = plane.shape[1:]
        lowest = torch.finfo(plane.dtype).min
        with torch.no_grad():
            # The largest of each column within the rows of a bin, and its row; then the first of the largest of these.
            values, places = plane[:, None].where(rows[:, :, None], lowest).max(2)
            inside = columns[:, None, :]  # (bins of columns, 1, W)
            wide = values[:, None].where(inside, lowest)  # (C, bins of columns, bins of rows, W)
            largest = wide.amax(-1, keepdim=True)
            keys = places * width + torch.arange(width, dtype=torch.int64, device=plane.device)
            keys = keys[:, None].where((wide == largest) & inside, height * width)
            first = keys.amin(-1).transpose(1, 2)  # (C, bins of rows, bins of columns)
            empty = ~(rows.any(1)[:, None] & columns.any(1))
            first = first.clamp_max(height * width - 1)
        found = plane.flatten(1).gather(1, first.flatten(1)).reshape(first.shape)
        return found.where(~empty, torch.zeros_like(found))


@register("PriorBox")
class PriorBox(Layer):
    """Boxes of several sizes and aspect ratios around the centre of each place of a feature map (Liu et al. 2016, SSD).

    The bottoms are features (N, C, H, W) and the image (N, C, height, width). The top is (1, 2, H * W * boxes * 4):
    corners as shares of the image, then variances.
    """

    bottoms: ClassVar = (2, 2)
    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.prior_box_param
        least, most = [float(size) for size in p.min_size], [float(size) for size in p.max_size]
        if not least or min(least) <= 0:
            self.fail(f"min_size = {least}; one positive number or more would do")
        if most and (len(most) != len(least) or any(b <= a for a, b in zip(least, most, strict=True))):
            self.fail(f"max_size = {most}; one above each min_size of {least} would do")
        ratios = [1.0]
        for ratio in map(float, p.aspect_ratio):
            if not ratio > 0:
                self.fail(f"aspect_ratio = {ratio}; a positive number would do")
            if all(abs(ratio - other) >= 1e-6 for other in ratios):
                ratios += [ratio, 1 / ratio] if p.flip else [ratio]
        self.boxes: list[tuple[float, float]] = []
        for place, size in enumerate(least):
            self.boxes.append((size, size))
            if most:
                self.boxes.append((math.sqrt(size * most[place]),) * 2)
            roots = [math.sqrt(ratio) for ratio in ratios[1:]]
            self.boxes += [(size * root, size / root) for root in roots]
        self.variances = [float(value) for value in p.variance] or [0.1]
        if len(self.variances) not in (1, 4) or min(self.variances) <= 0:
            self.fail(f"variance = {self.variances}; one or four positive numbers would do")
        self.variances *= 4 if len(self.variances) == 1 else 1
        self.clip, self.offset = bool(p.clip), float(p.offset)
        self.image = (int(p.img_h or p.img_size), int(p.img_w or p.img_size))
        self.step = (float(p.step_h or p.step), float(p.step_w or p.step))

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        for shape in shapes:
            self.need_axes(shape, 4)
        return [(1, 2, math.prod(shapes[0][2:]) * len(self.boxes) * 4)]

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        height, width = (asked or size for asked, size in zip(self.image, image.shape[2:], strict=True))
        centres = [
            (torch.arange(count, dtype=x.dtype, device=x.device) + self.offset) * (step or size / count)
            for count, step, size in zip(x.shape[2:], self.step, (height, width), strict=True)
        ]
        halves = torch.tensor(self.boxes, dtype=x.dtype, device=x.device) / 2
        y, x_ = torch.meshgrid(*centres, indexing="ij")
        across, down = x_[..., None], y[..., None]
        boxes = torch.stack(
            [
                (across - halves[:, 0]) / width,
                (down - halves[:, 1]) / height,
                (across + halves[:, 0]) / width,
                (down + halves[:, 1]) / height,
            ],
            -1,
        )
        boxes = boxes.clamp(0, 1) if self.clip else boxes
        variances = torch.tensor(self.variances, dtype=x.dtype, device=x.device).expand(boxes.shape)
        return torch.stack([boxes.flatten(), variances.flatten()])[None]


def overlaps(box: Tensor, boxes: Tensor) -> Tensor:
    """The shared area of a box (4,) with each of (K, 4), over the area that they cover together."""
    sides = (torch.minimum(box[2:], boxes[:, 2:]) - torch.maximum(box[:2], boxes[:, :2])).clamp_min(0)
    shared = sides.prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(1) + (box[2:] - box[:2]).clamp_min(0).prod()
    together = areas - shared
    return torch.where(together > 0, shared / together, torch.zeros_like(shared))


def suppressed(boxes: Tensor, scores: Tensor, threshold: float, top_k: int, eta: float) -> Tensor:
    """The numbers of boxes (K, 4) that overlap none of higher score by more than ``threshold``, the highest first.

    Only the ``top_k`` highest count, all where it is below 0. Where ``eta`` is below 1, the threshold falls by this
    factor with each box that is kept, as long as it is above 0.5.
    """
    order = scores.argsort(descending=True, stable=True)
    order = order[:top_k] if top_k >= 0 else order
    kept: list[int] = []
    left = boxes[order]
    for place in range(len(order)):
        if not kept or not bool((overlaps(left[place], left[kept]) > threshold).any()):
            kept.append(place)
            if eta < 1 and threshold > 0.5:
                threshold *= eta
    return order[kept]


@register("DetectionOutput")
class DetectionOutput(Layer):
    """The boxes that are left after decoding, thresholds and the suppression of overlapping ones (SSD).

    The bottoms are offsets (N, priors * 4), or (N, priors * classes * 4) unless ``share_location``, scores
    (N, priors * classes), and prior boxes (1, 2, priors * 4). The top is (1, 1, boxes, 7): image, class, score, and
    corners. Its size depends on the values; without any box it has one row for each image, of its number and -1.
    """

    bottoms: ClassVar = (3, 3)
    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.detection_output_param
        self.classes, self.shared, self.background = int(p.num_classes), bool(p.share_location), p.background_label_id
        self.code, self.encoded = choice(p, "code_type"), bool(p.variance_encoded_in_target)
        self.keep, self.least = int(p.keep_top_k), float(p.confidence_threshold)
        if not p.HasField("confidence_threshold"):
            self.least = -math.inf
        self.overlap, self.top_k, self.eta = (
            float(p.nms_param.nms_threshold), int(p.nms_param.top_k) if p.nms_param.HasField("top_k") else -1,
            float(p.nms_param.eta),
        )  # fmt: skip
        if self.classes < 1:
            self.fail(f"num_classes = {self.classes}; at least 1 would do")
        if self.overlap < 0 or not 0 < self.eta <= 1:
            self.fail(f"nms_threshold = {self.overlap}, eta = {self.eta}; 0 or more, and above 0 to 1, would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        offsets, scores, priors = shapes
        if len(priors) != 3 or priors[1] != 2 or priors[2] % 4:
            self.fail(f"the prior boxes have shape {priors}; (1, 2, priors * 4) would do")
        count = priors[2] // 4
        wanted = (count * 4 * (1 if self.shared else self.classes), count * self.classes)
        if (math.prod(offsets[1:]), math.prod(scores[1:])) != wanted:
            self.fail(
                f"offsets and scores have shapes {offsets} and {scores}; {wanted[0]} and {wanted[1]} values would do"
            )
        return [(1, 1, offsets[0], 7)]

    @torch.no_grad()
    def forward(self, offsets: Tensor, scores: Tensor, priors: Tensor) -> Tensor:
        images = offsets.shape[0]
        offsets = offsets.reshape(images, -1, 1 if self.shared else self.classes, 4)
        scores = scores.reshape(images, -1, self.classes)
        boxes, variances = priors[0].reshape(2, -1, 1, 4)
        decoded = self._decode(boxes, torch.ones_like(variances) if self.encoded else variances, offsets)
        rows = [row for image in range(images) for row in self._image(image, decoded[image], scores[image])]
        if not rows:
            numbers = torch.arange(images, dtype=offsets.dtype, device=offsets.device)
            return torch.cat([numbers[:, None], offsets.new_full((images, 6), -1)], 1)[None, None]
        return torch.cat(rows)[None, None]

    def _decode(self, boxes: Tensor, variances: Tensor, offsets: Tensor) -> Tensor:
        """Corners of (N, priors, classes, 4) offsets from ``boxes``."""
        moves = variances * offsets
        if self.code == "CORNER":
            return boxes + moves
        sizes = boxes[..., 2:] - boxes[..., :2]
        if self.code == "CORNER_SIZE":
            return boxes + moves * torch.cat([sizes, sizes], -1)
        centres = (boxes[..., 2:] + boxes[..., :2]) / 2 + moves[..., :2] * sizes
        halves = moves[..., 2:].exp() * sizes / 2
        return torch.cat([centres - halves, centres + halves], -1)

    def _image(self, image: int, boxes: Tensor, scores: Tensor) -> list[Tensor]:
        """Rows of one image, classes in order."""
        kept: dict[int, Tensor] = {}
        for label in range(self.classes):
            if label == self.background:
                continue
            places = (scores[:, label] > self.least).nonzero().flatten()
            own = boxes[places, 0 if self.shared else label]
            chosen = suppressed(own, scores[places, label], self.overlap, self.top_k, self.eta)
            kept[label] = places[chosen]
        total = sum(len(places) for places in kept.values())
        if self.keep > -1 and total > self.keep:
            every = torch.cat([scores[places, label] for label, places in kept.items()])
            best = every.argsort(descending=True, stable=True)[: self.keep]
            chosen = torch.zeros_like(every, dtype=torch.bool)
            chosen[best] = True
            parts = chosen.split([len(places) for places in kept.values()])
            kept = {label: places[part] for (label, places), part in zip(kept.items(), parts, strict=True)}
        rows = []
        for label, places in kept.items():
            if len(places):
                heads = scores.new_tensor([float(image), float(label)]).expand(len(places), 2)
                own = boxes[places, 0 if self.shared else label]
                rows.append(torch.cat([heads, scores[places, label][:, None], own], 1))
        return rows
