"""``tilewise report``: a schedule as one HTML page."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from tilewise.cli.helped import Helped
from tilewise.cli.program import BadInput, bad_input
from tilewise.frontends.names import CHECKPOINTS
from tilewise.machine.files import whole_file
from tilewise.plan import format_bytes

__all__ = ["command"]

WOULD_DO = "what 'tilewise plan NET --json', 'time NET --json' or 'advise KIND ... --json' prints would do"
"""The documents that are shown, for messages about other files."""
LARGEST = 64 * 2**20
"""Bytes of a document that is read; one of a large network with everything that was tried has a few million."""


EXAMPLES = (
    ("tilewise report net.json", "Write net.html beside what 'tilewise time NET --json' printed."),
    ("tilewise plan alexnet --json | tilewise report - -o net.html", "From one command into the next."),
)


@click.command("report", cls=Helped, examples=EXAMPLES, short_help="Make an HTML page of a document.")
@click.argument("schedule", metavar="SCHEDULE", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Where the page goes, '-' for stdout.  [default: SCHEDULE's name with .html]",
)
def command(schedule: Path, output: Path | None) -> None:
    """Write SCHEDULE, a document of 'tilewise plan --json', 'time --json' or 'advise --json', as one HTML page.

    The page of a schedule shows what was planned and gained, each plan and what was tried, micro-batches, fronts of
    time against workspace, memory and budgets. That of advice shows what to pick, why, and curves of TFLOP/s. A page
    asks the network for nothing and can be sent to anybody. SCHEDULE '-' is stdin.
    """
    name = "stdin" if str(schedule) == "-" else str(schedule)
    if schedule.is_dir():
        raise BadInput(f"SCHEDULE: {name!r} is a folder; a document of 'tilewise plan NET --json' would do")
    with bad_input(f"SCHEDULE: {name!r}"):
        document = _parsed(_read(schedule, name), schedule)
        if output is None:
            output = Path("-") if name == "stdin" else schedule.with_suffix(".html")
        if output == schedule and name != "stdin":
            raise BadInput(f"-o: {str(output)!r} is SCHEDULE itself; another name would do")
        from tilewise.report.page import page  # imports torch: not for a document that is none

        text = page(document)
    if str(output) == "-":
        _print(text)
        return
    try:
        with whole_file(output) as file:
            file.write(text)
    except OSError as error:
        raise BadInput(f"-o: {str(output)!r} cannot be written: {error.strerror}") from error
    click.echo(f"{format_bytes(len(text.encode()))} written to {output}")


def _read(schedule: Path, name: str) -> bytes:
    """The file's bytes. Raises :class:`BadInput` where it cannot be read or is too large."""
    try:
        with click.open_file(str(schedule), "rb") as file:
            data: bytes = file.read(LARGEST + 1)
    except OSError as error:
        raise BadInput(f"SCHEDULE: {name!r} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST:
        raise BadInput(f"SCHEDULE: {name!r} has more than {format_bytes(LARGEST)}, no schedule does; {WOULD_DO}")
    return data


def _print(text: str) -> None:
    """The page to stdout. Raises :class:`BadInput` where that is full; a closed pipe is left to click."""
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail once more when Python ends, with words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BadInput(f"-o: stdout cannot be written: {error.strerror}") from error


def _parsed(data: bytes, schedule: Path) -> Any:
    """The document in ``data``, which the file ``schedule`` has: strict JSON. Raises ``ValueError``."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("is nested deeper than any schedule") from error
    except ValueError as error:
        if _is_cut(error):
            whole = "it ends before the document does: run the command that writes it again"
            raise ValueError(f"is not JSON: {error}; {whole}") from error
        raise ValueError(f"{_in_place_of_json(data, schedule, error)}; {WOULD_DO}") from error


def _in_place_of_json(data: bytes, schedule: Path, error: ValueError) -> str:
    """What a file has that is not JSON."""
    if schedule.suffix.lower() in CHECKPOINTS:
        return "is not JSON but a file of weights, which has nothing of plans or times"
    if isinstance(error, UnicodeDecodeError):
        return "is not JSON but no text at all"
    if data.lstrip()[:1] == b"<":
        return "is not JSON but an HTML page, such as this command writes"
    return f"is not JSON: {error}"


def _is_cut(error: ValueError) -> bool:
    """Whether text is no JSON because it ends where more must follow, as where it was cut off while it was written."""
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    # A string that is not closed is told by its beginning; of a word or a number the beginning may be there.
    rest = error.doc[error.pos :].strip()
    begun = len(rest) < 8 and re.fullmatch(r"t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.[eE]?|[eE][+-]?|\\?u[0-9a-fA-F]*", rest)
    return not rest or bool(begun) or error.msg.startswith("Unterminated string")


def _refuse(constant: str) -> NoReturn:
    """Refuse what Python's reader takes as a number and JSON does not have, such as NaN."""
    raise ValueError(f"{constant} is not a number in JSON")
