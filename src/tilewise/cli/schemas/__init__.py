"""The JSON Schemas of tilewise's documents, made by ``tools/write_schemas.py`` from the tables of ``docs/json.md``."""

from __future__ import annotations

from importlib import resources

__all__ = ["DOCUMENTS", "schema_text"]

DOCUMENTS = ("plan", "mesh", "time", "explain", "advise", "wisdom", "kernels", "info")
"""Kinds of documents, by the last word of their ``schema`` field, in the order of ``docs/json.md``."""


def schema_text(kind: str) -> str:
    """The JSON Schema (draft 2020-12) of the documents ``tilewise/KIND``, as text.

    Raises ``ValueError`` where ``kind`` is none of :data:`DOCUMENTS`.

    >>> import json
    >>> json.loads(schema_text("plan"))["title"]
    'tilewise/plan'
    """
    if kind not in DOCUMENTS:
        raise ValueError(f"kind={kind!r}: one of {', '.join(DOCUMENTS)} would do")
    return resources.files(__name__).joinpath(f"{kind}.json").read_text("utf-8")
