"""Losses, with Caffe's ways to divide by the number of labels."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops, choice
from tilewise.frontends.caffe.layers.registry import register

__all__ = [
    "ContrastiveLoss", "EuclideanLoss", "HingeLoss", "InfogainLoss", "Loss", "MultinomialLogisticLoss",
    "SigmoidCrossEntropyLoss", "SmoothL1Loss", "SoftmaxWithLoss",
]  # fmt: skip

SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest probability whose logarithm SoftmaxWithLoss takes."""
LOG_THRESHOLD = 1e-20
"""The smallest probability whose logarithm the other losses take."""


class Loss(Layer):
    """A loss: its first top has no axes, and counts with weight 1 where the network does not say otherwise."""

    bottoms: ClassVar = (2, 2)
    is_loss: ClassVar = True

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if shapes[0][:1] != shapes[1][:1]:
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; as many images in both would do")
        return [()]

    def read_normalization(self, parameter: Any, default: str) -> None:
        """Take over how the loss is divided. The old field ``normalize`` counts where the new one is not given."""
        p = parameter.loss_param
        self.ignored = int(p.ignore_label) if p.HasField("ignore_label") else None
        if p.HasField("normalization"):
            self.normalization = choice(p, "normalization")
        elif p.HasField("normalize"):
            self.normalization = "VALID" if p.normalize else "BATCH_SIZE"
        else:
            self.normalization = default

    def counted(self, labels: Tensor) -> Tensor:
        """Which labels count: all but ``ignore_label``."""
        return torch.ones_like(labels, dtype=torch.bool) if self.ignored is None else labels != self.ignored

    def divide(self, total: Tensor, counted: Tensor, images: int) -> Tensor:
        """``total`` divided as ``normalization`` says, by 1 or more."""
        if self.normalization == "VALID" and self.ignored is not None:
            return total / counted.sum().clamp_min(1)
        divisors = {"FULL": counted.numel(), "VALID": counted.numel(), "BATCH_SIZE": images, "NONE": 1}
        return total / max(1, divisors[self.normalization])

    def label_rows(self, scores: Tensor, along: int) -> Tensor:
        """(places, classes): the scores with the classes along the last axis, in the order of the labels."""
        return scores.movedim(along, -1).reshape(-1, scores.shape[along])

    def check_labels(self, shapes: list[Shape], along: int) -> None:
        """Raise ``CaffeError`` where there is not one label for each place of the scores."""
        places = math.prod(shapes[0][:along]) * math.prod(shapes[0][along + 1 :])
        if places != math.prod(shapes[1]):
            self.fail(
                f"the bottoms have shapes {shapes[0]} and {shapes[1]}; one label for each of {places} places, with the "
                f"classes along axis {along}, would do"
            )


def at_least(x: Tensor, least: float) -> Tensor:
    """``x``, but at least ``least``; the gradient is that of ``x`` everywhere."""
    return x + (x.clamp_min(least) - x).detach()


@register("SoftmaxWithLoss")
@register("SoftmaxLoss")
class SoftmaxWithLoss(Loss):
    """-log of the softmax of the label's score, over all labels. A second top has the softmax.

    No probability counts as less than the smallest normal number. Forks' ``weight_by_label_freqs`` weights each label
    by its class' ``class_weighting``.
    """

    tops: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.along = self.axis(parameter.softmax_param.axis, shapes[0])
        self.read_normalization(parameter, "VALID")
        p = parameter.loss_param
        self.weighted = bool(p.weight_by_label_freqs)
        if self.weighted:
            if len(p.class_weighting) != shapes[0][self.along]:
                self.fail(
                    f"class_weighting has {len(p.class_weighting)} weights; one for each of {shapes[0][self.along]} "
                    "classes would do"
                )
            weights = torch.tensor(list(p.class_weighting), dtype=torch.float32, device="cpu")
            self.register_buffer("class_weights", weights, persistent=False)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.check_labels(shapes, self.along)
        return [(), shapes[0]][: self.top_count]

    def forward(self, scores: Tensor, labels: Tensor) -> Tops:
        logs = scores.log_softmax(self.along)
        places = labels.detach().flatten().to(torch.int64)
        counted = self.counted(places)
        places = torch.where(counted, places, torch.zeros_like(places))
        losses = -at_least(self.label_rows(logs, self.along).gather(1, places[:, None])[:, 0], math.log(SMALLEST))
        if self.weighted:
            losses = losses * self.get_buffer("class_weights").to(losses.dtype)[places]
        total = torch.where(counted, losses, torch.zeros_like(losses)).sum()
        loss = self.divide(total, counted, math.prod(scores.shape[: self.along]))
        return (loss, logs.exp()) if self.top_count == 2 else loss


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(Loss):
    """-(t log s + (1 - t) log(1 - s)) of the sigmoid s of each score and its target t, divided by the batch's size."""

    tops: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.read_normalization(parameter, "BATCH_SIZE")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if math.prod(shapes[0]) != math.prod(shapes[1]):
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; as many elements of both would do")
        return [(), shapes[0]][: self.top_count]

    def forward(self, scores: Tensor, targets: Tensor) -> Tops:
        targets = targets.detach().to(scores.dtype).reshape(scores.shape)
        counted = self.counted(targets)
        losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        total = torch.where(counted, losses, torch.zeros_like(losses)).sum()
        loss = self.divide(total, counted, scores.shape[0])
        return (loss, scores.sigmoid()) if self.top_count == 2 else loss


@register("EuclideanLoss")
class EuclideanLoss(Loss):
    """The sum of squared differences over twice the number of images."""

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        super().output_shapes(shapes)
        if math.prod(shapes[0]) != math.prod(shapes[1]):
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; as many elements of both would do")
        return [()]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y.to(x.dtype).reshape(x.shape)).square().sum() / (2 * max(1, x.shape[0]))


