"""Missing packages are named once, with what they would bring and the command."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tilewise.nn.notices.extras import EXTRAS, Extra, say_missing

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_what_is_missing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    missing = Extra("cpu", "Nothing", "no_such_package_anywhere", "kernels of nobody", "cpu")
    inside = Extra("cpu", "Inside", "no_such_package_anywhere.inner", "more of them", "cpu")
    elsewhere = Extra("cuda", "Elsewhere", "no_such_package_either", "other kernels", "gpu")
    there = Extra("cpu", "Python", "json", "what is there", "cpu")
    for _ in range(2):
        say_missing(["cpu"], [missing, inside, elsewhere, there])
    assert [record.getMessage() for record in caplog.records] == [str(missing), str(inside)]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert str(missing) == (
        "Nothing is not installed. It would bring kernels of nobody, which are not tried now. "
        "Install it by: pip install 'tilewise[cpu]'"
    )


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.name)
def test_the_command_installs_it(extra: Extra) -> None:
    """The extra that is named has the package."""
    text = PROJECT.read_text("utf-8")
    found = re.search(rf"^{extra.extra} = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert f'"{extra.name.lower()}' in found[1]
