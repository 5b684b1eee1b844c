"""What tilewise says goes to the program's logging, or to stderr where it has none, and can be silenced in both."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tilewise.nn.notices.channel import LOGGER, NothingPlannedWarning, say, warn

ROOT = Path(__file__).parents[3]


CASES: dict[str, list[str]] = {
    "pass": ["tilewise: quiet", "tilewise: loud"],
    "LOGGER.setLevel(logging.WARNING)": ["tilewise: loud"],
    "LOGGER.setLevel(logging.ERROR)": [],
    "logging.disable(logging.INFO)": ["tilewise: loud"],
    "LOGGER.disabled = True": [],
    "logging.basicConfig()": ["WARNING:tilewise:loud"],
    "logging.basicConfig(level=logging.INFO)": ["INFO:tilewise:quiet", "WARNING:tilewise:loud"],
    "LOGGER.addHandler(logging.NullHandler())": [],
}
"""What a program does with its logging, and the lines that it then sees on stderr."""
PROGRAM = """
import logging, os, sys
from tilewise.nn.notices.channel import LOGGER, say

for case in sys.argv[1:]:
    sys.stderr.write(f"# {case}\\n")
    child = os.fork()
    if not child:
        exec(case)
        say("quiet")
        say("loud", level=logging.WARNING)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_program_decides() -> None:
    """In a process of its own, since pytest has set up logging in this one."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CASES], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines() == [line for case, lines in CASES.items() for line in (f"# {case}", *lines)]


def test_what_is_not_to_be_shown_is_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "tilewise"):
        say("100 % done", shown=False)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("tilewise", "100 % done")]
    assert capsys.readouterr().err == ""


def test_no_handler_is_left_on_the_logger() -> None:
    say("something")
    assert LOGGER.handlers == []


def test_a_warning_points_at_the_program() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("nothing", NothingPlannedWarning)
    assert [(one.filename, str(one.message)) for one in caught] == [(__file__, "tilewise: nothing")]
