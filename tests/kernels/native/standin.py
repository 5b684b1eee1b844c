"""A CUDA driver without a GPU: compiled here, told by tests what to do, asked what it was told."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("standin_driver.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """The library in ``folder``, under the name of the driver."""
    path = folder / "libcuda.so.1"
    assert COMPILER is not None
    named = "-Wl,-soname,libcuda.so.1"
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-pthread", named, str(SOURCE), "-o", str(path)], check=True)
    return path


class _Attribute(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_ubyte * 64))


class _Record(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("context", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32), ("attributes", _Attribute * 4),
        ("bytes", ctypes.c_uint64), ("parameters", ctypes.c_ubyte * 2048),
    )  # fmt: skip


class Told(NamedTuple):
    """What the driver was told of one launch. ``parameters`` are the bytes that it read, one after the other."""

    function: int
    stream: int
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: tuple[tuple[int, bytes], ...]
    parameters: bytes


class Standin:
    """The library, loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        for name in ("launched", "recorded"):
            getattr(self.library, f"standin_{name}").restype = ctypes.c_int64
        for name in ("begin", "fail", "record"):
            getattr(self.library, f"standin_{name}").argtypes = (ctypes.c_int64,) * (2 if name == "fail" else 1)
        self.library.standin_record.restype = ctypes.POINTER(_Record)
        self.library.standin_set_context.argtypes = (ctypes.c_void_p,)
        self.library.standin_context.restype = ctypes.c_void_p
        self._functions: list[Any] = []

    def begin(self, *, record: bool = True) -> None:
        """Forget what was told; from now on only count, unless to ``record``."""
        self.library.standin_begin(int(record))

    def fail(self, status: int, after: int) -> None:
        """Have launches fail with ``status`` once ``after`` of them have been queued."""
        self.library.standin_fail(status, after)

    def function(self, sizes: Sequence[int]) -> int:
        """The handle of a kernel whose parameters have these sizes in bytes."""
        made = (ctypes.c_int64 * 257)(len(sizes), *sizes)
        self._functions.append(made)
        return ctypes.addressof(made)

    @property
    def launched(self) -> int:
        """Launches since :meth:`begin`."""
        return int(self.library.standin_launched())

    def told(self) -> list[Told]:
        """What was recorded since :meth:`begin`."""
        records = (self.library.standin_record(i).contents for i in range(self.library.standin_recorded()))
        return [
            Told(
                r.function, r.stream, r.context, tuple(r.grid), tuple(r.block), r.shared,
                tuple((a.number, bytes(a.value).rstrip(b"\0")) for a in r.attributes[: r.attribute_count]),
                bytes(r.parameters[: r.bytes]),
            )
            for r in records
        ]  # fmt: skip


def words(*values: int) -> bytes:
    """Numbers of eight bytes, one after the other."""
    return struct.pack(f"={len(values)}Q", *values)
