"""Blobs of binary files as arrays: views of the file where their numbers lie in one piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.wire import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Message,
    encoded_varint,
    key,
    length_prefixed,
)

__all__ = ["MOST_AXES", "Array", "blob_of", "blob_size", "checked", "write_blob"]

Array = NDArray[Any]

MOST_AXES = 32
"""Axes that a blob has at most, in Caffe too."""
MOST_PIECES = 1000
"""Pieces in which a blob's numbers may lie. All known writers leave one."""
LARGEST_AXIS = 2**31 - 1

_OLD_AXES = {1: "num", 2: "channels", 3: "height", 4: "width"}
_DATA, _DIFF, _SHAPE, _DOUBLE_DATA, _DOUBLE_DIFF, _DIM = 5, 6, 7, 8, 9, 1
_SINGLE: np.dtype[Any] = np.dtype("<f4")
_DOUBLE: np.dtype[Any] = np.dtype("<f8")
_TYPES = {_DATA: _SINGLE, _DIFF: _SINGLE, _DOUBLE_DATA: _DOUBLE, _DOUBLE_DIFF: _DOUBLE}
_FIXED = {_SINGLE: FIXED32, _DOUBLE: FIXED64}
_RUN = 1 << 16
"""Single numbers, each with the key of its field, that are looked at together."""
_CHUNK = 1 << 18
"""Numbers that are converted together while an array is written."""


def blob_of(message: Message, what: str) -> Array:
    """The array of a ``BlobProto``, in fp32 or, from ``double_data``, fp64. ``what`` names it in messages.

    The array cannot be written to. It is a view of the message's buffer, not aligned to its type, unless the numbers
    lie in several pieces. Its shape is the blob's: that of the four old fields where one is set, as in Caffe.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` where the numbers are not as many as the shape says.
    """
    old: dict[int, int] = {}
    dims: list[int] = []
    pieces: dict[int, list[Array]] = {number: [] for number in _TYPES}
    place = message.start
    while place < message.end:
        number, kind, start, end = message.field(place)
        if number in _OLD_AXES and kind == VARINT:
            old[number] = _axis(start & 0xFFFF_FFFF, 32, f"{message.source}: {what}: {_OLD_AXES[number]}")
        elif number == _SHAPE and kind == BYTES:
            dims += _dims(message.part(start, end), what)
            _check_axes(len(dims), f"{message.source}: {what}")
        elif number in _TYPES and kind in (BYTES, _FIXED[_TYPES[number]]):
            numbers, end = _numbers(message, place, _TYPES[number], what)
            pieces[number].append(numbers)
            if len(pieces[number]) > MOST_PIECES:
                raise message.wrong(place, f"{what} lies in over {MOST_PIECES} pieces")
        place = end
    shape = tuple(old.get(number, 0) for number in _OLD_AXES) if old else tuple(dims)
    double, single = ([piece for piece in pieces[number] if piece.size] for number in (_DOUBLE_DATA, _DATA))
    return _shaped(double or single, shape, f"{message.source}: {what}")


def _dims(message: Message, what: str) -> list[int]:
    """The sizes of axes that a ``BlobShape`` has, packed or not."""
    name = f"{message.source}: {what}: shape"
    sizes: list[int] = []
    for number, kind, start, end in message.fields():
        if number == _DIM and kind == VARINT:
            sizes.append(_axis(start, 64, name))
        elif number == _DIM and kind == BYTES:
            while start < end:
                value, start = message.part(start, end).varint(start)
                sizes.append(_axis(value, 64, name))
                _check_axes(len(sizes), name)
        _check_axes(len(sizes), name)
    return sizes


def _axis(value: int, bits: int, name: str) -> int:
    """The size of an axis that is kept as a whole number with a sign, in so many bits."""
    if value > LARGEST_AXIS:
        signed = value - (1 << bits) if value >> (bits - 1) else value
        raise CaffeError(f"{name} = {signed}; sizes from 0 to {LARGEST_AXIS} would do")
    return value


