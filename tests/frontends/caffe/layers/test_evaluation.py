"""Detections that are held against true boxes, by hand."""

from __future__ import annotations

import pytest
import torch
from tests.frontends.caffe.layers.nets import layer

from tilewise.frontends.caffe.errors import CaffeError

TRUE = [
    [0, 1, 0, 0.1, 0.1, 0.3, 0.3, 0],
    [0, 1, 1, 0.5, 0.5, 0.9, 0.9, 1],
    [1, 2, 0, 0.0, 0.0, 0.5, 0.5, 0],
    [-1, -1, -1, -1, -1, -1, -1, -1],
]
FOUND = [
    [0, 1, 0.6, 0.1, 0.1, 0.3, 0.3],  # right box, but the next one scores higher
    [0, 1, 0.8, 0.1, 0.1, 0.3, 0.29],
    [0, 1, 0.7, 0.5, 0.5, 0.9, 0.9],  # a difficult one
    [0, 1, 0.5, 0.6, 0.0, 0.8, 0.2],  # nothing there
    [0, 2, 0.9, 0.1, 0.1, 0.3, 0.3],  # nothing of its class
    [1, 2, 0.4, 0.0, 0.0, 0.5, 0.24],  # too small: a share of 0.48
    [2, -1, -1, -1, -1, -1, -1],  # an image without any
]


def rows(fields: str, found: list[list[float]] = FOUND) -> list[list[float]]:
    made = layer(
        "DetectionEvaluate", f"detection_evaluate_param {{ num_classes: 3 {fields} }}", (1, 1, 7, 7), (1, 1, 4, 8)
    )
    given = [torch.tensor([[each]], dtype=torch.float64, device="cpu") for each in (found, TRUE)]
    top = made(*given)
    assert top.shape[:2] == (1, 1)
    listed: list[list[float]] = top[0, 0].tolist()
    return listed


def test_each_true_box_makes_one_detection_right() -> None:
    assert rows("background_label_id: 0") == [
        [-1, 1, 2, -1, -1],
        [-1, 2, 1, -1, -1],
        [0, 1, 0.8, 1, 0],
        [0, 1, 0.7, 1, 0],
        [0, 1, 0.6, 0, 1],
        [0, 1, 0.5, 0, 1],
        [0, 2, 0.9, 0, 1],
        [1, 2, 0.4, 0, 1],
    ]


def test_difficult_boxes_count_for_nothing_where_they_are_left_out() -> None:
    found = rows("background_label_id: 0 evaluate_difficult_gt: false overlap_threshold: 0.4")
    assert found[0] == [-1, 1, 1, -1, -1]
    assert found[3] == [0, 1, 0.7, 0, 0]
    assert found[-1] == [1, 2, 0.4, 1, 0]


def test_without_a_detection_there_are_the_classes_alone() -> None:
    assert rows("background_label_id: 1", FOUND[-1:]) == [[-1, 0, 0, -1, -1], [-1, 2, 1, -1, -1]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [("", "num_classes = 0"), ('num_classes: 2 name_size_file: "x"', "name_size_file = 'x'; boxes as shares")],
)
def test_what_cannot_be_done_is_said(fields: str, words: str) -> None:
    with pytest.raises(CaffeError, match=rf"'it' \(DetectionEvaluate\): {words}"):
        layer("DetectionEvaluate", f"detection_evaluate_param {{ {fields} }}", (1, 1, 7, 7), (1, 1, 4, 8))
