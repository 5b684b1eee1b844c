"""``tilewise run``: somebody's program, with every convolution in it planned."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import click

from tilewise.cli.program import BadInput, bad_input, one_line
from tilewise.cli.settings import BATCH_SIZES, RIGORS, exclude_option, excluded_names

__all__ = ["command"]


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.option("--workspace", metavar="SIZE", help="Memory limit per kernel beyond operands and result, or none.")
@click.option("--batch-sizes", type=click.Choice(BATCH_SIZES), help="Micro-batches that are tried.")
@click.option("--rigor", type=click.Choice(RIGORS), help="Effort spent on finding plans.")
@click.option("--deterministic", is_flag=True, default=None, help="Only what gives the same bits every time.")
@exclude_option
@click.option("--most-plans", type=click.IntRange(min=0), metavar="N", help="Problems planned at most.")
@click.option("--report", "tell", is_flag=True, help="Print what was planned to stderr when the program ends.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(as_module: bool, tell: bool, script: str, arguments: tuple[str, ...], **given: Any) -> Callable[[], None]:
    """Run SCRIPT with its ARGUMENTS as python would, with tilewise.enable() called first.

    Options left out are taken from TILEWISE_WORKSPACE and the like.
    """
    from tilewise.nn.transparent import enable
    from tilewise.plan import parse_bytes

    if not as_module and not os.path.exists(script):
        raise BadInput(one_line(f"SCRIPT={script!r}: no such file; with -m it may be a module's name"))
    asked = {name: value for name, value in given.items() if value is not None}
    if names := excluded_names(asked.pop("exclude")):  # without any: the environment's
        asked["exclude"] = names
    with bad_input():
        if "workspace" in asked:
            asked["workspace"] = (
                None if asked["workspace"] == "none" else parse_bytes(asked["workspace"], "--workspace")
            )
        session = enable(**asked)

    def run() -> None:
        sys.argv = [script, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(script))
        try:
            if as_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        finally:
            if tell:
                sys.stderr.write(f"{session}\n")

    return run
