"""``Data`` layers: what a batch of an LMDB database is, on odd sizes, over several epochs, and what goes wrong."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.frontends.caffe.data.conftest import datum, layer_of

from tilewise.frontends.caffe.data import Source, source
from tilewise.frontends.caffe.data.database import close_all
from tilewise.frontends.caffe.data.records import read_datum
from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.schema import Datum

Database = Callable[..., str]


def text_of(path: str, batch: int, transform: str = "", more: str = "") -> str:
    return (
        f'name: "data" type: "Data" top: "data" top: "label" transform_param {{ {transform} }} '
        f'data_param {{ source: "{path}" batch_size: {batch} backend: LMDB {more} }}'
    )


def made(path: str, batch: int, transform: str = "", phase: str = "train", **options: Any) -> Source:
    return source(layer_of(text_of(path, batch, transform)), phase, **{"seed": 3, "workers": 0, **options})


def pixels(count: int, shape: tuple[int, int, int] = (3, 7, 9)) -> list[np.ndarray]:
    return list(np.random.default_rng(1).integers(0, 256, (count, *shape), np.uint8))


def test_batches_follow_the_keys_and_begin_again_at_the_end(database: Database) -> None:
    images = pixels(5)
    path = database(datum(image, 10 + number) for number, image in enumerate(images))
    stream = made(path, 3)
    assert stream.shapes == ((3, 3, 7, 9), (3,))
    for batch in range(4):
        data, label = stream.next()
        wanted = [(batch * 3 + place) % 5 for place in range(3)]
        assert label.tolist() == [10 + number for number in wanted]
        assert data.dtype == torch.float32
        np.testing.assert_array_equal(data.numpy(), np.stack([images[number] for number in wanted]))


def test_float_records_and_a_layer_without_label(database: Database) -> None:
    values = np.random.default_rng(2).standard_normal((2, 3, 5)).astype(np.float32)
    path = database([datum(values, 0)])
    layer = layer_of(text_of(path, 2))
    del layer.top[1]
    (data,) = source(layer, "test", workers=0).next()
    np.testing.assert_array_equal(data.numpy(), np.stack([values, values]))


@pytest.mark.parametrize("phase", ["train", "test"])
def test_mean_scale_crop_and_mirror_are_those_of_some_window(database: Database, phase: str) -> None:
    # Every value of an image is different, so that the window which a batch shows can be found from one of them.
    image = np.arange(3 * 7 * 9, dtype=np.uint8).reshape(3, 7, 9)
    stream = made(database([datum(image, 1)]), 1, "crop_size: 4 mirror: true scale: 0.5 mean_value: 10", phase)
    seen = set()
    for _ in range(60):
        found = stream.next()[0][0].numpy() / 0.5 + 10
        flipped = bool(found[0, 0, 0] > found[0, 0, 1])
        window = found[:, :, ::-1] if flipped else found
        top, left = divmod(int(window[0, 0, 0]), 9)
        np.testing.assert_array_equal(window, image[:, top : top + 4, left : left + 4])
        seen.add((top, left, flipped))
    places = {(top, left) for top, left, _ in seen}
    assert {flipped for *_, flipped in seen} == {False, True}
    if phase == "test":
        assert places == {(1, 2)}
    else:
        assert {top for top, _ in places} == set(range(4))
        assert {left for _, left in places} == set(range(6))


def test_a_mean_by_channel(database: Database) -> None:
    image = pixels(1)[0]
    data, _ = made(database([datum(image, 1)]), 1, "mean_value: 1 mean_value: 2 mean_value: 3").next()
    np.testing.assert_array_equal(data[0].numpy(), image.astype(np.float32) - np.float32([[[1]], [[2]], [[3]]]))


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(database: Database, workers: int) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(7)))
    transform = "crop_size: 5 mirror: true"
    alone, many = made(path, 3, transform), made(path, 3, transform, workers=workers)
    for _ in range(9):  # almost four epochs
        for one, other in zip(alone.next(), many.next(), strict=True):
            assert torch.equal(one, other)
    many.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_in_the_data_is_taken_up_by_another_source(database: Database, workers: int) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(7)))
    first = made(path, 3, "crop_size: 5 mirror: true", workers=workers)
    for _ in range(4):
        first.next()
    place = first.place()
    assert place == {"seed": 3, "batch": 4}
    wanted = [first.next() for _ in range(3)]
    other = made(path, 3, "crop_size: 5 mirror: true", seed=99)
    other.next()
    other.go_to(place)
    for batch in wanted:
        for one, two in zip(batch, other.next(), strict=True):
            assert torch.equal(one, two)
    first.close()


def test_workers_leave_the_random_numbers_of_the_program_alone(database: Database) -> None:
    stream = made(database([datum(pixels(1)[0], 1)]), 2, "mirror: true", workers=1)
    before = torch.get_rng_state()
    stream.next()
    assert torch.equal(before, torch.get_rng_state())
    stream.close()


def test_other_seeds_crop_otherwise(database: Database) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(8, (1, 40, 40))))
    batches = [made(path, 8, "crop_size: 3", seed=seed).next()[0] for seed in (1, 2, 1)]
    assert torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], batches[1])


def test_shares_divide_the_records_in_turn(database: Database) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(8)))
    labels = [made(path, 2, share=(rank, 2)).next()[1].tolist() for rank in range(2)]
    assert labels == [[0, 2], [1, 3]]


def test_rand_skip_leaves_out_fewer_records_than_it_says(database: Database) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(8)))
    starts = set()
    for seed in range(40):
        layer = layer_of(text_of(path, 1, more="rand_skip: 4"))
        starts.add(int(source(layer, "train", seed, workers=0).next()[1]))
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize("force", ["", "force_color: true", "force_gray: true"])
@pytest.mark.parametrize("gray", [False, True])
def test_encoded_records_decode_as_opencv_decodes_them(database: Database, force: str, gray: bool) -> None:
    image = np.random.default_rng(3).integers(0, 256, (11, 13) if gray else (11, 13, 3), np.uint8)
    content = cv2.imencode(".png", image)[1].tobytes()
    path = database([Datum(data=content, encoded=True, label=4).SerializeToString()])
    data, label = made(path, 1, force).next()
    flags = {"": cv2.IMREAD_UNCHANGED, "force_color: true": cv2.IMREAD_COLOR, "force_gray: true": cv2.IMREAD_GRAYSCALE}
    wanted = cv2.imdecode(np.frombuffer(content, np.uint8), flags[force])
    wanted = wanted[None] if wanted.ndim == 2 else wanted.transpose(2, 0, 1)
    assert data.shape[1:] == wanted.shape
    # Weights of colours are rounded differently.
    assert np.abs(data[0].numpy() - wanted).max() <= (1 if "gray" in force and not gray else 0)
    assert label.tolist() == [4]


def fault(run: Callable[[], object]) -> str:
    with pytest.raises(CaffeError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_database_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in fault(lambda: made(str(tmp_path / "none"), 1))
    (tmp_path / "empty").mkdir()
    assert "data.mdb" in fault(lambda: made(str(tmp_path / "empty"), 1))
    (tmp_path / "level").mkdir()
    (tmp_path / "level" / "CURRENT").write_text("MANIFEST-000001\n")
    assert "LevelDB" in fault(lambda: made(str(tmp_path / "level"), 1))
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "data.mdb").write_bytes(os.urandom(8192))
    assert "noise" in fault(lambda: made(str(tmp_path / "noise"), 1))


def test_an_empty_database_is_named(database: Database) -> None:
    assert "empty" in fault(lambda: made(database([]), 1))


def test_a_database_that_this_process_has_open_elsewhere_is_said_to_be_in_use(database: Database) -> None:
    path = database([datum(pixels(1)[0], 0)])
    with lmdb.open(path, readonly=True):
        assert "closing the other" in fault(lambda: made(path, 1))
    assert made(path, 1).next()[1].tolist() == [0]


def test_leveldb_is_refused_also_where_no_backend_is_named(database: Database) -> None:
    path = database([datum(pixels(1)[0], 0)])
    layer = layer_of(text_of(path, 1))
    layer.data_param.ClearField("backend")
    assert "backend: LMDB" in fault(lambda: source(layer, "train"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_record_is_named_by_its_key(database: Database, workers: int) -> None:
    good = datum(pixels(1)[0], 0)
    broken = Datum(data=b"\x89PNG no image", encoded=True).SerializeToString()
    stream = made(database([good, good, good, broken]), 1, workers=workers)
    for _ in range(3):
        stream.next()
    message = fault(lambda: [stream.next() for _ in range(2)])
    assert "00000003" in message
    assert "layer 'data'" in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xff\xff", "Datum"),
        (Datum(channels=3, height=7, width=9, data=b"123").SerializeToString(), "189 values"),
        (Datum(channels=3, height=-7, width=-9, data=b"1" * 189).SerializeToString(), "-7"),
        (Datum(data=b"GIF87a", encoded=True).SerializeToString(), "decode"),
        (datum(pixels(1, (1, 7, 9))[0], 0), "force_color"),
        (datum(pixels(1, (3, 8, 9))[0], 0), "crop_size"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(database: Database, content: bytes, word: str) -> None:
    stream = made(database([datum(pixels(1)[0], 0), content]), 2)
    message = fault(stream.next)
    assert word in message
    assert "00000001" in message


@pytest.mark.parametrize(
    ("transform", "word"),
    [
        ("crop_size: 8", "crop_size"),
        ("mean_value: 1 mean_value: 2", "mean_value"),
        ("force_color: true force_gray: true", "force_gray"),
        ('mean_file: "x" mean_value: 3', "mean_file"),
        ('mean_file: "nowhere.binaryproto"', "nowhere.binaryproto cannot be read: No such file"),
    ],
)
def test_transforms_that_make_no_sense_are_named(database: Database, transform: str, word: str) -> None:
    assert word in fault(lambda: made(database([datum(pixels(1)[0], 0)]), 1, transform))


def test_records_of_mixed_sizes_are_cropped_alike(database: Database) -> None:
    sizes = list(itertools.product((7, 8, 11), (9, 12)))
    path = database(datum(pixels(1, (3, *size))[0], 0) for size in sizes)
    assert made(path, len(sizes), "crop_size: 5").next()[0].shape == (len(sizes), 3, 5, 5)


@pytest.mark.parametrize("place", [{}, {"seed": 1}, {"seed": -1, "batch": 0}, {"seed": 1, "batch": "2"}])
def test_what_is_no_place_is_refused(database: Database, place: Any) -> None:
    stream = made(database([datum(pixels(1)[0], 0)]), 1)
    assert "place in the data" in fault(lambda: stream.go_to(place))


def test_a_worker_that_is_killed_is_told_and_a_new_one_goes_on(database: Database) -> None:
    path = database(datum(image, number) for number, image in enumerate(pixels(7)))
    stream = made(path, 1, workers=1)
    assert stream.next()[1].tolist() == [0]
    before = multiprocessing.active_children()
    for process in before:
        process.kill()
        process.join()
    # What it has made before may still arrive.
    with pytest.raises(CaffeError, match="a process that reads data ended"):
        list(itertools.islice(iter(stream.next, None), 10))
    batch = stream.place()["batch"]
    assert stream.next()[1].tolist() == [batch % 7]
    stream.close()


def test_a_database_in_a_folder_that_cannot_be_written_is_read(database: Database) -> None:
    path = database([datum(pixels(1)[0], 5)])
    Path(path, "lock.mdb").unlink()
    Path(path).chmod(0o500)
    try:
        assert made(path, 1).next()[1].tolist() == [5]
    finally:
        close_all()
        Path(path).chmod(0o700)


@given(content=st.binary(max_size=60) | st.builds(bytes.__add__, st.just(b"\x08\x03\x10\x07\x18\x09"), st.binary()))
def test_any_bytes_are_a_record_or_an_error_that_names_it(content: bytes) -> None:
    try:
        _, found = read_datum(content, "own", "here: record 'x'")
    except CaffeError as error:
        assert str(error).startswith("here: record 'x'")  # noqa: PT017
    else:
        assert found.ndim == 3
