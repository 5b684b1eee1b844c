"""Python's own random numbers, kept as they were. Those of NumPy and torch are in :mod:`.random_states`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["python_kept"]


@contextmanager
def python_kept() -> Iterator[None]:
    """Put the state of Python's ``random`` back at the end of the block. This imports neither NumPy nor torch."""
    before = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
