"""``tilewise schema``: the JSON Schema of a document."""

from __future__ import annotations

import click

from tilewise.cli.helped import Helped
from tilewise.cli.schemas import DOCUMENTS, schema_text

__all__ = ["command"]

EXAMPLES = (
    ("tilewise schema plan", "The schema of what `plan --json` and `plan -o` write."),
    ("tilewise schema time", "The schema of what `time --json` writes."),
)


@click.command("schema", cls=Helped, examples=EXAMPLES, short_help="Print the JSON Schema of a document.")
@click.argument("document", type=click.Choice(DOCUMENTS), default="plan", metavar="[DOCUMENT]")
def command(document: str) -> None:
    """Print the JSON Schema of DOCUMENT, a kind of document that tilewise writes.

    DOCUMENT is plan (a schedule, the default), mesh, time, explain, advise, wisdom, kernels or info: the last word of
    the field "schema" that every document has. Programs can check documents by it, or make classes from it.
    """
    click.echo(schema_text(document), nl=False)
