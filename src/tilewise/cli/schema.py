"""``tilewise schema``: the JSON Schema of a document."""

from __future__ import annotations

import click

from tilewise.cli.schemas import DOCUMENTS, schema_text

__all__ = ["command"]


@click.command("schema")
@click.argument("document", type=click.Choice(DOCUMENTS), default="plan", metavar="[DOCUMENT]")
def command(document: str) -> None:
    """Print the JSON Schema of DOCUMENT, a kind of document that tilewise writes.

    DOCUMENT is plan (a schedule, the default), mesh, time, explain, advise, wisdom, kernels or info: the last word of
    the field "schema" that every document has. Programs can check documents by it, or make classes from it.
    """
    click.echo(schema_text(document), nl=False)
