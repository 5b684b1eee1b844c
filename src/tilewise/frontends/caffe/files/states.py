"""A solver's state between runs (solverstate) and mean images (binaryproto)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.blobs import Array, blob_of, checked, write_blob
from tilewise.frontends.caffe.files.hdf5 import read_history_h5, write_history_h5
from tilewise.frontends.caffe.files.mapped import HDF5, begins_with, message_of
from tilewise.frontends.caffe.files.weights import is_hdf5_name
from tilewise.frontends.caffe.files.wire import BYTES, VARINT, encoded_varint, key, length_prefixed
from tilewise.machine.files import replacing

__all__ = ["SavedSolver", "read_mean", "read_solverstate", "write_mean", "write_solverstate"]

MOST_BLOBS = 100_000
_ITER, _LEARNED_NET, _HISTORY, _CURRENT_STEP = 1, 2, 3, 4
_MEAN_DATA = 5
_NUMPY = b"\x93NUMPY"


@dataclasses.dataclass(frozen=True)
class SavedSolver:
    """What a solver keeps between runs.

    ``iter`` counts the iterations that were done, ``current_step`` the steps of a learning rate that falls in steps.
    ``learned_net`` is the path of the weights that were saved with it, as the file has it. ``history`` has the solver's
    arrays in Caffe's order: one for each learnable parameter, and for solvers that keep two, the second ones after
    those.

    >>> import numpy, tempfile
    >>> from tilewise.frontends.caffe.files import SavedSolver
    >>> SavedSolver(100, "net_iter_100.caffemodel", 2, [numpy.zeros(3, numpy.float32)]).iter
    100
    """

    iter: int
    learned_net: str
    current_step: int
    history: Sequence[Any]


def read_solverstate(path: str | os.PathLike[str]) -> SavedSolver:
    """The state of a solver, from a file in the binary format or in HDF5.

    The arrays are views of the mapped file, as :func:`~tilewise.frontends.caffe.files.read_weights` has them. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` where the file is damaged, and ``OSError`` where it cannot be
    read.

    >>> import numpy, tempfile
    >>> path = tempfile.mkdtemp() + "/net_iter_100.solverstate"
    >>> write_solverstate(path, SavedSolver(100, "net_iter_100.caffemodel", 2, [numpy.zeros(3, numpy.float32)]))
    >>> read_solverstate(path).learned_net
    'net_iter_100.caffemodel'
    """
    if begins_with(path, HDF5):
        return SavedSolver(*read_history_h5(path))
    message = message_of(path)
    numbers = {_ITER: 0, _CURRENT_STEP: 0}
    learned_net = ""
    history: list[Array] = []
    for number, kind, start, end in message.fields():
        if number in numbers and kind == VARINT:
            if start > 2**31 - 1:
                raise message.wrong(end, "iter or current_step is no whole number from 0 to 2147483647")
            numbers[number] = start
        elif number == _LEARNED_NET and kind == BYTES:
            learned_net = message.text(start, end)
        elif number == _HISTORY and kind == BYTES:
            history.append(blob_of(message.part(start, end), f"history {len(history)}"))
            if len(history) > MOST_BLOBS:
                raise CaffeError(f"{message.source} has over {MOST_BLOBS} blobs; up to {MOST_BLOBS} would do")
    return SavedSolver(numbers[_ITER], learned_net, numbers[_CURRENT_STEP], history)


def write_solverstate(path: str | os.PathLike[str], state: SavedSolver) -> None:
    """Write the state of a solver: HDF5 if ``path`` ends in ``.h5`` or ``.hdf5``, else the binary format.

    An existing file stays as it was until the new one is complete on the disk. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for numbers that Caffe cannot keep.

        >>> import numpy, tempfile
        >>> path = tempfile.mkdtemp() + "/net_iter_100.solverstate"
        >>> write_solverstate(path, SavedSolver(100, "net_iter_100.caffemodel", 2, [numpy.zeros(3, numpy.float32)]))
        >>> read_solverstate(path).iter
        100
    """
    for name in ("iter", "current_step"):
        if not 0 <= getattr(state, name) < 2**31:
            raise CaffeError(f"{name} = {getattr(state, name)}; whole numbers from 0 to {2**31 - 1} would do")
    history = [checked(blob, f"history {index}") for index, blob in enumerate(state.history)]
    if is_hdf5_name(path):
        write_history_h5(path, state.iter, state.learned_net, state.current_step, history)
        return
    with replacing(path, CaffeError) as partial, partial.open("wb") as file:
        file.write(key(_ITER, VARINT) + encoded_varint(state.iter))
        if state.learned_net:
            file.write(length_prefixed(_LEARNED_NET, state.learned_net.encode("utf-8")))
        for blob in history:
            write_blob(file, _HISTORY, blob)
        file.write(key(_CURRENT_STEP, VARINT) + encoded_varint(state.current_step))


def read_mean(path: str | os.PathLike[str]) -> Array:
    """A mean image of shape (channels, height, width), or as the file has it where it has other axes.

    Files are Caffe's binaryproto, of which axes of one in front of three are dropped, or NumPy's ``.npy``. The array
    cannot be written to and may be unaligned. Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where the
    file is damaged, and ``OSError`` where it cannot be read.

    >>> import numpy, tempfile
    >>> path = tempfile.mkdtemp() + "/mean.binaryproto"
    >>> write_mean(path, numpy.zeros((3, 8, 8), numpy.float32))
    >>> read_mean(path).shape
    (3, 8, 8)
    """
    source = os.fspath(path)
    if begins_with(path, _NUMPY):
        try:
            mean: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OverflowError) as error:
            raise CaffeError(f"{source} is no sound .npy file: {error}; an array of numbers would do") from error
        if mean.dtype.kind != "f":
            raise CaffeError(f"{source} is an array of {mean.dtype}; one of real numbers would do")
    else:
        mean = blob_of(message_of(path), "the mean")
    while mean.ndim > 3 and mean.shape[0] == 1:
        mean = mean[0]
    return mean


def write_mean(path: str | os.PathLike[str], mean: Any) -> None:
    """Write a mean image of shape (channels, height, width) as a binaryproto, as Caffe's ``compute_image_mean`` does.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for another number of axes.

    >>> import numpy, tempfile
    >>> write_mean(tempfile.mkdtemp() + "/mean.binaryproto", numpy.zeros((3, 8, 8), numpy.float32))
    """
    array = checked(mean, "mean")
    if array.ndim != 3:
        raise CaffeError(f"mean has the shape {list(array.shape)}; [channels, height, width] would do")
    numbers = np.ascontiguousarray(array, "<f4")
    # The four old fields, which every version of Caffe reads.
    axes = enumerate((1, *array.shape), 1)
    head = b"".join(key(number, VARINT) + encoded_varint(size) for number, size in axes)
    with replacing(path, CaffeError) as partial, partial.open("wb") as file:
        file.write(head + key(_MEAN_DATA, BYTES) + encoded_varint(numbers.nbytes))
        file.write(numbers.reshape(-1).view(np.uint8).data)
