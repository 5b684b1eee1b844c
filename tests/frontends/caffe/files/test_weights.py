"""Weights in caffemodels: read as protobuf's own parser reads them, without copies, and written so that it can."""

from __future__ import annotations

import itertools
import math
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tilewise.frontends.caffe.errors import CaffeError, CaffeWarning
from tilewise.frontends.caffe.files import blobs as blobs_module
from tilewise.frontends.caffe.files import caffemodel as caffemodel_module
from tilewise.frontends.caffe.files import forget, read_net, read_weights, write_weights
from tilewise.frontends.caffe.files.wire import Message, encoded_varint, key, length_prefixed
from tilewise.frontends.caffe.schema import BlobProto, NetParameter
from tilewise.frontends.caffe.schema.build import message_classes
from tilewise.frontends.caffe.schema.layers import LAYERS
from tilewise.frontends.caffe.schema.nets import NETS

UNPACKED = message_classes((NETS.replace("float#", "float*").replace("double#", "double*"), LAYERS))
"""The same messages, with each number of a blob in a field of its own."""
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def blobs(draw: st.DrawFn) -> BlobProto:
    old = draw(st.booleans())
    shape = draw(st.lists(st.integers(0, 4), min_size=4 if old else 0, max_size=4))
    # Sizes of 0 are rare in files: without them more examples have numbers.
    shape = [max(size, draw(st.sampled_from([0, 1, 1, 1]))) for size in shape]
    values = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(math.prod(shape))
    blob = BlobProto()
    if old:
        blob.num, blob.channels, blob.height, blob.width = shape
    else:
        blob.shape.dim.extend(shape)
    kind = draw(st.sampled_from(["data", "double_data"]))
    getattr(blob, kind).extend(values)
    if draw(st.booleans()):
        getattr(blob, draw(st.sampled_from(["diff", "double_diff"]))).extend(values[::-1])
    return blob


@st.composite
def nets(draw: st.DrawFn) -> NetParameter:
    net = NetParameter(name=draw(st.text(max_size=3)))
    layers = draw(st.sampled_from([net.layer, net.layers]))
    for name in draw(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=4)):
        layer = layers.add(name=name, top=["x"], blobs=draw(st.lists(blobs(), max_size=3)))
        layer.convolution_param.num_output = 3
    return net


def by_protobuf(data: bytes) -> dict[str, list[np.ndarray[Any, Any]]]:
    """What protobuf's parser finds in a caffemodel, in the shapes of Caffe's ``Blob::FromProto``."""
    net = NetParameter.FromString(data)
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    # The order is that of the file where one form is used alone.
    for layer in [*net.layers, *net.layer]:
        arrays = []
        for blob in layer.blobs:
            old = [blob.HasField(name) for name in ("num", "channels", "height", "width")]
            shape = [blob.num, blob.channels, blob.height, blob.width] if any(old) else list(blob.shape.dim)
            values = np.array(blob.double_data, np.float64) if blob.double_data else np.array(blob.data, np.float32)
            arrays.append(values.reshape(shape))
        if arrays:
            found[layer.name] = arrays
    return found


def assert_same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert list(found) == list(wanted)
    for name, arrays in wanted.items():
        assert len(found[name]) == len(arrays)
        for mine, theirs in zip(found[name], arrays, strict=True):
            assert mine.shape == theirs.shape
            assert not mine.size or mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


@one_folder
@given(nets(), st.sampled_from(["packed", "unpacked"]))
def test_every_form_is_read_as_protobuf_reads_it(tmp_path: Path, net: NetParameter, form: str) -> None:
    data = net.SerializeToString()
    if form == "unpacked":
        data = UNPACKED["NetParameter"].FromString(data).SerializeToString()
    path = tmp_path / "net.caffemodel"
    path.write_bytes(data)
    assert_same(read_weights(path), by_protobuf(data))


@settings(one_folder, max_examples=40)
@given(nets(), st.booleans())
def test_what_is_written_is_read_by_protobuf_and_here(tmp_path: Path, net: NetParameter, with_net: bool) -> None:
    source, path = tmp_path / "a.caffemodel", tmp_path / "b.caffemodel"
    net = NetParameter(name=net.name, layer=[{"name": f"l{index}", "blobs": layer.blobs}
                                             for index, layer in enumerate([*net.layer, *net.layers])])  # fmt: skip
    source.write_bytes(net.SerializeToString())
    weights = read_weights(source)
    if not weights and not with_net:
        with pytest.raises(CaffeError, match="weights has no layers; at least one would do"):
            write_weights(path, weights)
        return
    write_weights(path, weights, net if with_net else None)
    data = path.read_bytes()
    assert_same(by_protobuf(data), weights)
    assert_same(read_weights(path), weights)
    written = NetParameter.FromString(data)
    names = [layer.name for layer in net.layer]
    assert [layer.name for layer in written.layer] == (names if with_net else list(weights))
    assert written.name == (net.name if with_net else "")


