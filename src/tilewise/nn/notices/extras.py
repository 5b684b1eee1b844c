"""Says once which optional packages are missing here, what each would bring, and how to install it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from tilewise.nn.notices.channel import say

__all__ = ["EXTRAS", "Extra", "say_missing"]


@dataclass(frozen=True)
class Extra:
    """An optional package: its ``name``, the ``module`` to import, what it ``brings``, and the extra that has it.

    ``device_type`` is the type of device on which it is used.
    """

    device_type: str
    name: str
    module: str
    brings: str
    extra: str

    def __str__(self) -> str:
        return (
            f"{self.name} is not installed. It would bring {self.brings}, which are not tried now. "
            f"Install it by: pip install 'tilewise[{self.extra}]'"
        )


EXTRAS = (
    Extra("cpu", "Numba", "numba", "tilewise's own CPU kernels", "cpu"),
    Extra("cuda", "Triton", "triton", "tilewise's own GPU kernels", "gpu"),
    Extra("cuda", "nvidia-cudnn-frontend", "cudnn", "the other engines of cuDNN", "gpu"),
    Extra("cuda", "cuda-core", "cuda.core", "the kernels in CUDA C++", "gpu"),
)


def say_missing(device_types: Iterable[str], extras: Iterable[Extra] = EXTRAS) -> None:
    """Say which of ``extras`` are missing for devices of these types, each once in a process.

    It is said as a warning of the logger ``tilewise``. Nothing is imported to find it out.
    """
    used = set(device_types)
    for extra in extras:
        if extra.device_type in used:
            _say_once(extra)


_asked: set[Extra] = set()
"""Those that were looked for in this process."""


def _say_once(extra: Extra) -> None:
    """Say that ``extra`` is missing, where it is, the first time that it is looked for."""
    if extra in _asked:
        return
    _asked.add(extra)
    try:
        found = importlib.util.find_spec(extra.module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        found = False
    if not found:
        say(str(extra), level=logging.WARNING)
