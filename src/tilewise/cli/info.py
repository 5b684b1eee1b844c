"""``tilewise info``: devices, libraries, solvers and their limits."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("info")
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
