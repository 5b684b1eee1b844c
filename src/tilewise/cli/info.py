"""``tilewise info``: devices, libraries, solvers and their limits."""

from __future__ import annotations

import click

from tilewise.cli.helped import Helped

__all__ = ["command"]


EXAMPLES = (
    ("tilewise info", "Devices, libraries and solvers of this machine."),
    ("tilewise info --json", "The same as a document for programs."),
)


@click.command("info", cls=Helped, examples=EXAMPLES, short_help="Say what is here: devices, libraries, solvers.")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/info) instead of tables.")
def command(as_json: bool) -> None:
    """Say what is here: devices, library versions, where wisdom is kept, and every solver with its declared limits."""
    from tilewise.report.console import show, show_json
    from tilewise.report.system import info_document, info_tables

    document = info_document()
    if as_json:
        show_json(document)
    else:
        show(*info_tables(document))
