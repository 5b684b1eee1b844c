"""``tilewise wisdom``: what was measured and planned, kept between runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewise.cli.program import BadInput, bad_input

if TYPE_CHECKING:
    from tilewise.wisdom import Wisdom

__all__ = ["command"]


@click.group("wisdom")
def command() -> None:
    """Show, export, import or forget what was measured and planned."""


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/wisdom) instead of a table.")
def show_wisdom(as_json: bool) -> None:
    """Say what is kept, by environment: a device with its driver and library versions."""
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import wisdom_document
    from tilewise.report.tables import wisdom_table

    with _store() as wisdom:
        summaries, path = wisdom.summary(), str(wisdom.path)
    if as_json:
        show_json(wisdom_document(path, summaries))
    else:
        show(wisdom_table(path, summaries))


@command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export_wisdom(file: Path) -> None:
    """Write everything to FILE, a JSON document to carry elsewhere."""
    with _store() as wisdom:
        try:
            rows = wisdom.export(file)
        except OSError as error:
            raise BadInput(f"FILE: {str(file)!r} cannot be written: {error.strerror}") from error
    click.echo(f"{rows} rows written to {file}")


@command.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
def import_wisdom(files: tuple[Path, ...]) -> None:
    """Merge FILEs, exported documents; of two rows for the same thing the newer is kept.

    Their plans are checked on this machine when they are first used.
    """
    rows = 0
    with _store() as wisdom:
        for file in files:
            with bad_input(f"FILE: {str(file)!r}"):
                try:
                    rows += wisdom.import_(file)
                except OSError as error:
                    raise BadInput(f"FILE: {str(file)!r} cannot be read: {error.strerror}") from error
    click.echo(f"{rows} rows new or newer")


@command.command("merge")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="What to write.")
def merge_wisdom(files: tuple[Path, ...], output: Path) -> None:
    """Write FILEs, exported documents, as one; of two rows for the same thing the newer is kept."""
    from tilewise.wisdom import Wisdom

    with bad_input("FILE"):
        try:
            rows = Wisdom.merge_files(files, output)
        except OSError as error:
            what = "written" if error.filename is None or Path(error.filename) not in files else "read"
            raise BadInput(f"{str(error.filename or output)!r} cannot be {what}: {error.strerror}") from error
    click.echo(f"{rows} rows written to {output}")


@command.command("forget")
@click.option("--problem", metavar="TEXT", help="Only problems whose key holds TEXT, such as 'wgrad' or 'kh5'.")
@click.option("--solver", metavar="NAME", help="Only measurements of this solver and plans that use it.")
@click.option("--environment", metavar="KEY", help="Only this environment, as 'wisdom show' prints it.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
def forget_wisdom(problem: str | None, solver: str | None, environment: str | None, everything: bool) -> None:
    """Delete what meets every condition given, so that it is measured afresh."""
    given = any(condition is not None for condition in (problem, solver, environment))
    if given == everything:
        raise BadInput("say what to forget with --problem, --solver or --environment, or everything with --all")
    with _store() as wisdom:
        rows = wisdom.forget(problem, solver, environment)
    click.echo(f"{rows} rows forgotten")


def _store() -> contextlib.closing[Wisdom]:
    """The user's store, closed at the end."""
    from tilewise.wisdom import Wisdom

    return contextlib.closing(Wisdom())
