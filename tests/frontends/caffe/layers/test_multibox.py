"""The loss of single-shot detectors, against a slow reference in plain Python, and by differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.frontends.caffe.layers.nets import layer, tops
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.layers.base import Layer
from tilewise.frontends.caffe.layers.multibox import encoded_boxes, matched

PRIORS, CLASSES, IMAGES = 12, 4, 3
DEFAULTS: dict[str, Any] = {
    "match_type": "PER_PREDICTION", "overlap_threshold": 0.35, "mining_type": "MAX_NEGATIVE", "neg_pos_ratio": 2,
    "neg_overlap": 0.35, "code_type": "CENTER_SIZE", "share_location": True, "loc_weight": 1,
    "loc_loss_type": "SMOOTH_L1", "conf_loss_type": "SOFTMAX", "encode_variance_in_target": False,
    "use_difficult_gt": True, "use_prior_for_matching": True, "map_object_to_agnostic": False, "sample_size": 5,
    "ignore_cross_boundary_bbox": False,
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {},
    {"match_type": "BIPARTITE"},
    {"mining_type": "NONE"},
    {"mining_type": "HARD_EXAMPLE"},
    {"mining_type": "HARD_EXAMPLE", "sample_size": 2, "loc_loss_type": "L2"},
    {"code_type": "CORNER", "loc_weight": 2},
    {"code_type": "CORNER_SIZE", "encode_variance_in_target": True},
    {"share_location": False},
    {"share_location": False, "use_prior_for_matching": False, "mining_type": "NONE"},
    {"conf_loss_type": "LOGISTIC", "loc_loss_type": "L2"},
    {"use_difficult_gt": False, "map_object_to_agnostic": True},
    {"ignore_cross_boundary_bbox": True, "neg_pos_ratio": 0.5},
]


def made(options: dict[str, Any], more: str = "") -> Layer:
    fields = {**DEFAULTS, **options}
    written = " ".join(
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in fields.items()
    )
    locations = 1 if fields["share_location"] else CLASSES
    shapes = ((IMAGES, PRIORS * 4 * locations), (IMAGES, PRIORS * CLASSES), (1, 2, PRIORS * 4), (1, 1, 6, 8))
    text = f"multibox_loss_param {{ num_classes: {CLASSES} {written} }} {more}"
    return layer("MultiBoxLoss", text, *shapes)


def bottoms(options: dict[str, Any]) -> list[Tensor]:
    """Offsets, scores, priors of which some reach beyond the image, and six true boxes in two of three images."""
    locations = 1 if {**DEFAULTS, **options}["share_location"] else CLASSES
    offsets = torch.randn(IMAGES, PRIORS * 4 * locations, dtype=torch.float64, device="cpu").requires_grad_()
    scores = torch.randn(IMAGES, PRIORS * CLASSES, dtype=torch.float64, device="cpu").requires_grad_()
    starts = torch.rand(PRIORS, 2, dtype=torch.float64, device="cpu") * 0.6
    sizes = 0.25 + 0.25 * torch.rand(PRIORS, 2, dtype=torch.float64, device="cpu")
    boxes = torch.cat([starts, starts + sizes], 1)
    variances = torch.tensor([0.1, 0.1, 0.2, 0.2], dtype=torch.float64, device="cpu").repeat(PRIORS)
    rows = []
    for number in range(6):
        corner = torch.rand(2, dtype=torch.float64, device="cpu") * 0.5
        rows.append(
            [
                float(number % 2) if number < 5 else -1.0,
                1.0 + number % 3,
                number,
                *corner.tolist(),
                *(corner + 0.4).tolist(),
                number % 3 == 0,
            ]
        )
    truth = torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(1, 1, 6, 8)
    return [offsets, scores, torch.stack([boxes.flatten(), variances])[None], truth]


def overlap(a: list[float], b: list[float]) -> float:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    return w * h / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h)


def reference_match(
    truth: list[list[float]], boxes: list[list[float]], o: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """A box of truth for each box, -1 for none, -2 for one that is out, pair by pair."""
    found, best = [-1] * len(boxes), [0.0] * len(boxes)
    pairs = {}
    for i, box in enumerate(boxes):
        if o["ignore_cross_boundary_bbox"] and (min(box) < 0 or max(box) > 1):
            found[i] = -2
            continue
        for j, true in enumerate(truth):
            if overlap(box, true) > 1e-6:
                pairs[i, j] = overlap(box, true)
                best[i] = max(best[i], pairs[i, j])
    free = set(range(len(truth)))
    while free:
        open_pairs = {p: v for p, v in pairs.items() if p[1] in free and found[p[0]] == -1}
        if not open_pairs:
            break
        (i, j), value = max(open_pairs.items(), key=lambda item: item[1])
        found[i], best[i] = j, value
        free.remove(j)
    if o["match_type"] == "PER_PREDICTION":
        for i in range(len(boxes)):
            own = {j: v for (k, j), v in pairs.items() if k == i and v >= o["overlap_threshold"]}
            if found[i] == -1 and own:
                found[i] = max(own, key=lambda j: own[j])
    return found, best


def encode(true: list[float], box: list[float], code: str) -> list[float]:
    w, h = box[2] - box[0], box[3] - box[1]
    if code != "CENTER_SIZE":
        scale = [w, h, w, h] if code == "CORNER_SIZE" else [1.0] * 4
        return [(t - b) / s for t, b, s in zip(true, box, scale, strict=True)]
    centre = [((true[k] + true[k + 2]) - (box[k] + box[k + 2])) / 2 for k in (0, 1)]
    return [centre[0] / w, centre[1] / h, math.log((true[2] - true[0]) / w), math.log((true[3] - true[1]) / h)]


def decode(moves: list[float], box: list[float]) -> list[float]:
    w, h = box[2] - box[0], box[3] - box[1]
    x, y = (box[0] + box[2]) / 2 + moves[0] * w, (box[1] + box[3]) / 2 + moves[1] * h
    a, b = math.exp(moves[2]) * w / 2, math.exp(moves[3]) * h / 2
    return [x - a, y - b, x + a, y + b]


def reference(given: list[Tensor], o: dict[str, Any]) -> float:
    """The loss, box by box, after the definitions."""
    locations = 1 if o["share_location"] else CLASSES
    offsets = given[0].detach().reshape(IMAGES, PRIORS, locations, 4).tolist()
    scores = given[1].detach().reshape(IMAGES, PRIORS, CLASSES).tolist()
    boxes, variance = given[2][0, 0].reshape(PRIORS, 4).tolist(), given[2][0, 1, :4].tolist()

    def confidence(row: list[float], label: int) -> float:
        if o["conf_loss_type"] == "SOFTMAX":
            return math.log(sum(map(math.exp, row))) - row[label]
        return sum(math.log1p(math.exp(-x if c == label else x)) for c, x in enumerate(row))

    def location(moves: list[float], true: list[float], box: list[float]) -> float:
        total = 0.0
        for move, want, v in zip(moves, encode(true, box, o["code_type"]), variance, strict=True):
            d = abs((move / v if o["encode_variance_in_target"] else move) - want / v)
            total += d * d / 2 if o["loc_loss_type"] == "L2" or d < 1 else d - 0.5
        return total

    loc = conf = 0.0
    matches = 0
    for image in range(IMAGES):
        truth = [
            row for row in given[3].reshape(-1, 8).tolist() if row[0] == image and (o["use_difficult_gt"] or not row[7])
        ]
        labels = [1 if o["map_object_to_agnostic"] else int(row[1]) for row in truth]
        assigned: dict[int, tuple[list[int], list[float]]] = {}
        for kind in [0] if locations == 1 else [1, 2, 3]:
            own = [j for j, row in enumerate(truth) if locations == 1 or row[1] == kind]
            compared = boxes
            if not o["use_prior_for_matching"]:
                compared = [
                    decode([m * v for m, v in zip(offsets[image][i][kind], variance, strict=True)], box)
                    for i, box in enumerate(boxes)
                ]
            found, best = reference_match([truth[j][3:7] for j in own], compared, o)
            assigned[kind] = ([own[j] if j >= 0 else j for j in found], best)
        label_of = [0] * PRIORS
        for found, _ in assigned.values():
            for i, j in enumerate(found):
                label_of[i] = labels[j] if j >= 0 else label_of[i]
        losses = [confidence(scores[image][i], label_of[i]) for i in range(PRIORS)]
        for kind, (found, best) in assigned.items():
            if o["mining_type"] == "MAX_NEGATIVE" and truth:
                may = [i for i in range(PRIORS) if found[i] == -1 and best[i] < o["neg_overlap"]]
                count = int(sum(j >= 0 for j in found) * o["neg_pos_ratio"])
                conf += sum(confidence(scores[image][i], 0) for i in sorted(may, key=lambda i: -losses[i])[:count])
            if o["mining_type"] == "HARD_EXAMPLE" and truth:
                every = [
                    x + (location(offsets[image][i][kind], truth[found[i]][3:7], boxes[i]) if found[i] >= 0 else 0)
                    for i, x in enumerate(losses)
                ]
                hard = sorted(range(PRIORS), key=lambda i: -every[i])[: o["sample_size"]]
                conf += sum(confidence(scores[image][i], 0) for i in hard if found[i] == -1)
                found[:] = [j if j < 0 or i in hard else -1 for i, j in enumerate(found)]
            for i, j in enumerate(found):
                if j >= 0:
                    matches += 1
                    loc += location(offsets[image][i][kind], truth[j][3:7], boxes[i])
                    conf += confidence(scores[image][i], labels[j]) if o["mining_type"] != "NONE" else 0
        if o["mining_type"] == "NONE":
            conf += sum(losses)
    return (o["loc_weight"] * loc + conf) / max(1, matches)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_loss_is_that_of_the_reference(options: dict[str, Any]) -> None:
    it = made(options)
    for _ in range(2):
        given = bottoms(options)
        (loss,) = tops(it, *given)
        assert loss.item() == pytest.approx(reference(given, {**DEFAULTS, **options}), rel=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"code_type": "CORNER"}, {"conf_loss_type": "LOGISTIC"}, {"mining_type": "NONE"}], ids=str
)
def test_gradients_of_offsets_and_scores_are_what_differences_say(options: dict[str, Any]) -> None:
    it, given = made(options), bottoms(options)
    assert torch.autograd.gradcheck(lambda a, b: it(a, b, *given[2:]), given[:2], fast_mode=True)


@pytest.mark.parametrize(("mode", "divisor"), [("NONE", 1), ("BATCH_SIZE", IMAGES), ("FULL", IMAGES * PRIORS)])
def test_the_sum_is_divided_as_it_is_told(mode: str, divisor: int) -> None:
    given = bottoms({})
    whole = made({}, "loss_param { normalization: NONE }")(*given)
    found = made({}, f"loss_param {{ normalization: {mode} }}")(*given)
    assert (found * divisor).item() == pytest.approx(whole.item(), rel=1e-12)


def test_no_true_box_leaves_a_loss_of_zero_with_a_gradient() -> None:
    offsets, scores, priors, truth = bottoms({})
    loss = made({})(offsets, scores, priors, torch.full_like(truth, -1))
    loss.backward()
    assert loss.item() == 0
    assert made({"mining_type": "NONE"})(offsets, scores, priors, torch.full_like(truth, -1)).item() > 0


def test_the_old_field_for_mining_counts_where_the_new_one_is_not_given() -> None:
    shapes = ((IMAGES, PRIORS * 4), (IMAGES, PRIORS * CLASSES), (1, 2, PRIORS * 4), (1, 1, 6, 8))
    given = bottoms({})
    found = [
        layer("MultiBoxLoss", f"multibox_loss_param {{ num_classes: {CLASSES} {field} }}", *shapes)(*given).item()
        for field in (
            "do_neg_mining: false",
            "mining_type: NONE",
            "do_neg_mining: true",
            "mining_type: MAX_NEGATIVE",
            "",
        )
    ]
    assert found[0] == found[1] != found[2] == found[3] == found[4]


def test_each_true_box_has_a_prior_box_before_any_has_two() -> None:
    boxes = torch.tensor([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.4], [0.6, 0.6, 1, 1]], dtype=torch.float64, device="cpu")
    truth = torch.tensor([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.48]], dtype=torch.float64, device="cpu")
    assert matched(truth, boxes, None).places.tolist() == [0, 1, -1]
    assert matched(truth[:1], boxes, 0.7).places.tolist() == [0, 0, -1]
    assert matched(truth[:1], boxes, 0.9).places.tolist() == [0, -1, -1]
    assert matched(truth[:0], boxes, 0.5).places.tolist() == [-1, -1, -1]


def test_boxes_that_are_their_own_prior_need_no_offsets() -> None:
    boxes = torch.tensor([[0.1, 0.2, 0.5, 0.9]], dtype=torch.float64, device="cpu")
    for code in ("CORNER", "CENTER_SIZE", "CORNER_SIZE"):
        assert torch.allclose(encoded_boxes(boxes, boxes, code), torch.zeros_like(boxes))


def test_what_does_not_fit_is_an_error_with_the_layer() -> None:
    given = bottoms({})
    given[3][0, 0, 0, 1] = 0
    with pytest.raises(
        CaffeError, match=r"'it' \(MultiBoxLoss\): a true box of image 0 has the class 0; 0 to 3 without"
    ):
        made({})(*given)
    for text, words in (
        ("num_classes: 0", "num_classes = 0"),
        ("num_classes: 4 bp_inside: true", "bp_inside is not supported"),
        ("num_classes: 4 nms_param { top_k: 3 }", "nms_param is not supported"),
        ("num_classes: 4 mining_type: HARD_EXAMPLE sample_size: 0", "sample_size = 0"),
        ("num_classes: 5", r"offsets and scores have shapes \(3, 48\) and \(3, 48\); 48 and 60 values"),
    ):
        with pytest.raises(CaffeError, match=words):
            layer(
                "MultiBoxLoss", f"multibox_loss_param {{ {text} }}", (3, 48), (3, 48), (1, 2, 48), (1, 1, 6, 8)
            ).output_shapes([(3, 48), (3, 48), (1, 2, 48), (1, 1, 6, 8)])
