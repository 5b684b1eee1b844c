"""Solver states and mean images in the binary format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import (
    SavedSolver,
    read_mean,
    read_solverstate,
    write_mean,
    write_solverstate,
)
from tilewise.frontends.caffe.schema import BlobProto, SolverState

one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
COUNTS = st.integers(0, 2**31 - 1)


@settings(one_folder, max_examples=40)
@given(COUNTS, st.text(max_size=5), COUNTS, st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3))
def test_states_are_those_that_protobuf_reads_and_writes(
    tmp_path: Path, iteration: int, learned_net: str, step: int, shapes: list[list[int]]
) -> None:
    history = [np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in shapes]
    path = tmp_path / "net.solverstate"
    write_solverstate(path, SavedSolver(iteration, learned_net, step, history))
    state = SolverState.FromString(path.read_bytes())
    assert (state.iter, state.learned_net, state.current_step) == (iteration, learned_net, step)
    assert [list(blob.shape.dim) for blob in state.history] == shapes
    for blob, values in zip(state.history, history, strict=True):
        np.testing.assert_array_equal(blob.data, values.reshape(-1))
    path.write_bytes(state.SerializeToString())
    found = read_solverstate(path)
    assert (found.iter, found.learned_net, found.current_step) == (iteration, learned_net, step)
    for mine, theirs in zip(found.history, history, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def test_numbers_that_caffe_cannot_keep_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.solverstate"
    with pytest.raises(CaffeError, match="iter = -1; whole numbers from 0 to 2147483647 would do"):
        write_solverstate(path, SavedSolver(-1, "", 0, []))
    with pytest.raises(CaffeError, match="current_step = 2147483648"):
        write_solverstate(path, SavedSolver(0, "", 2**31, []))
    assert not path.exists()
    path.write_bytes(SolverState(iter=-1).SerializeToString())
    with pytest.raises(CaffeError, match="no whole number from 0"):
        read_solverstate(path)
    path.write_bytes(SolverState(history=[BlobProto(data=[1, 2])]).SerializeToString())
    with pytest.raises(CaffeError, match=r"history 0 has 2 numbers and the shape \[\]"):
        read_solverstate(path)


@settings(one_folder, max_examples=40)
@given(st.tuples(*[st.integers(0, 4)] * 3))
def test_mean_images_are_those_that_protobuf_reads(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    mean = np.random.default_rng(0).standard_normal(shape).transpose(2, 1, 0)
    path = tmp_path / "mean.binaryproto"
    write_mean(path, mean)
    blob = BlobProto.FromString(path.read_bytes())
    assert (blob.num, blob.channels, blob.height, blob.width) == (1, *mean.shape)
    np.testing.assert_array_equal(blob.data, mean.astype(np.float32).reshape(-1))
    np.testing.assert_array_equal(read_mean(path), mean.astype(np.float32), strict=True)


def test_mean_images_of_other_forms(tmp_path: Path) -> None:
    path = tmp_path / "mean"
    blob = BlobProto(data=range(6))
    blob.shape.dim.extend([1, 3, 1, 2])
    path.write_bytes(blob.SerializeToString())
    assert read_mean(path).tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    np.save(tmp_path / "mean.npy", np.arange(6.0).reshape(1, 3, 1, 2))
    assert read_mean(tmp_path / "mean.npy").tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    np.save(tmp_path / "mean.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(CaffeError, match=r"mean\.npy is no sound \.npy file"):
        read_mean(tmp_path / "mean.npy")
    (tmp_path / "mean.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(CaffeError, match=r"mean\.npy is no sound \.npy file"):
        read_mean(tmp_path / "mean.npy")
    np.save(tmp_path / "mean.npy", np.arange(6))
    with pytest.raises(CaffeError, match="an array of int64; one of real numbers would do"):
        read_mean(tmp_path / "mean.npy")
    path.write_bytes(blob.SerializeToString()[:-1])
    with pytest.raises(CaffeError, match="mean, byte"):
        read_mean(path)
    with pytest.raises(CaffeError, match=r"mean has the shape \[2, 2\]; \[channels, height, width\] would do"):
        write_mean(path, np.zeros((2, 2)))
