"""``ImageData``, ``HDF5Data``, ``MemoryData``, ``DummyData`` and ``Input`` layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from tests.frontends.caffe.data.conftest import layer_of

from tilewise.frontends.caffe.data import Held, Source, source
from tilewise.frontends.caffe.data.images import resized
from tilewise.frontends.caffe.data.memory import Memory
from tilewise.frontends.caffe.errors import CaffeError

Photographs = Callable[..., list[Path]]


def fault(run: Callable[[], object]) -> str:
    with pytest.raises(CaffeError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def listed(tmp_path: Path, lines: list[str]) -> str:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def images_of(path: str, more: str = "", transform: str = "", phase: str = "train", **options: Any) -> Source:
    text = f'name: "im" type: "ImageData" top: "data" top: "label" transform_param {{ {transform} }} '
    text += f'image_data_param {{ source: "{path}" {more} }}'
    return source(layer_of(text), phase, **{"seed": 5, "workers": 0, **options})


def test_images_are_those_that_opencv_reads(tmp_path: Path, photographs: Photographs) -> None:
    paths = photographs(3)  # their names have a blank
    lines = listed(tmp_path, [f"{path.name} {number - 1}" for number, path in enumerate(paths)])
    stream = images_of(lines, f'batch_size: 3 root_folder: "{tmp_path}/"')
    data, label = stream.next()
    assert label.tolist() == [-1, 0, 1]
    for image, path in zip(data, paths, strict=True):
        np.testing.assert_array_equal(image.numpy(), cv2.imread(str(path)).transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(23, 31), (17, 40), (50, 29), (11, 8), (1, 1)])
def test_resizing_is_opencvs_within_one(photographs: Photographs, size: tuple[int, int]) -> None:
    image = cv2.imread(str(photographs(1)[0]))
    wanted = cv2.resize(image, size[::-1]).transpose(2, 0, 1).astype(int)
    found = resized(np.ascontiguousarray(image.transpose(2, 0, 1)), *size).astype(int)
    assert np.abs(found - wanted).max() <= 1


def test_gray_and_resized(tmp_path: Path, photographs: Photographs) -> None:
    path = photographs(1)[0]
    lines = listed(tmp_path, [f"{path} 7"])
    data, _ = images_of(lines, "is_color: false new_height: 10 new_width: 12").next()
    wanted = cv2.resize(cv2.imread(str(path), cv2.IMREAD_GRAYSCALE), (12, 10)).astype(np.float32)
    assert data.shape == (1, 1, 10, 12)
    assert np.abs(data[0, 0].numpy() - wanted).max() <= 2


FILES = [
    *(("png", mode) for mode in ("RGB", "L", "P", "RGBA", "1", "I;16")),
    *(("bmp", mode) for mode in ("RGB", "L", "P", "1")),
    *(("jpg", mode) for mode in ("RGB", "L")),
]


@pytest.mark.parametrize(("suffix", "mode"), FILES)
def test_kinds_of_files_are_read_as_opencv_reads_them(tmp_path: Path, suffix: str, mode: str) -> None:
    path = tmp_path / f"a.{suffix}"
    smooth = cv2.resize(np.random.default_rng(1).integers(0, 256, (3, 4, 3), np.uint8), (17, 13))
    if mode == "I;16":
        Image.fromarray((smooth[:, :, 0].astype(np.uint16) << 8) | 129).save(path)
    else:
        Image.fromarray(smooth).convert(mode).save(path)
    for is_color in (True, False):
        lines = listed(tmp_path, [f"{path} 0"])
        found = images_of(lines, f"is_color: {str(is_color).lower()}").next()[0][0].numpy()
        read = cv2.imread(str(path), cv2.IMREAD_COLOR if is_color else cv2.IMREAD_GRAYSCALE)
        wanted = read.transpose(2, 0, 1) if is_color else read[None]
        # Decoders of JPEG and weights of colours may round differently.
        assert np.abs(found - wanted).max() <= (2 if suffix == "jpg" else 1), is_color


def test_a_camera_held_sideways(tmp_path: Path, photographs: Photographs) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photographs(1)[0]) as image:
        image.save(tmp_path / "b.jpg", exif=exif, quality=95)
    data, _ = images_of(listed(tmp_path, [f"{tmp_path / 'b.jpg'} 0"])).next()
    wanted = cv2.imread(str(tmp_path / "b.jpg")).transpose(2, 0, 1)
    assert data.shape[1:] == wanted.shape == (3, 31, 23)
    assert np.abs(data[0].numpy() - wanted).max() <= 2


def test_shuffled_epochs_have_every_image_once(tmp_path: Path, photographs: Photographs) -> None:
    path = photographs(1)[0]
    lines = listed(tmp_path, [f"{path} {number}" for number in range(12)])
    stream = images_of(lines, "shuffle: true batch_size: 4")
    labels = [stream.next()[1].tolist() for _ in range(6)]
    epochs = [list(chain(*labels[:3])), list(chain(*labels[3:]))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    many = images_of(lines, "shuffle: true batch_size: 4", workers=2)
    assert [many.next()[1].tolist() for _ in range(6)] == labels
    many.close()


@pytest.mark.parametrize(
    ("lines", "more", "word"),
    [
        (["none.png 3"], "", "none.png"),
        (["none.png"], "", "line 1"),
        (["none.png 3", "a b"], "", "line 2"),
        (["none.png 99999999999"], "", "99999999999"),
        ([], "", "no file"),
        (["../../etc/passwd 0"], 'root_folder: "images/"', "leads out"),
        (["../images2/a.png 0"], 'root_folder: "images/"', "leads out"),
        (["none.png 3"], "new_height: 3", "new_width"),
        (["none.png 3"], "batch_size: 0", "batch_size"),
    ],
)
def test_lists_that_make_no_sense_are_named(tmp_path: Path, lines: list[str], more: str, word: str) -> None:
    path = listed(tmp_path, lines)
    assert word in fault(lambda: images_of(path, more))


def test_a_file_that_is_no_image_and_one_of_another_size_are_named(tmp_path: Path, photographs: Photographs) -> None:
    good = photographs(1)[0]
    (tmp_path / "text.png").write_text("no image")
    stream = images_of(listed(tmp_path, [f"{good} 0", f"{tmp_path}/text.png 1"]), "batch_size: 2")
    assert "text.png" in fault(stream.next)
    content = good.read_bytes()
    (tmp_path / "text.png").write_bytes(content[: len(content) // 2])
    assert "text.png" in fault(stream.next)
    Image.new("RGB", (8, 8)).save(tmp_path / "text.png")
    assert "new_height" in fault(stream.next)


def write_hdf5(tmp_path: Path, rows: list[int]) -> str:
    files, first = [], 0
    for number, count in enumerate(rows):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            numbers = np.arange(first, first + count)
            file["data"] = np.stack([numbers, -numbers], 1).reshape(count, 1, 2).astype(np.float64)
            file["label"] = numbers.astype(np.int32)
        files.append(str(path))
        first += count
    return listed(tmp_path, files)


def rows_of(path: str, batch: int, more: str = "", **options: Any) -> Source:
    text = f'name: "h" type: "HDF5Data" top: "data" top: "label" hdf5_data_param {{ source: "{path}" '
    return source(layer_of(f"{text} batch_size: {batch} {more} }}"), "train", **{"seed": 5, "workers": 0, **options})


def test_rows_of_several_files_follow_each_other(tmp_path: Path) -> None:
    stream = rows_of(write_hdf5(tmp_path, [3, 1, 4]), 5)
    assert stream.shapes == ((5, 1, 2), (5,))
    data, label = stream.next()
    assert label.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(data[:, 0, 1], -label)
    assert stream.next()[1].tolist() == [5, 6, 7, 0, 1]


def test_shuffled_rows_come_once_in_each_epoch_and_file_by_file(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, [6, 6, 6])
    stream, many = rows_of(path, 6, "shuffle: true"), rows_of(path, 6, "shuffle: true", workers=2)
    batches = [[int(value) for value in stream.next()[1]] for _ in range(6)]
    assert [[int(value) for value in many.next()[1]] for _ in range(6)] == batches
    many.close()
    for epoch in (batches[:3], batches[3:]):
        assert sorted(chain(*epoch)) == list(range(18))
        assert all(len({value // 6 for value in batch}) == 1 for batch in epoch)
    assert batches[:3] != batches[3:]
    assert any(batch != sorted(batch) for batch in batches)


def test_hdf5_files_that_make_no_sense_are_named(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, [3, 2])
    with h5py.File(tmp_path / "1.h5", "a") as file:
        del file["label"]
        file["label"] = h5py.ExternalLink("0.h5", "label")
    assert "1.h5: has no data set 'label'" in fault(lambda: rows_of(path, 2))
    with h5py.File(tmp_path / "1.h5", "a") as file:
        del file["label"]
        file["label"] = np.zeros(5, np.float32)
    assert "number of rows" in fault(lambda: rows_of(path, 2))
    (tmp_path / "1.h5").write_bytes(b"no file of HDF5")
    assert "1.h5" in fault(lambda: rows_of(path, 2))
    assert "cannot be read" in fault(lambda: rows_of(str(tmp_path / "none.txt"), 2))


def test_memory_data_goes_round_what_was_set() -> None:
    text = 'name: "m" type: "MemoryData" top: "data" top: "label" '
    memory = source(layer_of(f"{text} memory_data_param {{ batch_size: 2 channels: 1 height: 2 width: 3 }}"), "train")
    assert isinstance(memory, Memory)
    assert memory.shapes == ((2, 1, 2, 3), (2,))
    assert "set(data, labels)" in fault(memory.next)
    data = torch.arange(24.0).reshape(4, 1, 2, 3)
    memory.set(data, torch.arange(4))
    found = [memory.next() for _ in range(3)]
    assert [label.tolist() for _, label in found] == [[0, 1], [2, 3], [0, 1]]
    assert torch.equal(found[1][0], data[2:])
    assert "multiple of 2" in fault(lambda: memory.set(data[:3], torch.arange(3)))
    assert "batch_size: 0" in fault(lambda: source(layer_of(f"{text} memory_data_param {{ channels: 1 }}"), "train"))


def test_dummy_data_is_filled_by_its_fillers() -> None:
    text = 'name: "d" type: "DummyData" top: "a" top: "b" top: "c" dummy_data_param { '
    text += "shape { dim: 200 dim: 3 } shape { dim: 500 } shape { dim: 2 } "
    text += 'data_filler { type: "uniform" min: -1 max: 2 } data_filler { type: "gaussian" mean: 5 std: 0.5 } '
    text += 'data_filler { type: "constant" value: 7 } }'
    stream = source(layer_of(text), "train", seed=1)
    a, b, c = stream.next()
    assert (a.shape, b.shape, c.tolist()) == ((200, 3), (500,), [7, 7])
    assert a.min() >= -1
    assert a.max() <= 2
    assert abs(float(a.mean()) - 0.5) < 0.2
    assert abs(float(b.mean()) - 5) < 0.2
    assert abs(float(b.std()) - 0.5) < 0.2
    assert not torch.equal(a, stream.next()[0])
    assert torch.equal(a, source(layer_of(text), "train", seed=1).next()[0])


def test_dummy_data_by_the_old_four_sizes() -> None:
    text = 'name: "d" type: "DummyData" top: "a" top: "b" dummy_data_param {{ num: 2 channels: 3 height: 4 {} }}'
    a, b = source(layer_of(text.format("width: 5")), "test").next()
    assert a.shape == b.shape == (2, 3, 4, 5)
    assert not a.any()
    assert "differently often" in fault(lambda: source(layer_of(text.format("")), "test"))
    assert "'xavier'" in fault(lambda: source(layer_of(text.format('width: 5 data_filler { type: "xavier" }')), "test"))


def test_input_holds_zeros_until_something_is_set() -> None:
    held = source(layer_of('type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } }'), "test")
    assert isinstance(held, Held)
    assert held.next()[0].tolist() == [[0, 0]]
    held.set(torch.ones(3, 2, dtype=torch.float32, device="cpu"))
    assert held.shapes == ((3, 2),)
    assert held.next()[0].sum() == 6


def test_a_layer_without_source_is_named() -> None:
    assert "VideoData" in fault(lambda: source(layer_of('name: "w" type: "VideoData"'), "train"))
