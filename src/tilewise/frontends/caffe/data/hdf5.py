"""Batches of an ``HDF5Data`` layer: rows of the data sets of HDF5 files that a list names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.frontends.caffe.data.draws import order, seed_of
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Hdf5Batches"]

Floats = npt.NDArray[np.float32]


class Hdf5Batches:
    """All batches of an ``HDF5Data`` layer, by number.

    Each top is the data set of its name, and a batch is as many of its rows. The rows of the list's files follow each
    other, and begin again at the end. With ``shuffle`` each epoch has an order of files, and of rows within each file.
    One file's data sets are in memory at a time.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer, the file and the data set.
    """

    def __init__(self, layer: Any, training: bool, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.name = f"layer {layer.name!r}"
        parameters = layer.hdf5_data_param
        if layer.HasField("transform_param"):
            raise CaffeError(f"{self.name}: HDF5Data takes no transform_param; data that are transformed would do")
        if parameters.batch_size < 1:
            raise CaffeError(f"{self.name}: batch_size: {parameters.batch_size}; 1 or more would do")
        self.size, self.seed, self.share = int(parameters.batch_size), seed, share
        self.layer, self.phase = layer.name, "train" if training else "test"
        self.tops, self.shuffle = list(layer.top), bool(parameters.shuffle)
        self.files = _listed(parameters.source, self.name)
        sizes = [self._sizes(file) for file in self.files]
        for file, found in zip(self.files, sizes, strict=True):
            if [size[1:] for size in found] != [size[1:] for size in sizes[0]]:
                text = f"{file} has rows of {found}, but {self.files[0]} of {sizes[0]}"
                raise CaffeError(f"{self.name}: {text}; equal sizes but for the number of rows would do")
        self.rows = [found[0][0] for found in sizes]
        if not sum(self.rows):
            raise CaffeError(f"{self.name}: {parameters.source}: the files have no row; at least one would do")
        self.shapes = tuple((self.size, *size[1:]) for size in sizes[0])
        self._loaded: tuple[str, list[Floats]] = ("", [])
        self._epoch: tuple[int, int, npt.NDArray[np.int64]] | None = None
        self._within: tuple[int, int, int, npt.NDArray[np.int64]] | None = None

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``, one tensor for each top."""
        rank, count = self.share
        found = [np.empty(shape, np.float32) for shape in self.shapes]
        for place in range(self.size):
            file, row = self._place((number * self.size + place) * count + rank)
            for top, data in zip(found, self._data(self.files[file]), strict=True):
                top[place] = data[row]
        return tuple(map(torch.from_numpy, found))

    def told(self, number: int) -> str:
        """Where batch ``number`` begins."""
        rank, count = self.share
        file, row = self._place(number * self.size * count + rank)
        return f"{self.size} rows from row {row} of {self.files[file]} on"

    def release(self) -> None:
        """Nothing is kept open."""

    def _place(self, position: int) -> tuple[int, int]:
        """File and row at a position of the endless sequence of epochs."""
        epoch, left = divmod(position, sum(self.rows))
        for file in self._files(epoch):
            if left < self.rows[file]:
                return int(file), self._row(epoch, int(file), left)
            left -= self.rows[file]
        raise AssertionError("a position within an epoch is in one of its files")

    def _files(self, epoch: int) -> npt.NDArray[np.int64]:
        """The files in an epoch's order."""
        if not self.shuffle:
            return np.arange(len(self.files), dtype=np.int64)
        if self._epoch is None or self._epoch[:2] != (self.seed, epoch):
            self._epoch = (self.seed, epoch, order(self._own_seed(), epoch, len(self.files)))
        return self._epoch[2]

    def _row(self, epoch: int, file: int, place: int) -> int:
        """The row of a file that an epoch has at a place."""
        if not self.shuffle:
            return place
        if self._within is None or self._within[:3] != (self.seed, epoch, file):
            rows = order(self._own_seed(), epoch, self.rows[file], 1 + file)
            self._within = (self.seed, epoch, file, rows)
        return int(self._within[3][place])

    def _own_seed(self) -> int:
        return seed_of(self.seed, self.layer, self.phase)

    def _sizes(self, file: str) -> list[tuple[int, ...]]:
        """The shapes of a file's data sets, one for each top."""
        with _opened(file, self.name) as found:
            sizes = [tuple(_data_set(found, top, file, self.name).shape) for top in self.tops]
        if not all(sizes) or len({size[0] for size in sizes}) != 1:
            text = ", ".join(f"{top} {size}" for top, size in zip(self.tops, sizes, strict=True))
            raise CaffeError(f"{self.name}: {file}: data sets differ in their number of rows: {text}")
        return sizes

    def _data(self, file: str) -> list[Floats]:
        """A file's data sets, read once for rows that follow each other."""
        if self._loaded[0] != file:
            self._loaded = ("", [])  # first, so that two files are never in memory together
            with _opened(file, self.name) as found:
                sets = [_data_set(found, top, file, self.name) for top in self.tops]
                try:
                    self._loaded = (file, [np.asarray(each[()], dtype=np.float32) for each in sets])
                except (OSError, RuntimeError, ValueError) as error:
                    raise CaffeError(f"{self.name}: {file}: cannot be read: {error}") from error
        return self._loaded[1]


def _listed(source: str, name: str) -> list[str]:
    """The files that a list names, one in a line."""
    try:
        lines = Path(source).read_bytes().decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise CaffeError(f"{name}: source: {source} cannot be read: {error.strerror or error}") from error
    files = [line.strip() for line in lines if line.strip()]
    if not files:
        raise CaffeError(f"{name}: source: {source} lists no file; the path of an HDF5 file in each line would do")
    return files


def _opened(file: str, name: str) -> Any:
    """An open HDF5 file."""
    import h5py

    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise CaffeError(f"{name}: {file}: cannot be opened as an HDF5 file: {error}") from error


def _data_set(found: Any, top: str, file: str, name: str) -> Any:
    """The data set of a top's name, with rows of numbers that lie in this very file."""
    import h5py

    where = f"{name}: {file}"
    if not isinstance(found.get(top, getlink=True), h5py.HardLink) or not isinstance(found[top], h5py.Dataset):
        there = ", ".join(sorted(found)[:20]) or "nothing"
        raise CaffeError(f"{where}: has no data set {top!r}, but {there}; one for each top of the layer would do")
    data = found[top]
    if data.is_virtual or data.external:
        raise CaffeError(f"{where}: data set {top!r} is kept in other files; one within the file would do")
    if data.dtype.kind not in "fiu":
        raise CaffeError(f"{where}: data set {top!r} has values of type {data.dtype}; numbers would do")
    return data
