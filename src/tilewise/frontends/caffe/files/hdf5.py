"""Weights and a solver's history in HDF5, as Caffe lays them out.

A model has the group ``data``, in it a group for each layer, and in that a dataset for each blob, named by its index. A
solver's state has the datasets ``iter``, ``learned_net`` and ``current_step`` and the group ``history``.

What is read lies in the file itself: links to other files and datasets that are kept in other files are refused.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.blobs import MOST_AXES, Array
from tilewise.frontends.caffe.files.mapped import mapped, opened
from tilewise.machine.files import replacing

__all__ = ["read_history_h5", "read_weights_h5", "write_datasets_h5", "write_history_h5", "write_weights_h5"]

MOST_OBJECTS = 100_000
"""Groups and datasets of a file at most."""
MOST_BLOBS = 1000
"""Blobs of a layer at most."""
LARGEST_GROWTH = 16
"""How many times larger than the file a compressed dataset may be. Caffe's are not compressed."""


def read_weights_h5(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The blobs of each layer that has some, by the layer's name: views of the mapped file where they are not packed.

    Where a layer shares a blob with another, Caffe leaves it out, and its place has ``None``. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError`.
    """
    with _read(path) as file:
        weights: dict[str, list[Any]] = {}
        for name, index, dataset in file.blobs("data", nested=True):
            blobs = weights.setdefault(name, [])
            blobs.extend([None] * (index + 1 - len(blobs)))
            blobs[index] = file.array(dataset, f"blob {index} of layer {name!r}")
        return weights


def read_history_h5(path: str | os.PathLike[str]) -> tuple[int, str, int, list[Array]]:
    """``iter``, ``learned_net``, ``current_step`` and the history's blobs of a solver's state.

    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError`.
    """
    with _read(path) as file:
        found = {index: file.array(dataset, f"history {index}") for _, index, dataset in file.blobs("history")}
        if sorted(found) != list(range(len(found))):
            raise CaffeError(f"{file.source}: history has the blobs {sorted(found)}; all from 0 on would do")
        history = [found[index] for index in range(len(found))]
        return file.number("iter"), file.text("learned_net"), file.number("current_step"), history


def write_weights_h5(
    path: str | os.PathLike[str], weights: Mapping[str, Sequence[Array]], layers: Iterable[str] = ()
) -> None:
    """Write blobs, which must have been checked. ``layers`` get a group each, also those without blobs."""
    for name in (*layers, *weights):
        if any(part in {"", "."} for part in name.split("/")):
            raise CaffeError(f"layer {name!r} has no name that HDF5 can keep; letters, digits and _ would do")
    with replacing(path, CaffeError) as partial, _written(partial) as file:
        data = file.create_group("data")
        for name in dict.fromkeys([*layers, *weights]):
            group = data.require_group(name)
            for index, blob in enumerate(weights.get(name, ())):
                group.create_dataset(str(index), data=_stored(blob))


def write_datasets_h5(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Write arrays as the datasets of their names. An existing file stays until the new one is complete."""
    with replacing(path, CaffeError) as partial, _written(partial) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=_stored(array))


def write_history_h5(
    path: str | os.PathLike[str], iteration: int, learned_net: str, step: int, history: Sequence[Array]
) -> None:
    """Write a solver's state. The blobs must have been checked."""
    with replacing(path, CaffeError) as partial, _written(partial) as file:
        file.create_dataset("iter", data=np.array([iteration], np.int32))
        if learned_net:
            # With a zero at the end: Caffe reads it as text of C.
            text = learned_net.encode("utf-8") + b"\0"
            file.create_dataset("learned_net", data=np.array(text, f"S{len(text)}"), dtype=f"S{len(text)}")
        file.create_dataset("current_step", data=np.array([step], np.int32))
        group = file.create_group("history")
        for index, blob in enumerate(history):
            group.create_dataset(str(index), data=_stored(blob))


def _stored(blob: Array) -> Array:
    return blob.astype("<f8" if blob.dtype.kind == "f" and blob.dtype.itemsize >= 8 else "<f4", copy=False)


@contextlib.contextmanager
def _written(path: os.PathLike[str]) -> Iterator[Any]:
    """An HDF5 file in memory, which is written to ``path`` at the end.

    HDF5 itself never sees the disk: when a write fails, as on a full disk, its library may end the process while it
    closes the file.
    """
    import h5py

    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        yield file
    with open(path, "wb") as written:
        written.write(memory.getbuffer())