def test_an_old_and_a_new_form_in_one_file(tmp_path: Path) -> None:
    blob = BlobProto(data=[1, 2])
    blob.shape.dim.append(2)
    net = NetParameter(layer=[{"name": "a", "blobs": [blob]}], layers=[{"name": "b", "blobs": [blob, blob]}])
    path = tmp_path / "net.caffemodel"
    path.write_bytes(net.SerializeToString())
    assert {name: len(arrays) for name, arrays in read_weights(path).items()} == {"a": 1, "b": 2}


def one_blob(fields: bytes, name: bytes = b"ip") -> bytes:
    """A caffemodel with one layer that has one blob of some fields."""
    return length_prefixed(100, length_prefixed(1, name) + length_prefixed(7, fields))


def shape(*sizes: int) -> bytes:
    return length_prefixed(7, length_prefixed(1, b"".join(encoded_varint(size) for size in sizes)))


def data(*values: float) -> bytes:
    return length_prefixed(5, np.array(values, "<f4").tobytes())


def single(value: float) -> bytes:
    return key(5, 5) + np.float32(value).tobytes()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (shape(3) + data(1, 2, 3), [1, 2, 3]),
        (data(1, 2, 3) + shape(3), [1, 2, 3]),
        (shape(3) + data(1) + data() + data(2, 3), [1, 2, 3]),
        (shape(3) + single(1) + single(2) + single(3), [1, 2, 3]),
        (shape(4) + single(1) + data(2, 3) + single(4), [1, 2, 3, 4]),
        (shape(2) + single(1) + length_prefixed(6, b"\0" * 8) + single(2), [1, 2]),
        (shape(2) + length_prefixed(99, b"more") + data(1, 2) + key(98, 0) + b"\5", [1, 2]),
        (length_prefixed(7, b"\x08\x01\x08\x02") + data(1, 2), [[1, 2]]),
        (shape(1) + shape(2) + data(1, 2), [[1, 2]]),
        (data(5), 5),
        (shape(0, 7), np.zeros((0, 7))),
        (b"\x08\x01\x10\x01\x18\x01\x20\x02" + shape(2) + data(1, 2), [[[[1, 2]]]]),
    ],
)
def test_rare_forms_of_blobs(tmp_path: Path, fields: bytes, wanted: Any) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(one_blob(fields))
    found = read_weights(path)["ip"][0]
    np.testing.assert_array_equal(found, np.array(wanted, np.float32), strict=True)
    assert_same(read_weights(path), by_protobuf(path.read_bytes()))


def test_single_numbers_over_many_runs_are_a_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "_RUN", 7)
    path = tmp_path / "net.caffemodel"
    values = np.random.default_rng(1).standard_normal(30).astype(np.float32)
    path.write_bytes(one_blob(b"".join(single(value) for value in values) + shape(5, 6)))
    found = read_weights(path)["ip"][0]
    np.testing.assert_array_equal(found, values.reshape(5, 6))
    assert found.strides == (30, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x0a\x01a", "has no layers"),
        (
            one_blob(shape(3) + data(1, 2)),
            r"blob 0 of layer 'ip' has 2 numbers and the shape \[3\]; 3 numbers would do",
        ),
        (one_blob(shape(2)), "has 0 numbers"),
        (one_blob(shape(2**31) + data(1)), "shape = 2147483648; sizes from 0 to 2147483647 would do"),
        (one_blob(shape(-1) + data(1)), "shape = -1; sizes from 0"),
        (one_blob(b"\x08" + encoded_varint(-2) + data(1)), "num = -2; sizes from 0"),
        (one_blob(shape(*[1] * 33) + data(1)), "over 32 axes"),
        (one_blob(length_prefixed(7, b"\x08\x01" * 33) + data(1)), "over 32 axes"),
        (one_blob(shape(*[1] * 20) * 2 + data(1)), "over 32 axes"),
        (one_blob(shape(2**30, 2**30, 2**30, 2**30) + data(1)), "1 numbers and the shape"),
        (one_blob(length_prefixed(5, b"\0" * 7) + shape(2)), "7 bytes, which are no whole numbers of 4 bytes"),
        (one_blob(data(1) * 1001 + shape(1001)), "over 1000 pieces"),
        (one_blob((length_prefixed(6, b"") + shape()) * 1001), "over 1000 pieces"),
        (one_blob(data(1), b"n" * 70_000), "a name has 70000 bytes, over 65536"),
        (one_blob(shape(1) + data(1))[:-3], "has 17 bytes where 14 are left"),
        (length_prefixed(100, b"\x3a\xff\xff\xff\xff\x0f"), "has 4294967295 bytes where 0 are left"),
        (length_prefixed(100, b"\x3a" + b"\xff" * 10), "a whole number does not end"),
        (b"\xa2\x06", "a whole number does not end"),
        (b"\x03\x04", "has the number 0|of kind 3"),
        (b"\x0b\x0c", "of kind 3"),
        (b"\x00", "has the number 0"),
        (length_prefixed(2, length_prefixed(1, length_prefixed(50, shape(2)))), "blob 0 of layer '' has 0 numbers"),
        (b"name: 'net'\nlayer { }\n", "net.caffemodel"),
    ],
)
def test_damaged_files_are_errors_that_name_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(content)
    with pytest.raises(CaffeError, match=words) as caught:
        read_weights(path)
    assert "net.caffemodel" in str(caught.value)
    assert "would do" in str(caught.value)


