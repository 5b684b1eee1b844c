"""Becoming a user without an entry, in a process that root started: one who may still read what Python needs."""

from __future__ import annotations

import ctypes
import os

__all__ = ["OTHER", "become"]

OTHER = 54321
PR_SET_KEEPCAPS, CAP_DAC_READ_SEARCH, VERSION = 8, 2, 0x20080522


def become(user: int = OTHER) -> None:
    """From now on this process is ``user``, and of root's rights has that of reading alone (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    rights = 1 << CAP_DAC_READ_SEARCH
    data = (ctypes.c_uint32 * 6)(rights, rights, 0, 0, 0, 0)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
