"""Files that are mapped into memory, so that reading one takes no memory before its numbers are used."""

from __future__ import annotations

import mmap
import os
import stat
from typing import Any, BinaryIO

import numpy as np

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files.blobs import Array
from tilewise.frontends.caffe.files.wire import Message

__all__ = ["HDF5", "begins_with", "forget", "mapped", "message_of", "opened"]

HDF5 = b"\x89HDF\r\n\x1a\n"
"""What HDF5 files begin with."""


def mapped(path: str | os.PathLike[str]) -> memoryview:
    """The bytes of a file, which cannot be written to. They stay readable as long as anything refers to them.

    The file must not be made shorter meanwhile, or the process ends when it reads what is gone. Replacing it, as
    :func:`~tilewise.machine.files.replacing` does, is safe. Raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` for what is no file or empty, and ``OSError`` where it cannot
    be read.
    """
    with opened(path) as file:
        area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        # Blobs lie in the order in which they are used: the system may read far ahead.
        area.madvise(mmap.MADV_SEQUENTIAL)
    return memoryview(area)


def forget(array: Array) -> None:
    """Give back the memory of the file's pages that an array has brought in. Its numbers can be read again at any time.

    Pages of a file that were read count as memory of the process as long as the system has room. So whoever copies one
    blob after the other needs twice the memory for a while, unless each is forgotten once it is copied. Does nothing
    for arrays that are no views of a mapped file.

    >>> import numpy, tempfile
    >>> from tilewise.frontends.caffe.files import forget, read_weights, write_weights
    >>> path = tempfile.mkdtemp() + "/net.caffemodel"
    >>> write_weights(path, {"ip": [numpy.ones((2, 3), numpy.float32)]})
    >>> blob = read_weights(path)["ip"][0]
    >>> copy = numpy.array(blob)
    >>> forget(blob)
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(owner, mmap.mmap) or not array.size or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = np.frombuffer(owner, np.uint8).ctypes.data
    low, high = (place - first for place in np.lib.array_utils.byte_bounds(array))
    start = low - low % mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, start, high - start)


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A file that is open for reading. Raises what :func:`mapped` does."""
    # Opening a pipe that nobody writes to would wait for ever without the flag.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    what = "is empty" if stat.S_ISREG(status.st_mode) else "is no file"
    raise CaffeError(f"{os.fspath(path)} {what}; a file that Caffe wrote would do")


def begins_with(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Whether a file begins with some bytes. Raises what :func:`mapped` does."""
    with opened(path) as file:
        return file.read(len(mark)) == mark


def message_of(path: str | os.PathLike[str]) -> Message:
    """A whole file as one message. Raises what :func:`mapped` does."""
    buffer = mapped(path)
    return Message(buffer, 0, len(buffer), os.fspath(path))