def _check_axes(count: int, name: str) -> None:
    if count > MOST_AXES:
        raise CaffeError(f"{name} has over {MOST_AXES} axes; up to {MOST_AXES} would do")


def _numbers(message: Message, place: int, dtype: np.dtype[Any], what: str) -> tuple[Array, int]:
    """The numbers of the field at a place, and the place after them.

    They are those of one packed field, or of all fields of one number each that follow without a gap.
    """
    _, kind, start, end = message.field(place)
    width = dtype.itemsize
    if kind == BYTES:
        if (end - start) % width:
            raise message.wrong(start, f"{what} has {end - start} bytes, which are no whole numbers of {width} bytes")
        if start == end:
            return np.empty(0, dtype), end
        return np.ndarray(((end - start) // width,), dtype, message.buffer, start), end
    stride = end - place
    count = 1
    if start - place == 1:
        keys = np.ndarray(((message.end - place) // stride,), np.uint8, message.buffer, place, (stride,))
        count = _leading(keys)
    return np.ndarray((count,), dtype, message.buffer, start, (stride,)), place + count * stride


def _leading(keys: NDArray[np.uint8]) -> int:
    """How many values at the start are the same as the first."""
    for start in range(0, len(keys), _RUN):
        others = keys[start : start + _RUN] != keys[0]
        if others.any():
            return start + int(others.argmax())
    return len(keys)


def _shaped(pieces: Sequence[Array], shape: tuple[int, ...], name: str) -> Array:
    """The numbers of some pieces as one array of a shape."""
    found, wanted = sum(piece.size for piece in pieces), math.prod(shape)
    if found != wanted:
        raise CaffeError(f"{name} has {found} numbers and the shape {list(shape)}; {wanted} numbers would do")
    try:
        if not pieces:
            array: Array = np.zeros(shape, np.float32)
        elif len(pieces) == 1:
            array = pieces[0].reshape(shape)
        else:
            array = np.concatenate(pieces).reshape(shape)
    except ValueError:
        raise CaffeError(f"{name} has the shape {list(shape)}; one that fits into memory would do") from None
    array.flags.writeable = False
    return array


def checked(array: Any, what: str) -> Array:
    """An array as a blob can hold it: fp64, or anything else that is a number in fp32. ``what`` names it in messages.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` for what is no array of numbers.
    """
    found: Array = np.asarray(array)
    if found.dtype.kind not in "fiub":
        raise CaffeError(f"{what} is an array of {found.dtype}; one of real numbers would do")
    _check_axes(found.ndim, what)
    for size in found.shape:
        _axis(size, 64, f"{what}: shape")
    return found


def blob_size(array: Array) -> int:
    """Bytes of the ``BlobProto`` of an array that was :func:`checked`."""
    return len(_head(array)) + array.size * _stored(array).itemsize


def write_blob(file: BinaryIO, number: int, array: Array) -> None:
    """Write an array that was :func:`checked` as a field of type ``BlobProto``, without a copy of all of it."""
    file.write(key(number, BYTES) + encoded_varint(blob_size(array)) + _head(array))
    stored = _stored(array)
    if array.dtype == stored and array.flags.c_contiguous:
        file.write(array.reshape(-1).view(np.uint8).data)
        return
    for start in range(0, array.size, _CHUNK):
        file.write(array.flat[start : start + _CHUNK].astype(stored).view(np.uint8).data)


def _stored(array: Array) -> np.dtype[Any]:
    return _DOUBLE if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else _SINGLE


def _head(array: Array) -> bytes:
    """What stands before the numbers of a blob: its shape, and the key and length of the numbers."""
    shape = length_prefixed(_DIM, b"".join(encoded_varint(size) for size in array.shape))
    stored = _stored(array)
    number = _DOUBLE_DATA if stored == _DOUBLE else _DATA
    return length_prefixed(_SHAPE, shape) + key(number, BYTES) + encoded_varint(array.size * stored.itemsize)
