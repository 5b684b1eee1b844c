"""``tilewise wisdom``: what was measured and planned, kept between runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewise.cli.given.early import check_file
from tilewise.cli.helped import Example, Helped, HelpedGroup
from tilewise.cli.kernels import (
    imported_text,
    interruptible,
    pack_errors,
    stopping_between,
    take_kernels,
    written_text,
)
from tilewise.cli.program import BadInput, bad_input

if TYPE_CHECKING:
    from tilewise.wisdom import Wisdom

__all__ = ["command"]


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "show": (
        ("tilewise wisdom show", "What is kept, by device and versions."),
        ("tilewise wisdom show --json", "The same as a document for programs."),
    ),
    "export": (
        ("tilewise wisdom export mine.json", "All that was measured and planned here."),
        ("tilewise wisdom export --with-kernels mine.pack", "With the kernels that were compiled for it."),
    ),
    "import": (
        ("tilewise wisdom import mine.json", "Take what another machine measured."),
        ("tilewise wisdom import mine.pack --no-kernels", "Take the wisdom of a pack, and no code."),
    ),
    "merge": (
        ("tilewise wisdom merge a.json b.json -o both.json", "One document of two."),
        ("tilewise wisdom merge node*.json -o cluster.json", "One document of many."),
    ),
    "forget": (
        ("tilewise wisdom forget --solver fft", "Measure a solver afresh."),
        ("tilewise wisdom forget --all", "Begin again."),
    ),
}


@click.group("wisdom", cls=HelpedGroup, short_help="Show, carry or forget what was measured and planned.")
def command() -> None:
    """Show, export, import or forget what was measured and planned."""


@command.command("show", cls=Helped, examples=EXAMPLES["show"])
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/wisdom) instead of a table.")
def show_wisdom(as_json: bool) -> None:
    """Say what is kept, by environment: a device with its driver and library versions."""
    from tilewise.report.console import show, show_json
    from tilewise.report.stores import wisdom_table

    with _store() as wisdom:
        summaries, path = wisdom.summary(), str(wisdom.path)
    if as_json:
        from tilewise.report.documents import wisdom_document  # imports torch

        show_json(wisdom_document(path, summaries))
    else:
        show(wisdom_table(path, summaries))


@command.command("export", cls=Helped, examples=EXAMPLES["export"])
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--with-kernels", is_flag=True, help="Write a pack, with the kernels that were compiled here beside it.")
def export_wisdom(file: Path, with_kernels: bool) -> None:
    """Write everything to FILE, a JSON document to carry elsewhere.

    With --with-kernels FILE is a pack for equal machines, which need compile nothing then. A pack holds code.
    """
    with _store() as wisdom:
        if with_kernels:
            click.echo(_export_pack(wisdom, file))
            return
        try:
            rows = wisdom.export(file)
        except OSError as error:
            raise BadInput(f"FILE: {str(file)!r} cannot be written: {error.strerror}") from error
    click.echo(f"{rows} rows written to {file}")


@command.command("import", cls=Helped, examples=EXAMPLES["import"])
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--trust", is_flag=True, help="Take the kernels of packs, too: you trust whoever made them.")
@click.option("--no-kernels", is_flag=True, help="Take the wisdom of packs alone.")
def import_wisdom(files: tuple[Path, ...], trust: bool, no_kernels: bool) -> None:
    """Merge FILEs, exported documents or packs; of two rows for the same thing the newer is kept.

    Their plans are checked on this machine when they are first used. A pack holds kernels beside wisdom, which are code
    that runs with your rights: say with --trust that they may, or with --no-kernels that you want none.
    """
    if trust and no_kernels:
        raise BadInput("--no-kernels: --trust takes kernels; leave one of them out")
    for file in files:
        check_file("FILE", str(file))
    rows = 0
    with _store() as wisdom:
        for file in files:
            with bad_input(f"FILE: {str(file)!r}"):
                try:
                    is_packed = _is_pack(file)
                    rows += 0 if is_packed else wisdom.import_(file)
                except OSError as error:
                    raise BadInput(f"FILE: {str(file)!r} cannot be read: {error.strerror}") from error
            if is_packed:
                rows += _import_pack(wisdom, file, trust, no_kernels)
    click.echo(f"{rows} rows new or newer")


def _is_pack(file: Path) -> bool:
    """Whether a file is a pack and no document. Raises ``OSError`` where it cannot be read."""
    from tilewise.kernels.packs.archive import is_pack

    return is_pack(file)


def _export_pack(wisdom: Wisdom, file: Path) -> str:
    """Write all wisdom and all kernels that were compiled here; what was written, in one line."""
    import json

    from tilewise.kernels.packs import carry
    from tilewise.report.progress import progress_bar

    with interruptible(f"{file} is as it was"), pack_errors(file, "written"):
        document, names = wisdom.to_json(), list(carry.kept())
        with progress_bar("writing", len(names)) as step, stopping_between(step) as between:
            data = json.dumps(document, allow_nan=False).encode()
            return written_text(carry.export(file, names, step=between, wisdom=data), file)


def _import_pack(wisdom: Wisdom, file: Path, trust: bool, no_kernels: bool) -> int:
    """Take a pack's wisdom, and its kernels where they are trusted; the number of rows that are new or newer."""
    from tilewise.kernels.packs.archive import has_kernels, opened
    from tilewise.kernels.packs.carry import wisdom_of
    from tilewise.wisdom.document import from_bytes, parse

    with pack_errors(file, "read"):
        with opened(file) as pack:
            code = has_kernels(pack.manifest)
        data = wisdom_of(file)
        if data is None:
            raise BadInput(f"FILE: {str(file)!r} holds kernels and no wisdom; 'tilewise kernels import' would do")
        if code and not (trust or no_kernels):
            text = "holds code beside wisdom, which would run here with your rights; --trust would take both, where you"
            raise BadInput(f"FILE: {str(file)!r} {text} trust whoever made it, --no-kernels the wisdom alone")
        document = from_bytes(data)
        parse(document)  # before any kernel is written: what is refused is refused whole
    if code and trust:
        click.echo(imported_text(take_kernels(file, trust), file))
    return wisdom.merge(document)


@command.command("merge", cls=Helped, examples=EXAMPLES["merge"])
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


@command.command("forget", cls=Helped, examples=EXAMPLES["forget"])
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