class _File:
    """An HDF5 file that is open, and the same file in memory."""

    def __init__(self, file: Any, buffer: memoryview, source: str) -> None:
        self.file, self.buffer, self.source = file, buffer, source
        self.seen = 0

    def blobs(self, group: str, nested: bool = False) -> Iterator[tuple[str, int, Any]]:
        """The datasets of a group that are named by a number: the path of their group, the number, and the dataset."""
        import h5py

        top = self.own(self.file, group)
        if not isinstance(top, h5py.Group):
            raise CaffeError(f"{self.source} has no group {group!r}; a file that Caffe wrote would do")
        waiting = [("", top)]
        while waiting:
            path, place = waiting.pop()
            for name in place:
                found = self.own(place, name)
                if isinstance(found, h5py.Dataset) and name.isascii() and name.isdecimal() and int(name) < MOST_BLOBS:
                    yield path, int(name), found
                elif isinstance(found, h5py.Group) and nested:
                    waiting.append((f"{path}/{name}" if path else name, found))

    def own(self, group: Any, name: str) -> Any:
        """What has a name in a group, if it is in this file, and ``None`` where there is nothing."""
        import h5py

        self.seen += 1
        if self.seen > MOST_OBJECTS:
            raise CaffeError(f"{self.source} has over {MOST_OBJECTS} groups and datasets; fewer would do")
        link = group.get(name, getlink=True)
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise CaffeError(f"{self.source}: {group.name}/{name} is a link to something else; its own data would do")
        return group.get(name)

    def array(self, dataset: Any, what: str) -> Array:
        """The numbers of a dataset: a view of the file, or a copy where they are packed."""
        import h5py

        name = f"{self.source}: {what}"
        shape, dtype = dataset.shape, dataset.dtype
        if shape is None or dtype.kind != "f" or len(shape) > MOST_AXES:
            raise CaffeError(
                f"{name} is {dtype} with the shape {shape}; real numbers of up to {MOST_AXES} axes would do"
            )
        properties = dataset.id.get_create_plist()
        if properties.get_external_count() or properties.get_layout() == h5py.h5d.VIRTUAL:
            raise CaffeError(f"{name} is kept in another file; its own data would do")
        size, offset = math.prod(shape) * dtype.itemsize, dataset.id.get_offset()
        if offset is not None and not self.file.userblock_size and properties.get_layout() == h5py.h5d.CONTIGUOUS:
            if offset + size > len(self.buffer):
                raise CaffeError(f"{name} ends after the file does; a whole file would do")
            array: Array = np.ndarray(shape, dtype, self.buffer, offset)
        elif size > LARGEST_GROWTH * len(self.buffer):
            raise CaffeError(
                f"{name} has {size} bytes in a file of {len(self.buffer)}; data without compression would do"
            )
        else:
            array = np.asarray(dataset[()], dtype)
        array.flags.writeable = False
        return array

    def number(self, name: str) -> int:
        """A dataset that is one whole number."""
        found = self.own(self.file, name)
        if getattr(found, "size", None) != 1 or found.dtype.kind not in "iu":
            raise CaffeError(f"{self.source} has no whole number {name!r}; a solver's state would do")
        return int(np.asarray(found[()]).reshape(-1)[0])

    def text(self, name: str) -> str:
        """A dataset that is one text, and nothing where there is none."""
        found = self.own(self.file, name)
        if found is None:
            return ""
        if getattr(found, "size", None) != 1 or found.dtype.kind != "S" or found.dtype.itemsize > 1 << 16:
            raise CaffeError(f"{self.source}: {name} is no text; a solver's state would do")
        return bytes(np.asarray(found[()]).reshape(-1)[0]).partition(b"\0")[0].decode("utf-8", "replace")


@contextlib.contextmanager
def _read(path: str | os.PathLike[str]) -> Iterator[_File]:
    import h5py

    source = os.fspath(path)
    with opened(path) as file:
        buffer = mapped(path)
        try:
            with h5py.File(file, "r") as found:
                yield _File(found, buffer, source)
        except CaffeError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            # h5py raises these for files that are damaged, whatever the damage is.
            raise CaffeError(f"{source} is no sound HDF5 file: {error}; a file that Caffe wrote would do") from error
