"""Weights and solver states in HDF5, as Caffe lays them out."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import (
    SavedSolver,
    read_net,
    read_solverstate,
    read_weights,
    write_solverstate,
    write_weights,
)
from tilewise.frontends.caffe.files import hdf5 as hdf5_module

NAMES = st.text("abc_.é", min_size=1, max_size=4).filter(lambda name: name != ".")
SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=12)
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, blobs: dict[str, Any], **options: Any) -> Path:
    """A file of weights as a program other than this one writes it."""
    with h5py.File(path, "w", **options) as file:
        file.create_group("data")
        for name, values in blobs.items():
            file.create_dataset(f"data/{name}", data=values)
    return path


@settings(one_folder, max_examples=40)
@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=3), st.sampled_from([np.float32, np.float64]))
def test_what_is_written_is_laid_out_as_caffe_does_and_read(
    tmp_path: Path, shapes: dict[str, list[tuple[int, ...]]], dtype: type
) -> None:
    rng = np.random.default_rng(2)
    weights = {name: [rng.standard_normal(shape).astype(dtype) for shape in found] for name, found in shapes.items()}
    path = tmp_path / "net.h5"
    write_weights(path, weights)
    with h5py.File(path) as file:
        assert list(file) == ["data"]
        assert sorted(file["data"]) == sorted(weights)
        for name, blobs in weights.items():
            assert sorted(file["data"][name], key=int) == [str(index) for index in range(len(blobs))]
            for index, blob in enumerate(blobs):
                np.testing.assert_array_equal(file["data"][name][str(index)][()], blob)
    found = read_weights(path)
    assert sorted(found) == sorted(name for name, blobs in weights.items() if blobs)
    for name, blobs in found.items():
        for mine, theirs in zip(blobs, weights[name], strict=True):
            np.testing.assert_array_equal(mine, theirs, strict=True)
            assert not mine.flags.writeable


def test_layers_without_blobs_have_a_group_where_the_network_is_given(tmp_path: Path) -> None:
    net = read_net('layer { name: "relu" } layer { name: "ip" } layer { name: "relu" }')
    write_weights(tmp_path / "net.h5", {"ip": [np.ones(2)], "more": []}, net)
    with h5py.File(tmp_path / "net.h5") as file:
        assert sorted(file["data"]) == ["ip", "more", "relu"]


def test_names_with_a_stroke_are_groups_within_groups(tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    write_weights(path, {"inception_3a/1x1": [np.ones(2)], "inception_3a": [np.zeros(1)], "inception_3a/3x3": []})
    assert {name: len(blobs) for name, blobs in read_weights(path).items()} == {
        "inception_3a/1x1": 1,
        "inception_3a": 1,
    }
    for name in ("/a", "a//b", "./a", "a/"):
        with pytest.raises(CaffeError, match=f"layer '{name}' has no name that HDF5 can keep"):
            write_weights(path, {name: [np.ones(2)]})


def test_shared_blobs_that_caffe_leaves_out_have_none(tmp_path: Path) -> None:
    path = written(tmp_path / "net.h5", {"ip/1": np.float32([1, 2]), "ip/3": np.float32([3])})
    found = read_weights(path)["ip"]
    assert [None if blob is None else blob.tolist() for blob in found] == [None, [1, 2], None, [3]]


def test_numbers_are_a_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    write_weights(path, {"ip": [np.full((1000, 500), 7, np.float32)]})
    tracemalloc.start()
    try:
        found = read_weights(path)["ip"][0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300_000
    assert (found == 7).all()


def test_other_layouts_are_read_as_well(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
    path = tmp_path / "net.h5"
    with h5py.File(path, "w", libver="latest", userblock_size=512) as file:
        file.create_dataset("data/packed/0", data=values, chunks=(2, 5), compression="gzip")
        file.create_dataset("data/plain/0", data=values.astype(">f8"))
        file.create_dataset("data/plain/notes", data=values)
    assert path.read_bytes()[:4] == b"\0" * 4
    path.write_bytes(path.read_bytes()[512:])
    for found in read_weights(path).values():
        np.testing.assert_array_equal(found[0], values)


def hostile(path: Path, kind: str) -> str:
    """Write a file that means harm, and return what is said of it."""
    with h5py.File(path, "w") as file:
        ip = file.create_group("data/ip")
        if kind == "another file":
            ip["0"] = h5py.ExternalLink("/etc/hostname", "/")
            return "data/ip/0 is a link to something else"
        if kind == "soft link":
            file["data/other"] = h5py.SoftLink("/data/ip")
            return "/data/other is a link to something else"
        if kind == "outside":
            (path.parent / "secret").write_bytes(b"\1" * 8)
            ip.create_dataset("0", (2,), np.float32, external=[(str(path.parent / "secret"), 0, 8)])
            return "kept in another file"
        if kind == "virtual":
            layout = h5py.VirtualLayout((2,), np.float32)
            layout[:] = h5py.VirtualSource(str(path.parent / "secret.h5"), "x", (2,))
            ip.create_virtual_dataset("0", layout)
            return "kept in another file"
        if kind == "bomb":
            ip.create_dataset("0", (1 << 20, 1 << 20), np.float32, chunks=(1 << 10, 1 << 10), compression="gzip")
            return "data without compression would do"
        if kind == "never written":
            ip.create_dataset("0", (1 << 20, 1 << 20), np.float32)
            return "data without compression would do"
        if kind == "circle":
            ip["again"], ip["once more"] = ip, file["data"]
            return "over 1000 groups and datasets"
        ip.create_dataset("0", data=["text", "more"] if kind == "text" else np.arange(3))
        return r"real numbers of up to 32 axes would do"


KINDS = ["another file", "soft link", "outside", "virtual", "bomb", "never written", "circle", "text", "whole numbers"]


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_errors(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_module, "MOST_OBJECTS", 1000)
    path = tmp_path / "net.h5"
    words = hostile(path, kind)
    with pytest.raises(CaffeError, match=words):
        read_weights(path)


def test_files_of_something_else_and_cut_files(tmp_path: Path) -> None:
    path = tmp_path / "net.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("model", data=[1])
    with pytest.raises(CaffeError, match="has no group 'data'"):
        read_weights(path)
    whole = written(tmp_path / "whole.h5", {"ip/0": np.zeros(5000, np.float32)}).read_bytes()
    for length in (8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CaffeError, match="is no sound HDF5 file"):
            read_weights(path)


@settings(one_folder, max_examples=60)
@given(st.data())
def test_changed_files_are_read_or_are_errors(tmp_path: Path, data: st.DataObject) -> None:
    path = written(tmp_path / "net.h5", {"ip/0": np.zeros(3, np.float32), "ip/1": np.zeros(2)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(8, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(CaffeError):
        for blobs in read_weights(path).values():
            assert all(blob is None or blob.nbytes <= 16 * len(content) for blob in blobs)


@pytest.mark.parametrize("suffix", [".solverstate", ".solverstate.h5"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_solver_state_comes_back(tmp_path: Path, suffix: str, dtype: type) -> None:
    rng = np.random.default_rng(1)
    history = [rng.standard_normal(shape).astype(dtype) for shape in ((2, 3), (4,), (), (1, 1, 2, 2))] * 3
    path = tmp_path / f"net{suffix}"
    write_solverstate(path, SavedSolver(7, "net_iter_7.caffemodel", 2, history))
    found = read_solverstate(path)
    assert (found.iter, found.learned_net, found.current_step) == (7, "net_iter_7.caffemodel", 2)
    for mine, theirs in zip(found.history, history, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def test_a_solver_state_in_hdf5_is_laid_out_as_caffe_does(tmp_path: Path) -> None:
    path = tmp_path / "net.solverstate.h5"
    write_solverstate(path, SavedSolver(7, "n.h5", 2, [np.float32([1, 2])]))
    with h5py.File(path) as file:
        assert sorted(file) == ["current_step", "history", "iter", "learned_net"]
        assert (file["iter"].shape, file["iter"].dtype, file["iter"][0]) == ((1,), np.int32, 7)
        assert file["current_step"][0] == 2
        # Text of C: its type has room for the zero at its end.
        assert (file["learned_net"].shape, file["learned_net"].dtype) == ((), np.dtype("S5"))
        assert file["history/0"][()].tolist() == [1, 2]
    write_solverstate(path, SavedSolver(7, "", 2, []))
    assert read_solverstate(path) == SavedSolver(7, "", 2, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"iter": None}, "has no whole number 'iter'"),
        ({"iter": np.zeros(2, np.int32)}, "has no whole number 'iter'"),
        ({"current_step": 1.5}, "has no whole number 'current_step'"),
        ({"learned_net": 3}, "learned_net is no text"),
        ({"history/1": None}, r"history has the blobs \[0, 2\]; all from 0 on would do"),
        ({"history": None}, "has no group 'history'"),
    ],
)
def test_states_that_lack_something_are_errors(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "net.solverstate.h5"
    write_solverstate(path, SavedSolver(7, "n.h5", 2, [np.zeros(1)] * 3))
    with h5py.File(path, "a") as file:
        for name, value in change.items():
            del file[name]
            if value is not None:
                file[name] = value
    with pytest.raises(CaffeError, match=words):
        read_solverstate(path)
