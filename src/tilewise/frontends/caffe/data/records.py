"""Batches of a ``Data`` layer: records of an LMDB database, each a ``Datum`` of pixels or of an encoded image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.frontends.caffe.data.database import Records, close_all
from tilewise.frontends.caffe.data.draws import crops, seed_of, skipped
from tilewise.frontends.caffe.data.images import Colour, decoded
from tilewise.frontends.caffe.data.transform import Transform, colour_of
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["RecordBatches", "pixels_of", "read_datum"]

Array = npt.NDArray[Any]


class RecordBatches:
    """All batches of a ``Data`` layer, by number.

    ``tops`` is 1 or 2: images, and their labels. Record ``i`` of batch ``n`` is record ``n * batch_size + i`` of the
    database, which begins again at its end. Every share of several takes each ``count``-th record from the ``rank``-th
    on, as each of Caffe's GPUs does.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the layer and the record.
    """

    def __init__(self, layer: Any, training: bool, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.name = f"layer {layer.name!r}"
        parameters = layer.data_param
        if not parameters.source:
            raise CaffeError(f"{self.name}: data_param has no source; the path of an LMDB database would do")
        if parameters.batch_size < 1:
            raise CaffeError(f"{self.name}: batch_size: {parameters.batch_size}; 1 or more would do")
        self.size, self.labels, self.seed, self.share = int(parameters.batch_size), len(layer.top) > 1, seed, share
        self.training, self.layer = training, layer.name
        self.most_skipped = int(parameters.rand_skip)
        _check_backend(parameters, self.name)
        self.records = Records(parameters.source)
        transform = layer.transform_param
        if parameters.HasField("mean_file") or parameters.crop_size or parameters.mirror or parameters.scale != 1:
            raise CaffeError(
                f"{self.name}: mean_file, crop_size, mirror or scale in data_param; transform_param would do"
            )
        self.transform = Transform(transform, training, self.name)
        self.colour = colour_of(transform, self.name, "color" if parameters.force_encoded_color else "own")
        key, content = self.records.get(0)
        _, pixels = self._record(key, content)
        self.image = self.transform.size(pixels.shape, self._told(key))
        self.channels = pixels.shape[0]
        shapes: tuple[tuple[int, ...], ...] = ((self.size, *self.image), (self.size,))
        self.shapes = shapes[: 1 + self.labels]

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``: images of shape (batch, channels, height, width), and labels of shape (batch,)."""
        rank, count = self.share
        draws = crops(self._own_seed(), number * count + rank, self.size)
        images = np.empty((self.size, *self.image), np.float32)
        labels = np.empty(self.size, np.float32)
        for place in range(self.size):
            key, content = self.records.get(self._record_at(number, place))
            label, pixels = self._record(key, content)
            if self.transform.size(pixels.shape, self._told(key)) != self.image:
                raise CaffeError(self._mixed(key, pixels))
            self.transform.put(pixels, images[place], draws[place])
            labels[place] = label
        found = (torch.from_numpy(images), torch.from_numpy(labels))
        return found[: 1 + self.labels]

    def told(self, number: int) -> str:
        """The records of batch ``number``, by their numbers."""
        first, last = self._record_at(number, 0), self._record_at(number, self.size - 1)
        return f"records {first} to {last} of {self.records.path}"

    def release(self) -> None:
        """Close the database before a fork."""
        close_all()

    def _record_at(self, number: int, place: int) -> int:
        """The number of the record that batch ``number`` has at a place."""
        rank, count = self.share
        first = skipped(self._own_seed(), self.most_skipped)
        return (first + (number * self.size + place) * count + rank) % len(self.records)

    def _own_seed(self) -> int:
        return seed_of(self.seed, self.layer, "train" if self.training else "test")

    def _told(self, key: str) -> str:
        """A record, for messages."""
        return f"{self.records.path}: record {key!r}"

    def _record(self, key: str, content: bytes) -> tuple[int, Array]:
        """Label and pixels of a record."""
        return read_datum(content, self.colour, f"{self.name}: {self._told(key)}")

    def _mixed(self, key: str, pixels: Array) -> str:
        """What is wrong about a record of another size, and what would do."""
        here, first = "x".join(map(str, pixels.shape)), "x".join(map(str, self.image))
        text = f"{self.name}: {self._told(key)} is {here}, but batches of this layer are {first}"
        if pixels.shape[0] != self.channels:
            return f"{text}; force_color or force_gray would do"
        return f"{text}; a crop_size, or convert-imageset with -resize_height and -resize_width, would do"


def read_datum(content: bytes, colour: Colour, where: str) -> tuple[int, Array]:
    """Label and pixels of a serialised ``Datum``; pixels are uint8 or float32 of shape (channels, height, width).

    Raises ``CaffeError`` that begins with ``where`` for what is no ``Datum``, and for one whose sizes are not those of
    its data.
    """
    from google.protobuf.message import DecodeError

    from tilewise.frontends.caffe.schema import Datum

    datum = Datum()
    try:
        datum.ParseFromString(content)
    except DecodeError as error:
        raise CaffeError(f"{where}: is no Datum ({error}); a database by convert-imageset would do") from error
    return int(datum.label), pixels_of(datum, colour, where)


def pixels_of(datum: Any, colour: Colour, where: str) -> Array:
    """The pixels of a ``Datum``, decoded where it says that they are encoded."""
    if datum.encoded:
        return decoded(datum.data, colour, where)
    if colour != "own" and datum.channels != {"color": 3, "gray": 1}[colour]:
        raise CaffeError(
            f"{where}: force_color and force_gray need encoded records; convert-imageset -encoded would do"
        )
    shape = (datum.channels, datum.height, datum.width)
    wanted = shape[0] * shape[1] * shape[2]
    if datum.data:
        values: Array = np.frombuffer(datum.data, dtype=np.uint8)
    else:
        values = np.asarray(datum.float_data, dtype=np.float32)
    if min(shape) < 1 or len(values) != wanted:
        text = f"says {'x'.join(map(str, shape))}, which is {wanted} values, but has {len(values)}"
        raise CaffeError(f"{where}: {text}; equal numbers, not 0, would do")
    return values.reshape(shape)


def _check_backend(parameters: Any, name: str) -> None:
    """Raise for LevelDB, which is also what a file means that names no backend."""
    backend = parameters.DESCRIPTOR.fields_by_name["backend"].enum_type.values_by_number[parameters.backend].name
    if backend != "LMDB":
        text = f"backend: {backend} of {parameters.source} is not read (it is what Caffe takes where none is named)"
        raise CaffeError(f"{name}: {text}; an LMDB database with backend: LMDB would do")
