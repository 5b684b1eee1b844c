"""The heap of a CPU's process: which allocator it has, and handing its free pages back.

On a CPU, memory that a call takes is seen as growth of the resident set. Pages that are free yet resident would hide
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["AllocatorError", "drop_end", "filled", "glibc", "hand_back", "releasing", "version"]

PAGE = mmap.PAGESIZE
LARGEST, SMALLEST = 2**25, 2**14
"""Sizes of the blocks by which an arena's end is found: what glibc takes from heaps at most (larger blocks are mappings
of their own), and a few pages."""
IN_OTHER_ARENA = 4
"""The bit in a block's size, in the word before it, by which glibc's free() knows arenas other than the main one."""
M_PERTURB, FILL = -6, 0x55
"""glibc's option to fill blocks as they are handed out and given back, and the byte to fill them with."""
SETTINGS = "MALLOC_PERTURB_", "GLIBC_TUNABLES"
"""Environment variables that set this option from the process's start."""
ALL_ARENAS = b"arena.4096.purge"
"""jemalloc's name for handing back what is free in all of its arenas (``MALLCTL_ARENAS_ALL``)."""


class AllocatorError(RuntimeError):
    """The process does not use glibc's allocator; the message says which one it uses."""


class _Symbol(ctypes.Structure):
    """The C structure ``Dl_info``, which ``dladdr`` fills in."""

    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]  # fmt: skip


def glibc() -> ctypes.CDLL:
    """The C library, if it is glibc and its allocator is the one in use; :class:`AllocatorError` otherwise."""
    if not sys.platform.startswith("linux"):
        raise AllocatorError(f"{sys.platform} does not have glibc")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        raise AllocatorError("this system's C library is another")
    if _file(libc, libc.malloc) != _file(libc, libc.gnu_get_libc_version):
        raise AllocatorError(f"this process's is {_file(libc, libc.malloc)}")
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc


def _file(libc: ctypes.CDLL, function: Any) -> str:
    """The path of the library that defines a function."""
    symbol = _Symbol()
    libc.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return os.fsdecode(symbol.file or b"another library")


def version() -> str:
    """The version of glibc."""
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    return os.fsdecode(libc.gnu_get_libc_version())


def hand_back() -> None:
    """Give free pages of the heap back to the system. Does nothing for an allocator that cannot."""
    try:
        release = releasing()
    except AllocatorError:
        return
    release()


def releasing() -> Callable[[], None]:
    """A function that gives free pages back to the system, for glibc, jemalloc or tcmalloc.

    Raises :class:`AllocatorError` for other allocators.
    """
    try:
        return functools.partial(_release_glibc, glibc())
    except AllocatorError:
        if not sys.platform.startswith("linux"):
            raise
        libc = ctypes.CDLL(None)
        source = _file(libc, libc.malloc)
        for name, release in (("mallctl", _release_jemalloc), ("MallocExtension_ReleaseFreeMemory", _release_tcmalloc)):
            if hasattr(libc, name) and _file(libc, libc[name]) == source:
                return functools.partial(release, libc)
        raise


@contextmanager
def filled() -> Iterator[None]:
    """Have glibc write to each block as it hands it out, so that all pages of the block are resident.

    Otherwise a block that nobody writes would not show. Does nothing for other allocators, where the process was
    started with that option, or in threads with an arena of their own: there glibc would also write over free memory at
    the end of a full heap, which nobody took.
    """
    try:
        libc = glibc()
    except AllocatorError:
        libc = None
    named = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    if libc is None or _in_other_arena(libc) or any("perturb" in text.lower() for text in named):
        yield
        return
    libc.mallopt(M_PERTURB, FILL)
    try:
        yield
    finally:
        libc.mallopt(M_PERTURB, 0)


def _release_jemalloc(libc: ctypes.CDLL) -> None:
    """Hand back what is free in all of jemalloc's arenas."""
    for name in (b"thread.tcache.flush", ALL_ARENAS):
        libc.mallctl(name, None, None, None, ctypes.c_size_t(0))


def _release_tcmalloc(libc: ctypes.CDLL) -> None:
    """Hand back what is free in tcmalloc's heap."""
    libc.MallocExtension_ReleaseFreeMemory()


def _release_glibc(libc: ctypes.CDLL) -> None:
    """Hand back free pages of all of glibc's arenas, and of the end of this thread's.

    ``malloc_trim`` skips the end of every arena but the main one. Threads have such arenas, and so has the main thread
    once an allocation failed.
    """
    libc.malloc_trim(0)
    if _in_other_arena(libc):
        _drop_end(libc)


def drop_end() -> None:
    """Hand back the free pages at the end of the calling thread's arena. Does nothing for allocators but glibc's."""
    with contextlib.suppress(AllocatorError):
        libc = glibc()
        if _in_other_arena(libc):
            _drop_end(libc)


def _in_other_arena(libc: ctypes.CDLL) -> bool:
    """Whether this thread's blocks come from an arena other than the main one."""
    block = libc.malloc(SMALLEST)
    try:
        size = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
        return bool(size & IN_OTHER_ARENA)
    finally:
        libc.free(block)


def _drop_end(libc: ctypes.CDLL) -> None:
    """Drop the free pages at the end of this thread's arena, through blocks that are taken from there and never read.

    The heap takes from its end what no free block inside can hold. So blocks of halving sizes are taken until all of
    the end is found, each size again as long as its pages were resident. They are held meanwhile, or the same block
    would be given again.
    """
    held = []
    size = LARGEST
    while size >= SMALLEST:
        block = libc.malloc(size)
        if not block:
            break
        held.append(block)
        start = -(-block // PAGE) * PAGE
        length = (block + size - start) // PAGE * PAGE
        pages = ctypes.create_string_buffer(length // PAGE)
        libc.mincore(start, length, pages)
        if any(pages.raw):
            libc.madvise(start, length, mmap.MADV_DONTNEED)
        else:
            size //= 2
    for block in held:
        libc.free(block)
