"""The examples in the docstrings of what reads Caffe's files."""

from __future__ import annotations

import doctest
import importlib

import pytest

PACKAGE = "tilewise.frontends.caffe"
MODULES = ["errors", "schema", *(f"files.{name}" for name in ("nets", "phases", "states", "text", "weights"))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_happens(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"{PACKAGE}.{name}"))
    assert tried
    assert not failed
