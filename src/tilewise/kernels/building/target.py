"""Compiling GPU kernels for a machine that is not this one: no GPU is needed, and nothing compiled is loaded.

Within :func:`compiling_for` solvers are bound to tensors without memory (device ``meta``). What binding compiles is
kept where it always is, under the keys that a machine with such a GPU asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Architecture", "architecture_of", "compiling_for", "sought"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU's compute capability, such as 9.0.

    >>> Architecture(9, 0).name, Architecture(9, 0).instructions
    ('sm_90', 'sm_90a')
    """

    major: int
    minor: int

    @property
    def name(self) -> str:
        """The name by which users and packs call it."""
        return f"sm_{self.major}{self.minor}"

    @property
    def instructions(self) -> str:
        """The name by which kernels in CUDA C++ are compiled.

        From 9.0 on with the architecture's own instructions, which no other version runs: neither does the code for
        plain ``sm_90``.
        """
        return f"{self.name}a" if self.major >= 9 else self.name

    @classmethod
    def named(cls, name: str) -> Architecture:
        """The architecture called ``name``. Raises ``ValueError`` for what is no name of one."""
        digits = name.removeprefix("sm_")
        if not name.startswith("sm_") or not digits.isascii() or not digits.isdecimal() or not 2 <= len(digits) <= 3:
            raise ValueError(f"{name!r} is no GPU architecture; sm_ and a compute capability, such as sm_90, would do")
        return cls(int(digits[:-1]), int(digits[-1]))


def architecture_of(device: torch.device) -> Architecture:
    """The architecture of a GPU that is here."""
    return Architecture(*torch.cuda.get_device_capability(device))


_sought: Architecture | None = None


def sought() -> Architecture | None:
    """The architecture that is compiled for, on whatever machine; ``None`` where kernels are for the GPU here."""
    return _sought


@contextlib.contextmanager
def compiling_for(architecture: Architecture) -> Iterator[None]:
    """Within the block the whole process compiles GPU kernels for ``architecture`` and loads none.

    Raises ``ImportError`` where Triton is not installed.
    """
    global _sought
    from triton.runtime import driver

    before, _sought = _sought, architecture
    active = getattr(driver, "_active", None)  # asked for by its proper name, one would be looked for
    driver.set_active(_Driver(architecture))
    try:
        yield
    finally:
        _sought = before
        driver.set_active(active)


class _Driver:
    """What Triton's launcher asks of a driver before it compiles."""

    def __init__(self, architecture: Architecture) -> None:
        self._capability = 10 * architecture.major + architecture.minor

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """A number that no GPU has: launchers keep what they compiled by it."""
        return -self._capability

    @staticmethod
    def get_current_stream(device: int) -> int:
        """The default stream."""
        return 0
