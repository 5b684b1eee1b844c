"""``tilewise run``: somebody's program, with every convolution and linear layer in it planned."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tilewise.cli.given.early import check_solvers
from tilewise.cli.helped import Helped
from tilewise.cli.program import BadInput, one_line
from tilewise.cli.settings import enabling_options, excluded_names, sharing_devices, workspace_bytes

__all__ = ["command"]

PACKAGE = Path(__file__).parents[1]
STARTUP = Path(__file__).parent / "startup"
TOLD = "TILEWISE_RUN"
"""The variable by which ``startup/sitecustomize.py`` is told what to do."""
ISOLATION = "IEPs"
"""Options of Python that launchers of commands are installed with, for their own sake."""

JOINED = re.compile(r"([^WXmc]*)([WXmc]?)(.*)", re.DOTALL)
"""Letters of options, one that ends them, and its argument."""


EXAMPLES = (
    ("tilewise run train.py --epochs 2", "Run a program with its layers planned, in the background."),
    ("tilewise run --report --wait -m package.train", "Plan before it goes on, and say what was planned at the end."),
)


@click.command(
    "run",
    cls=Helped,
    examples=EXAMPLES,
    short_help="Run a program with its layers planned.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@enabling_options
@click.option("--report", "tell", is_flag=True, help="Print what was planned to stderr when the program ends.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(as_module: bool, tell: bool, script: str, arguments: tuple[str, ...], **given: Any) -> Callable[[], None]:
    """Run SCRIPT with its ARGUMENTS as python would, with tilewise.enable() called first.

    SCRIPT may be all that python takes: a file, a directory or zip file with a __main__.py, or - for stdin. Options
    left out are taken from TILEWISE_WORKSPACE and the like.
    """
    if not as_module and script != "-":
        if not os.path.exists(script):
            raise BadInput(one_line(f"SCRIPT={script!r}: no such file; with -m it may be a module's name"))
        if script.startswith("-"):
            raise BadInput(one_line(f"SCRIPT={script!r}: python takes it for an option; ./{script} would do"))
    check_solvers("--exclude", given["exclude"])
    options = {name: value for name, value in given.items() if value is not None}
    if names := excluded_names(options.pop("exclude")):  # without any: the environment's
        options["exclude"] = names
    if names := sharing_devices(options.pop("share_with")):
        options["share_with"] = names
    if "workspace" in options:
        options["workspace"] = workspace_bytes(options["workspace"])
    flags = python_options()
    startup = {"path": os.environ.get("PYTHONPATH"), "root": str(PACKAGE.parent), "options": options, "tell": tell}
    # Without an entry of its own PYTHONPATH would mean the current directory as well.
    places = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": places, TOLD: json.dumps(startup)}
    words = [sys.executable, *flags, *(["-m"] if as_module else []), script, *arguments]

    def run() -> None:
        # Another Python in this process's place: whatever the program asks of its start has Python's own answer.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, words, variables)

    return run


def python_options() -> list[str]:
    """Those of this Python that the program's is to have. Raises ``BadInput`` for one by which it could not start."""
    if not sys.executable:
        raise BadInput("this Python does not know its own executable (sys.executable), by which it would start SCRIPT")
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    options = options_before(sys.orig_argv[1:], "" if main is not None else ISOLATION)
    refused = {"I": sys.flags.isolated, "E": sys.flags.ignore_environment, "S": sys.flags.no_site}
    for letter in [letter for letter, given in refused.items() if given and main is not None]:
        text = f"python -{letter}: the program's Python is told by PYTHONPATH and site, which it would not read"
        raise BadInput(f"{text}; python -P -s -m tilewise run would do")
    return options


def options_before(words: list[str], without: str) -> list[str]:
    """Python's own options at the head of its command line, less the letters ``without``.

    By Python's grammar: letters may be joined, ``W``, ``X`` and ``--check-hash-based-pycs`` take an argument, and
    ``-m``, ``-c`` or a file name ends them.
    """
    options: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--check-hash-based-pycs":
            options += [word, next(rest, "")]
        elif word.startswith("--"):
            options.append(word)
        elif not word.startswith("-") or word == "-":
            break
        else:
            joined = JOINED.fullmatch(word[1:])
            assert joined is not None  # it matches all text
            letters, takes, argument = joined.groups()
            ends = takes in ("m", "c")
            kept = "".join(letter for letter in letters if letter not in without)
            kept += "" if ends else takes + argument
            if kept:
                options.append(f"-{kept}")
            if ends:
                break
            if takes and not argument:
                options.append(next(rest, ""))
    return options
