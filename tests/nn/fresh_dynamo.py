"""A fixture for modules whose tests compile: import it, and each of their tests begins and ends without graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

__all__ = ["fresh_dynamo"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget what Dynamo has compiled, before a test and behind it."""
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # pytest would format every record of it
    yield
    torch._dynamo.reset()