def sound_file() -> bytes:
    net = NetParameter(name="n")
    for layer in (net.layer.add(name="a", type="Convolution"), net.layers.add(name="b", type="RELU")):
        blob = layer.blobs.add(data=range(6))
        blob.shape.dim.extend([2, 3])
        old = layer.blobs.add(double_data=[0.5, 1])
        old.num, old.channels, old.height, old.width = 1, 1, 1, 2
    return bytes(net.SerializeToString())


SOUND = sound_file()
CHANGES = st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4)


@settings(one_folder, max_examples=300)
@given(CHANGES, st.integers(0, len(SOUND)), st.binary(max_size=4))
@example([], len(SOUND), b"")
def test_changed_and_cut_files_are_read_as_protobuf_does_or_are_errors(
    tmp_path: Path, changes: list[tuple[int, int]], length: int, end: bytes
) -> None:
    changed = bytearray(SOUND)
    for place, value in changes:
        changed[place] = value
    content = bytes(changed[:length]) + end
    path = tmp_path / "net.caffemodel"
    path.write_bytes(content)
    try:
        found = read_weights(path)
    except CaffeError:
        return
    except CaffeWarning:
        raise AssertionError("no names are given twice") from None
    try:
        wanted = by_protobuf(content)
    except Exception:
        return  # protobuf also looks into what is not needed here
    # protobuf has the layers of the older form first here, whatever their order in the file.
    assert sorted(found) == sorted(wanted)
    assert_same({name: found[name] for name in wanted}, wanted)


@given(st.binary(max_size=80))
def test_any_bytes_are_fields_or_an_error(content: bytes) -> None:
    message = Message(memoryview(content), 0, len(content), "file")
    try:
        fields = list(message.fields())
    except CaffeError:
        return
    ends = [0, *(end for *_, end in fields)]
    assert ends[-1] == len(content)
    assert all(first < second for first, second in itertools.pairwise(ends))


@given(st.integers(-(2**63), 2**64 - 1))
def test_whole_numbers_are_read_as_they_are_written(value: int) -> None:
    content = encoded_varint(value)
    assert Message(memoryview(content), 0, len(content), "file").varint(0) == (value % 2**64, len(content))
    assert len(content) <= 10


def test_reading_takes_no_memory_for_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    weights = {f"l{index}": [np.full((500, 500), index, np.float32)] for index in range(20)}
    write_weights(path, weights)
    single_numbers = one_blob(shape(200_000) + single(1) * 200_000)
    (tmp_path / "single.caffemodel").write_bytes(single_numbers)
    tracemalloc.start()
    try:
        found = read_weights(path)
        first = tracemalloc.get_traced_memory()[1]
        singles = read_weights(tmp_path / "single.caffemodel")
        second = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 200_000
    assert second < 0.2 * len(single_numbers) + 200_000
    assert found["l19"][0][499, 499] == 19
    assert singles["ip"][0].sum() == 200_000
    assert not found["l0"][0].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        found["l0"][0][0] = 1


