"""LMDB databases from lists of images, and their mean images: what Caffe's two tools for data make."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.frontends.caffe.data.database import Records
from tilewise.frontends.caffe.data.images import Colour, encoded, read_image, resized
from tilewise.frontends.caffe.data.records import read_datum
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Conversion", "convert", "mean_image", "write_database"]

FIRST_SIZE = 64 << 20
"""Bytes of address space that a database is opened with; it doubles where that is full."""
TOGETHER = 256
"""Images that are read before they are written."""
COMMITTED = 1000
"""Records that are written in one transaction, as by Caffe's tool."""


@dataclass(frozen=True)
class Conversion:
    """How images become records. ``height`` and ``width`` are 0 where images keep their size.

    With ``encode`` records are encoded images; ``kind`` is what they are (``"png"``), by default what each file is.
    """

    gray: bool = False
    height: int = 0
    width: int = 0
    encode: bool = False
    kind: str = ""
    check_size: bool = False


def convert(
    root: str,
    lines: list[tuple[str, int]],
    path: str,
    how: Conversion,
    skipped: Callable[[str], None],
    done: Callable[[int], None] = lambda count: None,
) -> int:
    """Write an LMDB database of images, and return their number.

    ``lines`` are names, to which ``root`` is put in front, and labels. Keys are the line's number in eight digits, an
    underscore, and the name. A file that is no image is left out, and ``skipped`` is told why; ``done`` is told the
    number of records now and then. The database appears at ``path`` when it is complete.

    Raises ``CaffeError`` where something is at ``path`` already, where no file is an image, where sizes differ with
    ``check_size``, and where the database cannot be written.
    """
    if (how.height > 0) != (how.width > 0) or min(how.height, how.width) < 0:
        raise CaffeError(f"resize_height={how.height} and resize_width={how.width}: both or neither would do")
    if how.kind and how.encode:
        encoded(np.zeros((1, 1, 1), np.uint8), how.kind)  # raises where the kind is unknown

    def record(line: tuple[int, tuple[str, int]]) -> tuple[bytes, bytes, tuple[int, ...]] | str:
        number, (name, label) = line
        try:
            content, shape = _datum(root + name, label, how)
        except CaffeError as error:
            return str(error)
        return f"{number:08d}_{name}".encode("utf-8", "surrogateescape"), content, shape

    def records() -> Iterator[tuple[bytes, bytes]]:
        first: tuple[int, ...] | None = None
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            numbered = iter(enumerate(lines))
            while group := list(itertools.islice(numbered, TOGETHER)):
                for made in threads.map(record, group):
                    if isinstance(made, str):
                        skipped(made)
                        continue
                    key, content, shape = made
                    first = first or shape
                    if how.check_size and shape != first:
                        text = f"{key.decode('utf-8', 'replace')}: is {shape}, but the first image {first}"
                        raise CaffeError(f"{text}; -resize_height and -resize_width would do")
                    yield key, content

    return write_database(path, records(), done)


def _datum(path: str, label: int, how: Conversion) -> tuple[bytes, tuple[int, ...]]:
    """A serialised ``Datum`` of an image file, and the image's shape."""
    from tilewise.frontends.caffe.schema import Datum

    colour: Colour = "gray" if how.gray else "color"
    pixels = read_image(Path(path), colour, "image")
    if how.height:
        pixels = resized(pixels, how.height, how.width)
    shape = tuple(map(int, pixels.shape))
    if not how.encode:
        made = Datum(channels=shape[0], height=shape[1], width=shape[2], data=pixels.tobytes(), label=label)
        return bytes(made.SerializeToString()), shape
    ending = os.path.splitext(path)[1].lstrip(".").lower()
    kind = how.kind.lower().lstrip(".") or ending
    # A file that is what is asked for already is taken as it is, so that a JPEG loses nothing.
    same = not how.height and not how.gray and kind == ending
    content = Path(path).read_bytes() if same else encoded(pixels, kind)
    return bytes(Datum(data=content, label=label, encoded=True).SerializeToString()), shape


def write_database(path: str, records: Iterable[tuple[bytes, bytes]], done: Callable[[int], None]) -> int:
    """Write keys, in ascending order, and contents to a new LMDB database. Returns their number.

    Raises ``CaffeError`` where something is at ``path`` already, where there are no records, and where it cannot be
    written.
    """
    import lmdb

    target = Path(path)
    if os.path.lexists(target):
        raise CaffeError(f"{path}: is there already; another name, or removing it, would do")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        try:
            environment = lmdb.open(str(partial), map_size=FIRST_SIZE, sync=False)
            count = _filled(environment, records, done)
            environment.sync(True)
            environment.close()
            if not count:
                raise CaffeError(f"{path}: there is nothing to write; a list with at least one image would do")
            os.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, lmdb.Error) as error:
        raise CaffeError(f"{path}: cannot be written: {error}; room, and a folder to write in, would do") from error
    return count


def _filled(environment: Any, records: Iterable[tuple[bytes, bytes]], done: Callable[[int], None]) -> int:
    """Write all records, group by group."""
    count = 0
    rest = iter(records)
    while group := list(itertools.islice(rest, COMMITTED)):
        _commit(environment, group)
        count += len(group)
        done(count)
    return count


def _commit(environment: Any, group: list[tuple[bytes, bytes]]) -> None:
    """Write a group of records in one transaction, with more address space where it is full."""
    import lmdb

    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, content in group:
                    if not transaction.put(key, content, append=True):
                        raise CaffeError(f"key {key!r} comes twice or out of order; keys in ascending order would do")
            return
        except lmdb.MapFullError:
            environment.set_mapsize(environment.info()["map_size"] * 2)


def mean_image(path: str, done: Callable[[int], None] = lambda count: None) -> npt.NDArray[np.float32]:
    """The mean of all images of an LMDB database, float32 of shape (channels, height, width).

    Raises ``CaffeError`` for a database that cannot be read, and where its images differ in size.
    """
    total: npt.NDArray[np.float64] | None = None
    count = 0
    for key, content in Records(path):
        where = f"{path}: record {key!r}"
        _, pixels = read_datum(content, "own", where)
        if total is None:
            total = np.zeros(pixels.shape, np.float64)
        if pixels.shape != total.shape:
            text = f"{where}: is {pixels.shape}, but the first image {total.shape}"
            raise CaffeError(f"{text}; convert-imageset with -resize_height and -resize_width would do")
        total += pixels
        count += 1
        done(count)
    assert total is not None  # Records raises for a database without any
    return (total / count).astype(np.float32)
