"""Which compiled kernels this process has loaded or made, by their names on disk: a pack can be made of them."""

from __future__ import annotations

import base64

__all__ = ["note", "noted", "triton_entry"]

MOST = 1 << 16
"""Most names that are remembered: far more kernels than a process holds."""


def note(name: str) -> None:
    """Remember a kernel: the folder of its kind and its file or entry there, such as ``cpu/moves_8-0123.o``."""
    if len(_noted) < MOST:
        _noted[name] = None


def noted() -> tuple[str, ...]:
    """All names that were remembered, in the order in which the kernels were first asked for."""
    return tuple(_noted)


def triton_entry(key: str) -> str:
    """The folder of Triton's cache that keeps the kernel whose hash is ``key``, 64 hexadecimal digits.

    Raises ``ValueError`` for what is no hexadecimal number.
    """
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


_noted: dict[str, None] = {}
"""The names in order."""