def file_pages() -> int:
    """KiB of files that are in this process's memory."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(re.search(r"RssFile:\s+(\d+) kB", status)[1])  # type: ignore[index]


@pytest.mark.skipif(sys.platform != "linux", reason="memory of files is read from /proc")
@pytest.mark.parametrize("name", ["net.caffemodel", "net.h5"])
def test_what_was_read_can_be_forgotten_and_read_again(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(1)
    values = [rng.standard_normal((1000, 1000), np.float32) for _ in range(4)]
    write_weights(tmp_path / name, {"ip": values})
    blobs = read_weights(tmp_path / name)["ip"]
    start = file_pages()
    for blob, value in zip(blobs, values, strict=True):
        np.testing.assert_array_equal(np.array(blob), value)
        forget(blob)
    assert file_pages() - start < 2000
    for blob, value in zip(blobs, values, strict=True):
        np.testing.assert_array_equal(blob, value)
    assert file_pages() - start > 14000
    for other in (values[0], np.zeros(0), values[0][:, 1:], blobs[0][:0]):
        forget(other)
    np.testing.assert_array_equal(values[0], blobs[0])


def test_writing_takes_no_memory_for_the_file(tmp_path: Path) -> None:
    weights = {
        f"l{index}": [np.ones((1000, 1000), np.float16), np.ones((1000, 1000), np.float32).T] for index in (0, 1)
    }
    tracemalloc.start()
    try:
        write_weights(tmp_path / "net.caffemodel", weights)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert_same(read_weights(tmp_path / "net.caffemodel"), {name: [np.float32(blob) for blob in found]
                                                           for name, found in weights.items()})  # fmt: skip


@pytest.mark.parametrize("suffix", [".caffemodel", ".h5", ".caffemodel.H5", ".hdf5"])
def test_types_strides_and_shapes_of_arrays_that_are_written(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((3, 5, 2))
    unaligned = np.ndarray((7,), np.float32, bytearray(29), 1)
    unaligned[...] = rng.standard_normal(7)
    single = values.astype(np.float32)
    given_blobs = [values, single[::-1, ::2].T, values.astype(">f4"), unaligned, np.float16(values), np.arange(4)]
    given_blobs += [np.float32(2.5), np.zeros((0, 3), np.float32), values[:, :, 1], np.array(1.5)]
    path = tmp_path / f"net{suffix}"
    write_weights(path, {"all": given_blobs})
    found = read_weights(path)["all"]
    for mine, theirs in zip(found, given_blobs, strict=True):
        assert mine.dtype == (np.float64 if np.asarray(theirs).dtype == np.float64 else np.float32)
        np.testing.assert_array_equal(mine, np.asarray(theirs, mine.dtype))


def test_what_is_no_blob_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    with pytest.raises(CaffeError, match=r"blob 1 of layer 'a' is an array of .*complex.* real numbers would do"):
        write_weights(path, {"a": [np.zeros(2), np.zeros(2, complex)]})
    with pytest.raises(CaffeError, match="without a name"):
        write_weights(path, {"": [np.zeros(2)]})
    assert not list(tmp_path.iterdir())


def test_more_blobs_and_layers_than_any_network_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caffemodel_module, "MOST_BLOBS", 3)
    path = tmp_path / "net.caffemodel"
    blob = length_prefixed(7, data(1))
    path.write_bytes(one_blob(data(1)) + length_prefixed(100, blob * 2))
    assert len(read_weights(path)) == 2
    for content in (one_blob(data(1)) + length_prefixed(100, blob * 3), length_prefixed(100, b"") * 4):
        path.write_bytes(content)
        with pytest.raises(CaffeError, match=r"has over 3 (blobs|layers); up to 3 would do"):
            read_weights(path)


def test_layers_of_one_name_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(one_blob(data(1)) + one_blob(data(2)) + length_prefixed(100, length_prefixed(1, b"ip")))
    with pytest.warns(CaffeWarning, match="several layers with blobs are named 'ip'; the last one counts"):
        assert read_weights(path)["ip"][0] == 2


def test_names_that_are_not_utf_8_are_read_as_in_prototxt_files(tmp_path: Path) -> None:
    path, text = tmp_path / "net.caffemodel", tmp_path / "net.prototxt"
    path.write_bytes(one_blob(data(1), b"\xb5"))
    text.write_bytes(b"layer { name: '\xb5' }\n")
    assert list(read_weights(path)) == [read_net(text).layer[0].name]


def test_opencv_reads_what_is_written(tmp_path: Path) -> None:
    text = """input: "data" input_dim: 1 input_dim: 2 input_dim: 5 input_dim: 6
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
            convolution_param { num_output: 3 kernel_h: 2 kernel_w: 3 } }"""
    rng = np.random.default_rng(4)
    weight, bias = rng.standard_normal((3, 2, 2, 3), np.float32), rng.standard_normal(3, np.float32)
    path = tmp_path / "net.caffemodel"
    write_weights(path, {"conv": [weight, bias]}, read_net(text))
    net = cv2.dnn.readNetFromCaffe(np.frombuffer(text.encode(), np.uint8), np.fromfile(path, np.uint8))
    image = rng.standard_normal((1, 2, 5, 6), np.float32)
    net.setInput(image)
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (2, 3), (2, 3))
    wanted = np.einsum("nchwij,ocij->nohw", windows, weight.astype(np.float64)) + bias[:, None, None]
    np.testing.assert_allclose(net.forward(), wanted, rtol=1e-5, atol=1e-5)
