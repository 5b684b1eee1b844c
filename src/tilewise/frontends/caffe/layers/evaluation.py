"""The layer that holds a detector's boxes against the true ones."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Layer, Shape
from tilewise.frontends.caffe.layers.detection import overlaps
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["DetectionEvaluate"]


@register("DetectionEvaluate")
class DetectionEvaluate(Layer):
    """Which detections are right, from which a mean average precision follows (Liu et al. 2016, SSD).

    The bottoms are detections (1, 1, boxes, 7) of ``DetectionOutput`` and true boxes (1, 1, boxes, 8) as for
    ``MultiBoxLoss``. The top is (1, 1, classes without the background + detections, 5). A row for each class has -1,
    the class, the number of its true boxes, -1 and -1. A row for each detection has image, class, score, and 1 and 0
    where it is right, 0 and 1 where it is wrong: of an image's detections of a class, the highest score first, one is
    right that overlaps a true box by ``overlap_threshold`` or more of which no other one was right. Without
    ``evaluate_difficult_gt`` difficult boxes are not counted, and detections of them are neither right nor wrong.
    Boxes are shares of the image: ``name_size_file`` is refused.
    """

    bottoms: ClassVar = (2, 2)
    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.detection_evaluate_param
        self.classes, self.background = int(p.num_classes), int(p.background_label_id)
        self.threshold, self.difficult = float(p.overlap_threshold), bool(p.evaluate_difficult_gt)
        if self.classes < 1:
            self.fail(f"num_classes = {self.classes}; at least 1 would do")
        if p.name_size_file:
            self.fail(f"name_size_file = {p.name_size_file!r}; boxes as shares of the image, without it, would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        detections, truth = shapes
        if detections[-1:] != (7,) or truth[-1:] != (8,):
            self.fail(
                f"the bottoms have shapes {detections} and {truth}; (1, 1, boxes, 7) and (1, 1, boxes, 8) would do"
            )
        return [(1, 1, len(self._labels()) + (detections[-2] if len(detections) > 1 else 1), 5)]

    def _labels(self) -> list[int]:
        return [label for label in range(self.classes) if label != self.background]

    @torch.no_grad()
    def forward(self, detections: Tensor, truth: Tensor) -> Tensor:
        """The rows. Their number depends on the detections: rows of class -1, of images without any, are left out."""
        found, true = detections.reshape(-1, 7), truth.reshape(-1, 8).to(detections.dtype)
        true = true[true[:, 0] >= 0]
        counted = true if self.difficult else true[true[:, 7] == 0]
        rows = [
            found.new_tensor([[-1.0, label, float((counted[:, 1] == label).sum()), -1.0, -1.0]])
            for label in self._labels()
        ]
        for image in found[:, 0].unique().tolist():
            of_image = found[found[:, 0] == image]
            for label in of_image[:, 1].unique().tolist():
                if label >= 0:
                    own = true[(true[:, 0] == image) & (true[:, 1] == label)]
                    rows.append(self._judged(of_image[of_image[:, 1] == label], own))
        return torch.cat(rows)[None, None]

    def _judged(self, found: Tensor, true: Tensor) -> Tensor:
        """Rows of the detections of one class in one image."""
        found = found[found[:, 2].argsort(descending=True, stable=True)]
        verdicts = found.new_tensor([0.0, 1.0]).repeat(len(found), 1)
        taken = [False] * len(true)
        for place, box in enumerate(found[:, 3:] if len(true) else ()):
            overlap, best = overlaps(box, true[:, 3:7]).max(0)
            if not overlap >= self.threshold:
                continue
            number = int(best)
            if not self.difficult and bool(true[number, 7] != 0):
                verdicts[place] = 0
            elif not taken[number]:
                taken[number], verdicts[place, 0], verdicts[place, 1] = True, 1, 0
        return torch.cat([found[:, :3], verdicts], 1)
