"""The loss of single-shot detectors: which prior boxes belong to which true boxes, and what they should predict."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.frontends.caffe.layers.base import Shape, choice
from tilewise.frontends.caffe.layers.detection import overlaps
from tilewise.frontends.caffe.layers.losses import Loss
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["Matches", "MultiBoxLoss", "encoded_boxes", "matched"]

LEAST_OVERLAP = 1e-6
"""Boxes that overlap by no more than this do not meet."""


class Matches(NamedTuple):
    """For each prior box the number of its true box, -1 for none, -2 for one that never counts; and its overlap."""

    places: Tensor
    overlaps: Tensor


def matched(truth: Tensor, boxes: Tensor, threshold: float | None, *, inside: bool = False) -> Matches:
    """Which of the ``boxes`` (P, 4) are for which box of ``truth`` (G, 4).

    Each true box first gets the box that overlaps it most, the largest overlap of all pairs first. With a ``threshold``
    every other box then takes the true box that it overlaps most, if by at least that. With ``inside`` boxes that reach
    beyond the image never count.
    """
    places = torch.full((len(boxes),), -1, dtype=torch.int64, device=boxes.device)
    out = ((boxes < 0) | (boxes > 1)).any(1) if inside else torch.zeros_like(places, dtype=torch.bool)
    places[out] = -2
    if not len(truth):
        return Matches(places, torch.zeros_like(boxes[:, 0]))
    shared = torch.stack([overlaps(box, boxes) for box in truth], 1)
    shared = torch.where((shared > LEAST_OVERLAP) & ~out[:, None], shared, torch.zeros_like(shared))
    best = shared.amax(1)
    left = shared.clone()
    for _ in range(len(truth)):
        place = int(left.argmax())
        row, column = divmod(place, len(truth))
        if not left[row, column] > 0:
            break
        places[row], best[row] = column, shared[row, column]
        left[row], left[:, column] = 0, 0
    if threshold is not None:
        size, own = shared.max(1)
        more = (places == -1) & (size >= threshold) & (size > 0)
        places = torch.where(more, own, places)
    return Matches(places, best)


def encoded_boxes(truth: Tensor, boxes: Tensor, code: str) -> Tensor:
    """What a network should predict (K, 4) for ``boxes`` (K, 4) to become the boxes of ``truth`` (K, 4)."""
    if code == "CORNER":
        return truth - boxes
    sizes = boxes[:, 2:] - boxes[:, :2]
    if code == "CORNER_SIZE":
        return (truth - boxes) / torch.cat([sizes, sizes], 1)
    centres = (truth[:, :2] + truth[:, 2:] - boxes[:, :2] - boxes[:, 2:]) / 2
    return torch.cat([centres / sizes, ((truth[:, 2:] - truth[:, :2]) / sizes).log()], 1)


@register("MultiBoxLoss")
class MultiBoxLoss(Loss):
    """The loss of offsets and scores of prior boxes (Liu et al. 2016, SSD, section 2.2).

    The bottoms are offsets (N, priors * 4), or (N, priors * classes * 4) unless ``share_location``, scores
    (N, priors * classes), prior boxes (1, 2, priors * 4), and true boxes (1, 1, boxes, 8): number of the image, class,
    number of the object, corners as shares of the image, and 1 where it is difficult. Rows of image -1 do not count.

    Offsets count where a prior box is matched with a true one (:func:`matched`), by a smooth L1 loss or half of the
    squares, times ``loc_weight``. Scores count there too, and for the hardest of the other boxes: ``neg_pos_ratio``
    times as many as are matched, those of the highest loss among the ones that overlap no true box by ``neg_overlap``.
    With ``mining_type: HARD_EXAMPLE`` the ``sample_size`` boxes of the highest loss count, whatever they are; with
    ``NONE`` all do. The sum is divided by the number of matches, or as ``normalization`` says. What is chosen has no
    gradient.

    Regions are not suppressed while examples are chosen (``nms_param``), and ``bp_inside`` is not there.
    """

    bottoms: ClassVar = (4, 4)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.multibox_loss_param
        self.classes, self.shared, self.background = int(p.num_classes), bool(p.share_location), p.background_label_id
        self.smooth, self.softmax = choice(p, "loc_loss_type") == "SMOOTH_L1", choice(p, "conf_loss_type") == "SOFTMAX"
        self.location_weight, self.code = float(p.loc_weight), choice(p, "code_type")
        self.threshold = float(p.overlap_threshold) if choice(p, "match_type") == "PER_PREDICTION" else None
        self.by_prior, self.difficult = bool(p.use_prior_for_matching), bool(p.use_difficult_gt)
        self.mining = choice(p, "mining_type")
        if p.HasField("do_neg_mining") and not p.HasField("mining_type"):
            self.mining = "MAX_NEGATIVE" if p.do_neg_mining else "NONE"
        self.ratio, self.apart, self.sample = float(p.neg_pos_ratio), float(p.neg_overlap), int(p.sample_size)
        self.encoded, self.agnostic = bool(p.encode_variance_in_target), bool(p.map_object_to_agnostic)
        self.inside = bool(p.ignore_cross_boundary_bbox)
        if self.classes < 1:
            self.fail(f"num_classes = {self.classes}; at least 1 would do")
        if self.mining == "HARD_EXAMPLE" and self.sample < 1:
            self.fail(f"sample_size = {self.sample}; at least 1 would do")
        for name in ("nms_param", "bp_inside"):
            if p.HasField(name) and (name == "nms_param" or p.bp_inside):
                self.fail(f"{name} is not supported; a network without it would do")
        self.read_normalization(parameter, "VALID")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        offsets, scores, priors, truth = shapes
        if len(priors) != 3 or priors[1] != 2 or priors[2] % 4:
            self.fail(f"the prior boxes have shape {priors}; (1, 2, priors * 4) would do")
        count = priors[2] // 4
        wanted = (count * 4 * (1 if self.shared else self.classes), count * self.classes)
        if (math.prod(offsets[1:]), math.prod(scores[1:])) != wanted or offsets[0] != scores[0]:
            self.fail(
                f"offsets and scores have shapes {offsets} and {scores}; {wanted[0]} and {wanted[1]} values would do"
            )
        if truth[-1:] != (8,):
            self.fail(f"the true boxes have shape {truth}; (1, 1, boxes, 8) would do")
        return [()]

    def forward(self, offsets: Tensor, scores: Tensor, priors: Tensor, truth: Tensor) -> Tensor:
        images = offsets.shape[0]
        offsets = offsets.reshape(images, -1, 1 if self.shared else self.classes, 4)
        scores = scores.reshape(images, -1, self.classes)
        boxes, variances = priors.detach()[0].reshape(2, -1, 4).to(offsets.dtype)
        rows = truth.detach().reshape(-1, 8).to(offsets.dtype)
        location, confidence, count = scores.new_zeros(()), scores.new_zeros(()), 0
        for image in range(images):
            own = rows[rows[:, 0] == image]
            own = own if self.difficult else own[own[:, 7] == 0]
            self._check_labels(own, image)
            pairs, negatives = self._chosen(own, boxes, variances, offsets[image], scores[image])
            for kind, (priors_of, truth_of) in pairs.items():
                count += len(priors_of)
                moves = offsets[image, priors_of, kind]
                wanted = encoded_boxes(own[truth_of, 3:7], boxes[priors_of], self.code) / variances[priors_of]
                moves = moves / variances[priors_of] if self.encoded else moves
                location = location + self._location(moves - wanted).sum()
            confidence = confidence + self._confidence(own, pairs, negatives, scores[image])
        divisors = {"FULL": images * boxes.shape[0], "VALID": count, "BATCH_SIZE": images, "NONE": 1}
        total: Tensor = (self.location_weight * location + confidence) / max(1, divisors[self.normalization])
        return total

    def _check_labels(self, own: Tensor, image: int) -> None:
        labels = own[:, 1]
        wrong = labels[(labels < 0) | (labels >= self.classes) | (labels == self.background)]
        if len(wrong):
            self.fail(
                f"a true box of image {image} has the class {int(wrong[0])}; 0 to {self.classes - 1} without the "
                f"background's {self.background} would do"
            )

    def _location(self, difference: Tensor) -> Tensor:
        """(K,) losses of differences (K, 4)."""
        if self.smooth:
            losses: Tensor = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none")
            return losses.sum(1)
        return difference.square().sum(1) / 2

    def _confidence(self, own: Tensor, pairs: Any, negatives: Tensor, scores: Tensor) -> Tensor:
        """The loss of the classes of one image: of matched boxes and of the chosen others."""
        labels = torch.full((len(scores),), self.background, dtype=torch.int64, device=scores.device)
        if self.mining == "NONE":
            for priors_of, truth_of in pairs.values():
                labels[priors_of] = self._labels(own, truth_of)
            return self._losses(scores, labels).sum()
        found = self._losses(scores[negatives], labels[negatives]).sum()
        for priors_of, truth_of in pairs.values():
            found = found + self._losses(scores[priors_of], self._labels(own, truth_of)).sum()
        return found

    def _labels(self, own: Tensor, places: Tensor) -> Tensor:
        labels = own[places, 1].to(torch.int64)
        return torch.full_like(labels, self.background + 1) if self.agnostic else labels

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """(K,) losses of scores (K, classes)."""
        if self.softmax:
            return F.cross_entropy(scores, labels, reduction="none")
        targets = F.one_hot(labels, self.classes).to(scores.dtype)
        return F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1)

    @torch.no_grad()
    def _chosen(
        self, own: Tensor, boxes: Tensor, variances: Tensor, offsets: Tensor, scores: Tensor
    ) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """For each class of locations the matched prior and true boxes, and the other prior boxes that count."""
        kinds = [0] if self.shared else [kind for kind in range(self.classes) if kind != self.background]
        matches = {}
        for kind in kinds:
            of_kind = torch.arange(len(own), dtype=torch.int64, device=own.device)
            of_kind = of_kind if self.shared else of_kind[own[:, 1] == kind]
            compared = boxes if self.by_prior else self._decoded(boxes, variances, offsets[:, kind])
            found = matched(own[of_kind, 3:7], compared, self.threshold, inside=self.inside)
            numbers = torch.cat([of_kind, of_kind.new_tensor([-2, -1])])[found.places]  # -2 and -1 stay
            matches[kind] = Matches(numbers, found.overlaps)
        negatives = (
            []
            if self.mining == "NONE" or not len(own)
            else self._mined(own, matches, scores, offsets, boxes, variances)
        )
        pairs = {}
        for kind, match in matches.items():
            priors_of = (match.places >= 0).nonzero().flatten()
            pairs[kind] = (priors_of, match.places[priors_of])
        return pairs, torch.cat(negatives) if negatives else boxes.new_zeros(0, dtype=torch.int64)

    def _mined(
        self,
        own: Tensor,
        matches: dict[int, Matches],
        scores: Tensor,
        offsets: Tensor,
        boxes: Tensor,
        variances: Tensor,
    ) -> list[Tensor]:
        """The hardest boxes without a true box; with HARD_EXAMPLE easy matches are taken out of ``matches``."""
        labels = torch.full((len(scores),), self.background, dtype=torch.int64, device=scores.device)
        for match in matches.values():
            labels = torch.where(match.places >= 0, self._labels(own, match.places.clamp_min(0)), labels)
        losses = self._losses(scores, labels)
        negatives = []
        for kind, match in matches.items():
            if self.mining == "MAX_NEGATIVE":
                may = ((match.places == -1) & (match.overlaps < self.apart)).nonzero().flatten()
                count = int(int((match.places >= 0).sum()) * self.ratio)
                negatives.append(may[losses[may].argsort(descending=True, stable=True)[:count]])
                continue
            every = losses + self._location_losses(own, match.places, offsets[:, kind], boxes, variances)
            hard = every.argsort(descending=True, stable=True)[: self.sample]
            is_hard = torch.zeros_like(match.places, dtype=torch.bool)
            is_hard[hard] = True
            negatives.append((is_hard & (match.places == -1)).nonzero().flatten())
            easy = (match.places >= 0) & ~is_hard
            matches[kind] = match._replace(places=match.places.masked_fill(easy, -1))
        return negatives

    def _location_losses(
        self, own: Tensor, places: Tensor, offsets: Tensor, boxes: Tensor, variances: Tensor
    ) -> Tensor:
        """(priors,) the loss of each matched box's offsets, 0 elsewhere."""
        found = torch.zeros_like(boxes[:, 0])
        at = (places >= 0).nonzero().flatten()
        wanted = encoded_boxes(own[places[at], 3:7], boxes[at], self.code) / variances[at]
        moves = offsets[at] / variances[at] if self.encoded else offsets[at]
        found[at] = self._location(moves - wanted)
        return found

    def _decoded(self, boxes: Tensor, variances: Tensor, offsets: Tensor) -> Tensor:
        """Corners (priors, 4) that the offsets stand for."""
        moves = offsets if self.encoded else offsets * variances
        if self.code == "CORNER":
            return boxes + moves
        sizes = boxes[:, 2:] - boxes[:, :2]
        if self.code == "CORNER_SIZE":
            return boxes + moves * torch.cat([sizes, sizes], 1)
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 + moves[:, :2] * sizes
        halves = moves[:, 2:].exp() * sizes / 2
        return torch.cat([centres - halves, centres + halves], 1)
