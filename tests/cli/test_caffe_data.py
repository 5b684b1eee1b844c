"""``tilewise caffe convert-imageset`` and ``compute-mean``, with Caffe's flags in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import Result
from google.protobuf import text_format

from tilewise.frontends.caffe.data import source
from tilewise.frontends.caffe.data.database import Records, close_all
from tilewise.frontends.caffe.data.records import read_datum
from tilewise.frontends.caffe.files import read_mean
from tilewise.frontends.caffe.schema import Datum, LayerParameter

Run = Callable[..., Result]


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Five images of odd sizes with their list; the folder, with a slash."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = np.random.default_rng(1)
    lines = []
    for number in range(5):
        size = (17 + number, 23)
        smooth = cv2.resize(generator.integers(0, 256, (4, 5, 3), np.uint8), size[::-1])
        cv2.imwrite(str(folder / f"{number}.{'jpg' if number % 2 else 'png'}"), smooth)
        lines.append(f"{number}.{'jpg' if number % 2 else 'png'} {number * 2}\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    return f"{folder}/"


def records(path: Path) -> list[tuple[str, int, np.ndarray]]:
    found = [(key, *read_datum(content, "own", key)) for key, content in Records(str(path))]
    close_all()
    return found


def test_images_become_records_in_the_order_of_the_list(run: Run, tmp_path: Path, pictures: str) -> None:
    result = run("caffe", "convert-imageset", pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    assert result.exit_code == 0, result.output
    assert "A total of 5 images." in result.stderr
    assert "Processed 5 files." in result.stderr
    found = records(tmp_path / "db")
    assert [key for key, *_ in found] == [f"{n:08d}_{n}.{'jpg' if n % 2 else 'png'}" for n in range(5)]
    assert [label for _, label, _ in found] == [0, 2, 4, 6, 8]
    for number, (*_, pixels) in enumerate(found):
        read = cv2.imread(f"{pictures}{number}.{'jpg' if number % 2 else 'png'}").transpose(2, 0, 1)
        assert np.abs(pixels.astype(int) - read).max() <= (2 if number % 2 else 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["-gray", "-resize_height", "12", "-resize_width=14"],
        ["--gray=true", "--resize_height=12", "--resize_width", "14", "--noshuffle", "-check_size", "-backend", "lmdb"],
        ["-gray=1", "-resize-height=12", "-resize-width=14", "-logtostderr=1", "-encoded=false"],
    ],
)
def test_flags_are_read_as_gflags_reads_them(run: Run, tmp_path: Path, pictures: str, flags: list[str]) -> None:
    result = run("caffe", "convert_imageset", *flags, pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    assert result.exit_code == 0, result.output
    assert {pixels.shape for *_, pixels in records(tmp_path / "db")} == {(1, 12, 14)}


def test_shuffled_records_keep_their_labels(run: Run, tmp_path: Path, pictures: str) -> None:
    (tmp_path / "long.txt").write_text("".join(f"0.png {n}\n1.jpg {100 + n}\n" for n in range(20)))
    run("caffe", "convert-imageset", "-shuffle", pictures, str(tmp_path / "long.txt"), str(tmp_path / "db"))
    found = [(key.partition("_")[2], label) for key, label, _ in records(tmp_path / "db")]
    assert found != sorted(found, key=lambda each: each[1] % 100)
    assert sorted(found, key=lambda each: each[1]) == [
        *[("0.png", n) for n in range(20)],
        *[("1.jpg", 100 + n) for n in range(20)],
    ]


def test_encoded_records_are_the_files_themselves_where_they_can_be(run: Run, tmp_path: Path, pictures: str) -> None:
    arguments = (pictures, str(tmp_path / "list.txt"))
    run("caffe", "convert-imageset", "-encoded", *arguments, str(tmp_path / "own"))
    run("caffe", "convert-imageset", "-encode_type=png", "-encoded", *arguments, str(tmp_path / "png"))
    own = [content for _, content in Records(str(tmp_path / "own"))]
    for number, content in enumerate(own):
        data = Datum.FromString(content)
        assert data.encoded
        assert data.data == Path(f"{pictures}{number}.{'jpg' if number % 2 else 'png'}").read_bytes()
    for _, content in Records(str(tmp_path / "png")):
        assert Datum.FromString(content).data.startswith(b"\x89PNG")
    close_all()
    for (*_, one), (*_, other) in zip(records(tmp_path / "own"), records(tmp_path / "png"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_that_are_no_images_are_left_out_and_named(run: Run, tmp_path: Path, pictures: str) -> None:
    Path(f"{pictures}2.png").write_text("no image")
    result = run("caffe", "convert-imageset", pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    assert result.exit_code == 0
    assert "2.png" in next(line for line in result.stderr.splitlines() if line.startswith("W"))
    assert [label for _, label, _ in records(tmp_path / "db")] == [0, 2, 6, 8]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["-check_size"], "resize_height"),
        (["-resize_width=3"], "resize_height=0"),
        (["-backend=leveldb"], "leveldb"),
        (["-encoded", "-encode_type=exe"], "exe"),
        (["-gray=perhaps"], "perhaps"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_leaves_nothing(
    run: Run, tmp_path: Path, pictures: str, flags: list[str], word: str
) -> None:
    result = run("caffe", "convert-imageset", *flags, pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    assert result.exit_code == 2
    assert word in result.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.txt", "pictures"]


def test_a_database_that_is_there_is_not_touched(run: Run, tmp_path: Path, pictures: str) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "precious").write_text("x")
    result = run("caffe", "convert-imageset", pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert [path.name for path in (tmp_path / "db").iterdir()] == ["precious"]


def test_an_unknown_command_and_flag_are_named(run: Run) -> None:
    assert "convert-imageset" in run("caffe", "convert").stderr
    assert "-nothing" in run("caffe", "convert-imageset", "-nothing", "a", "b", "c").stderr


def test_the_mean_image_is_that_of_all_records_and_is_subtracted(run: Run, tmp_path: Path, pictures: str) -> None:
    sizes = ("-resize_height=12", "-resize_width=14")
    run("caffe", "convert-imageset", *sizes, pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    paths = (str(tmp_path / "db"), str(tmp_path / "mean.binaryproto"))
    result = run("caffe", "compute_image_mean", "-backend=lmdb", *paths)
    assert result.exit_code == 0, result.stderr
    images = np.stack([pixels for *_, pixels in records(tmp_path / "db")])
    mean = np.array(read_mean(tmp_path / "mean.binaryproto"))
    np.testing.assert_allclose(mean, images.mean(0, dtype=np.float64), rtol=1e-6)
    for channel in range(3):
        assert f"mean_value channel [{channel}]: {images[:, channel].mean():g}" in result.stderr
    transform = f'transform_param {{ mean_file: "{paths[1]}" crop_size: 8 }}'
    text = f'name: "d" type: "Data" top: "data" {transform} '
    text += f'data_param {{ source: "{paths[0]}" batch_size: 5 backend: LMDB }}'
    layer = text_format.Parse(text, LayerParameter())
    (batch,) = source(layer, "test", workers=0).next()
    wanted = (images - images.mean(0, dtype=np.float64))[:, :, 2:10, 3:11]
    np.testing.assert_allclose(batch.numpy(), wanted, atol=1e-4)
    close_all()


def test_a_mean_of_images_of_mixed_sizes_is_refused(run: Run, tmp_path: Path, pictures: str) -> None:
    run("caffe", "convert-imageset", pictures, str(tmp_path / "list.txt"), str(tmp_path / "db"))
    result = run("caffe", "compute-mean", str(tmp_path / "db"))
    close_all()
    assert result.exit_code == 2
    assert "00000001_1.jpg" in result.stderr
    assert run("caffe", "compute-mean", str(tmp_path / "none")).exit_code == 2
