"""Which files that a command is given hold an exported model, told by how they begin."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_exported"]

LENGTH_BYTES = 8
MOST_HEADER = 1 << 40
"""A header is shorter. Eight characters of text, read as a number, are more."""


def is_exported(text: str) -> bool:
    """Whether ``text`` names a file that begins as safetensors files do: the length of a header, and then an object.

    It may hold no exported model nevertheless; whoever reads it finds out. A file that cannot be read is none.

    >>> is_exported("alexnet")
    False
    """
    try:
        with Path(text).open("rb") as file:
            begin = file.read(LENGTH_BYTES + 1)
    except (OSError, ValueError):
        return False
    return begin[LENGTH_BYTES:] == b"{" and int.from_bytes(begin[:LENGTH_BYTES], "little") < MOST_HEADER
