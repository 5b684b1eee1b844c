"""``WindowData`` layers: parts of images, with and without objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from tests.frontends.caffe.data.conftest import layer_of

from tilewise.frontends.caffe.data import Source, source
from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import write_mean

HEIGHT, WIDTH, CROP = 40, 60, 16


@pytest.fixture
def picture(tmp_path: Path) -> np.ndarray:
    """A smooth image in the file ``a.png``, as OpenCV reads it."""
    coarse = np.random.default_rng(4).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(tmp_path / "a.png")
    return cv2.imread(str(tmp_path / "a.png"))


def windows(folder: Path, lines: list[str], name: str = "a.png") -> str:
    path = folder / "windows.txt"
    path.write_text("\n".join(["# 0", name, "3", str(HEIGHT), str(WIDTH), str(len(lines)), *lines, ""]))
    return str(path)


def made(folder: Path, lines: list[str], fields: str = "", transform: str = "", **options: Any) -> Source:
    text = f'name: "w" type: "WindowData" top: "data" top: "label" transform_param {{ crop_size: {CROP} {transform} }} '
    text += f'window_data_param {{ source: "{windows(folder, lines)}" root_folder: "{folder}/" {fields} }}'
    return source(layer_of(text), "train", **{"seed": 5, "workers": 0, **options})


def test_a_window_is_what_opencv_makes_of_the_part(tmp_path: Path, picture: np.ndarray) -> None:
    stream = made(tmp_path, ["3 0.9 5 8 44 27"], "batch_size: 2 fg_fraction: 1")
    data, label = stream.next()
    assert label.tolist() == [3, 3]
    want = cv2.resize(picture[8:28, 5:45], (CROP, CROP)).transpose(2, 0, 1).astype(int)
    for image in data:
        assert np.abs(image.numpy() - want).max() <= 1


def test_objects_are_a_share_of_each_batch_and_come_last(tmp_path: Path, picture: np.ndarray) -> None:
    lines = ["2 0.7 0 0 9 9", "4 0.5 0 0 9 9", "5 0.49 0 0 9 9", "6 0.1 20 20 39 39", "7 0.3 20 20 39 39"]
    stream = made(tmp_path, lines, "batch_size: 8 fg_fraction: 0.4 fg_threshold: 0.5 bg_threshold: 0.2")
    seen = set()
    for _ in range(5):
        data, label = stream.next()
        assert label[:5].tolist() == [0] * 5  # int(8 * 0.4) = 3 windows with an object
        seen |= set(label[5:].tolist())
        part = cv2.resize(picture[20:40, 20:40], (CROP, CROP)).transpose(2, 0, 1)
        assert np.abs(data[0].numpy() - part).max() <= 1
    assert seen == {2, 4}


def test_context_reaches_beyond_the_image_as_zeros_and_mirrored(tmp_path: Path, picture: np.ndarray) -> None:
    # Of 16 columns 4 are context on each side: a window of 20 becomes one of 40, from -10 to 30.
    fields = "batch_size: 1 fg_fraction: 1 context_pad: 4"
    seen = set()
    plain = made(tmp_path, ["1 1 0 10 19 29"], fields)
    stream = made(tmp_path, ["1 1 0 10 19 29"], fields, "mirror: true")
    (image, _) = plain.next()
    assert (image[0, :, :, :4] == 0).all()
    assert (image[0, :, :, 4:] != 0).any()
    # Caffe's window ends one column after the 40: 41 rows from 0 to 40 and columns from -10 to 30.
    part = cv2.resize(picture[0:40, 0:31], (12, 16)).transpose(2, 0, 1).astype(int)
    assert np.abs(image[0, :, :, 4:].numpy() - part).max() <= 1
    for _ in range(12):
        (data, _) = stream.next()
        flipped = bool((data[0, :, :, -4:] == 0).all())
        seen.add(flipped)
        found = data[0].flip(2)[:, :, 4:] if flipped else data[0, :, :, 4:]
        assert np.abs(found.numpy() - part).max() <= 1
    assert seen == {False, True}


def test_a_square_has_the_longer_side(tmp_path: Path, picture: np.ndarray) -> None:
    fields = 'batch_size: 1 fg_fraction: 1 crop_mode: "square"'
    (image, _) = made(tmp_path, ["1 1 20 15 39 24"], fields).next()
    part = cv2.resize(picture[10:31, 20:41], (CROP, CROP)).transpose(2, 0, 1).astype(int)
    assert np.abs(image[0].numpy() - part).max() <= 1


def test_means_and_scale_count_where_the_image_is(tmp_path: Path, picture: np.ndarray) -> None:
    lines = ["1 1 0 10 19 29"]
    fields = "batch_size: 1 fg_fraction: 1 context_pad: 4"
    raw = made(tmp_path, lines, fields).next()[0][0].numpy()
    by_value = made(tmp_path, lines, fields, "mean_value: [1, 2, 3] scale: 0.5").next()[0][0].numpy()
    np.testing.assert_allclose(by_value[:, :, 4:], (raw[:, :, 4:] - np.array([1, 2, 3])[:, None, None]) / 2)
    assert (by_value[:, :, :4] == 0).all()
    mean = np.random.default_rng(2).random((3, CROP + 4, CROP + 4)).astype(np.float32)
    write_mean(tmp_path / "mean", mean)
    by_file = made(tmp_path, lines, fields, f'mean_file: "{tmp_path}/mean"').next()[0][0].numpy()
    np.testing.assert_allclose(by_file[:, :, 4:], raw[:, :, 4:] - mean[:, 2:18, 6:18], rtol=1e-6)


def test_windows_follow_from_the_seed_alone_whatever_the_workers(tmp_path: Path, picture: np.ndarray) -> None:
    lines = [f"{n + 1} {n % 2} {n} {n} {n + 9} {n + 19}" for n in range(8)]
    streams = [made(tmp_path, lines, "batch_size: 4", workers=workers) for workers in (0, 2)]
    for _ in range(3):
        one, two = (stream.next() for stream in streams)
        for a, b in zip(one, two, strict=True):
            assert (a == b).all()
    for stream in streams:
        stream.close()
    other = made(tmp_path, lines, "batch_size: 4", seed=6)
    assert any((a != b).any() for a, b in zip(made(tmp_path, lines, "batch_size: 4").next(), other.next(), strict=True))


@pytest.mark.parametrize(
    ("lines", "fields", "transform", "words"),
    [
        (["1 1 0 0 9"], "batch_size: 1", "", "line 7 is '1 1 0 0 9'; class overlap x1 y1 x2 y2 would do"),
        (["1 1 9 0 0 9"], "batch_size: 1", "", "x1 <= x2 would do"),
        (["0 1 0 0 9 9"], "batch_size: 1", "", "a window with an object has the class 0"),
        (["1 1 0 0 9 9"], "batch_size: 4", "", "has no window without an object; 3 a batch"),
        (["1 0 0 0 9 9"], "batch_size: 4", "", "has no window with an object; 1 a batch"),
        (["1 1 0 0 9 9"], "", "", "batch_size: 0, crop_size: 16"),
        (["1 1 0 0 9 9"], "batch_size: 1 context_pad: 8", "", "context_pad: 8; less than half of crop_size"),
        (["1 1 0 0 9 9"], 'batch_size: 1 crop_mode: "odd"', "", "crop_mode: 'odd'; warp or square would do"),
        (["1 1 0 0 9 9"], "batch_size: 1 fg_fraction: 2", "", "fg_fraction: 2"),
        (["1 1 0 0 9 9"], "batch_size: 1 fg_fraction: 1", "mean_value: [1, 2]", "2 times mean_value for 3 channels"),
        (["1 1 100 0 109 9"], "batch_size: 1 fg_fraction: 1", "", "lies beyond an image's width"),
    ],
)
def test_what_is_wrong_names_layer_and_line(
    tmp_path: Path, picture: np.ndarray, lines: list[str], fields: str, transform: str, words: str
) -> None:
    with pytest.raises(CaffeError, match="layer 'w'") as caught:
        made(tmp_path, lines, fields, transform).next()
    assert words in str(caught.value)


def test_a_list_that_is_cut_or_leads_out_of_its_folder(tmp_path: Path, picture: np.ndarray) -> None:
    path = Path(windows(tmp_path, ["1 1 0 0 9 9"]))
    whole = path.read_text()
    text = 'name: "w" type: "WindowData" top: "d" transform_param { crop_size: 4 } '
    text += f'window_data_param {{ source: "{path}" '
    text += f'batch_size: 1 fg_fraction: 1 root_folder: "{tmp_path}/" }}'
    path.write_text(whole.rpartition("1 1")[0])
    with pytest.raises(CaffeError, match="ends within an image"):
        source(layer_of(text), "test")
    path.write_text(whole.replace("# 0", "0"))
    with pytest.raises(CaffeError, match="line 1 is '0'; '# ' and an image's number would do"):
        source(layer_of(text), "test")
    path.write_text(whole.replace("a.png", "../a.png"))
    with pytest.raises(CaffeError, match="leads out of"):
        source(layer_of(text), "test", workers=0).next()
    path.write_text(whole.replace("a.png", "none.png"))
    with pytest.raises(CaffeError, match=r"none\.png cannot be read"):
        source(layer_of(text), "test", workers=0).next()