@register("HingeLoss")
class HingeLoss(Loss):
    """max(0, 1 - t x), or its square, over all scores x; t is 1 at the label and -1 elsewhere."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.squared = choice(parameter.hinge_loss_param, "norm") == "L2"

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if math.prod(shapes[1]) != shapes[0][0]:
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; one label for each image would do")
        return [()]

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        rows = scores.reshape(scores.shape[0], -1)
        signs = torch.ones_like(rows).scatter(1, labels.reshape(-1, 1).to(torch.int64), -1.0)
        margins = F.relu(1 + rows * signs)
        return (margins.square() if self.squared else margins).sum() / rows.shape[0]


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(Loss):
    """-log of the label's probability, over the number of images; probabilities count as 1e-20 or more."""

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if math.prod(shapes[1]) != shapes[0][0]:
            self.fail(f"the bottoms have shapes {shapes[0]} and {shapes[1]}; one label for each image would do")
        return [()]

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        rows = probabilities.reshape(probabilities.shape[0], -1)
        own = rows.gather(1, labels.reshape(-1, 1).to(torch.int64))
        return -at_least(own, LOG_THRESHOLD).log().sum() / rows.shape[0]


@register("InfogainLoss")
class InfogainLoss(Loss):
    """-sum over classes k of H[label, k] log p_k, for the softmax p of the scores. A second top has the softmax.

    The matrix H (classes, classes) is the third bottom, or in the file ``source``, a ``BlobProto``.
    """

    bottoms: ClassVar = (2, 3)
    tops: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.infogain_loss_param
        self.along = self.axis(p.axis, shapes[0])
        self.read_normalization(parameter, "VALID")
        self.from_file = len(shapes) == 2
        if self.from_file:
            if not p.source:
                self.fail("infogain_loss_param.source is not given; it, or a third bottom, would do")
            from tilewise.frontends.caffe.files import read_mean

            matrix = torch.from_numpy(read_mean(p.source).copy()).to(torch.float32)
            self._check_matrix(tuple(matrix.shape), shapes[0][self.along])
            self.register_buffer("matrix", matrix, persistent=False)

    def _check_matrix(self, shape: Shape, classes: int) -> None:
        if math.prod(shape) != classes**2:
            self.fail(f"the matrix has shape {shape}; ({classes}, {classes}) for {classes} classes would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.check_labels(shapes, self.along)
        if len(shapes) == 3:
            self._check_matrix(shapes[2], shapes[0][self.along])
        return [(), shapes[0]][: self.top_count]

    def forward(self, scores: Tensor, labels: Tensor, matrix: Tensor | None = None) -> Tops:
        matrix = self.get_buffer("matrix") if matrix is None else matrix.detach()
        classes = scores.shape[self.along]
        logs = scores.log_softmax(self.along)
        places = labels.detach().flatten().to(torch.int64)
        counted = self.counted(places)
        places = torch.where(counted, places, torch.zeros_like(places))
        weights = matrix.to(scores.dtype).reshape(classes, classes)[places]
        losses = -(weights * at_least(self.label_rows(logs, self.along), math.log(LOG_THRESHOLD))).sum(1)
        total = torch.where(counted, losses, torch.zeros_like(losses)).sum()
        loss = self.divide(total, counted, math.prod(scores.shape[: self.along]))
        return (loss, logs.exp()) if self.top_count == 2 else loss


@register("ContrastiveLoss")
class ContrastiveLoss(Loss):
    """Over pairs at distance d: d^2 for similar ones (label 1), max(margin - d, 0)^2 for others (label 0), over 2 N.

    ``legacy_version`` takes max(margin - d^2, 0) for the others (Hadsell et al. 2006). As in Caffe, 0.0001 is added to
    the distance by which the gradient is divided.
    """

    bottoms: ClassVar = (3, 3)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.contrastive_loss_param
        self.margin, self.legacy = float(p.margin), bool(p.legacy_version)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_equal(shapes[:2])
        if math.prod(shapes[2]) != shapes[0][0]:
            self.fail(f"the labels have shape {shapes[2]}; one for each pair of {shapes[0]} would do")
        return [()]

    def forward(self, x: Tensor, y: Tensor, similar: Tensor) -> Tensor:
        squares = (x - y).flatten(1).square().sum(1)
        if self.legacy:
            apart = F.relu(self.margin - squares)
        else:
            with torch.no_grad():
                distances = squares.sqrt()
                missing = F.relu(self.margin - distances)
                slopes = -missing / (distances + 1e-4)
            apart = missing.square() + slopes * (squares - squares.detach())
        return torch.where(similar.flatten() != 0, squares, apart).sum() / (2 * x.shape[0])


@register("SmoothL1Loss")
class SmoothL1Loss(Loss):
    """sigma^2 d^2 / 2 where |d| is below 1 / sigma^2, |d| - 0.5 / sigma^2 elsewhere, over the number of images.

    d is the difference of the first two bottoms, times the third one where there is one. The fourth one weights the
    result (Girshick 2015, Fast R-CNN).
    """

    bottoms: ClassVar = (2, 4)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.squared = float(parameter.smooth_l1_loss_param.sigma) ** 2
        if not self.squared > 0:
            self.fail("sigma = 0; a positive number would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_equal(shapes)
        return [()]

    def forward(self, x: Tensor, y: Tensor, inside: Tensor | None = None, outside: Tensor | None = None) -> Tensor:
        difference = x - y if inside is None else (x - y) * inside
        size = difference.abs()
        losses = torch.where(
            size < 1 / self.squared, 0.5 * self.squared * difference.square(), size - 0.5 / self.squared
        )
        return (losses if outside is None else losses * outside).sum() / x.shape[0]
