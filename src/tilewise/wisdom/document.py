"""Wisdom as a JSON document, to carry between machines and to keep in version control."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilewise.machine.files import whole_file
from tilewise.plan import PlanFormatError, device_of, is_busy
from tilewise.wisdom import rows, tables
from tilewise.wisdom.tables import Row

__all__ = ["FORMAT", "KIND", "compose", "from_bytes", "merged", "parse", "read", "write"]

FORMAT = 1
"""Version of the document's format that this version of tilewise reads and writes."""
KIND = "tilewise wisdom"
"""What the document says it is."""
MOST_BYTES = 1 << 29
"""Largest file that is read: a hundred times the largest documents of clusters seen so far."""

PACK = b"PK\x03\x04"
"""How a pack begins, in which kernels are carried."""


def compose(kept: dict[str, list[Row]], written_by: str) -> dict[str, Any]:
    """The document of valid rows by table, the same whatever their order. :func:`parse` reads it back."""
    environments: dict[str, dict[str, Any]] = {}

    def problem_of(row: Row) -> dict[str, Any]:
        problems = environments.setdefault(row.environment, {"profile": None, "problems": {}})["problems"]
        entry: dict[str, Any] = problems.setdefault(row.problem, {"measurements": [], "plans": []})
        return entry

    for row in _sorted("measurement", kept):
        problem_of(row)["measurements"].append(_measurement_entry(row))
    for row in _sorted("plan", kept):
        constraints, text, recorded = row.values
        entry = {"constraints": constraints, "plan": json.loads(text), "recorded": recorded}
        problem_of(row)["plans"].append(entry)
    for row in _sorted("profile", kept):
        text, recorded = row.values
        entry = {"values": json.loads(text), "recorded": recorded}
        environments.setdefault(row.environment, {"problems": {}})["profile"] = entry
    return {
        "format": FORMAT,
        "kind": KIND,
        "written_by": written_by,
        "environments": [
            {
                "environment": environment,
                "profile": content["profile"],
                "problems": [{"problem": problem, **entry} for problem, entry in sorted(content["problems"].items())],
            }
            for environment, content in sorted(environments.items())
        ],
    }


def _sorted(table: str, kept: dict[str, list[Row]]) -> list[Row]:
    """The rows of a table in the order of their keys."""
    return sorted(kept[table], key=lambda row: tables.key_of(table, row))


def merged(documents: Iterable[dict[str, list[Row]]]) -> dict[str, list[Row]]:
    """The rows of several parsed documents, one row for each key.

    They are the rows that a store holds after importing all of the documents.
    """
    best: dict[str, dict[tuple[Any, ...], Row]] = {table: {} for table in tables.COLUMNS}
    for document in documents:
        for table, table_rows in document.items():
            for row in table_rows:
                key = tables.key_of(table, row)
                best[table][key] = max(best[table].get(key, row), row, key=functools.partial(tables.rank, table))
    return {table: list(rows_of.values()) for table, rows_of in best.items()}


def _measurement_entry(row: Row) -> dict[str, Any]:
    """A measurement's row as the document has it. ``busy`` follows from the load, and is not read back."""
    entry = dict(zip(rows.MEASUREMENT, row.values, strict=True))
    l2, spread = entry.pop("l2"), entry.pop("spread")
    return {
        **entry,
        "config": json.loads(entry["config"]),
        "error": None if l2 is None else [l2, spread],
        "busy": is_busy(entry["load"], device_of(row.problem)),
    }


def parse(document: object) -> tuple[dict[str, list[Row]], list[str]]:
    """Valid rows of a document by table, and what was wrong with each entry that was left out.

    Raises :class:`~tilewise.plan.PlanFormatError` where it is no such document, or of another format.
    """
    if not isinstance(document, dict) or document.get("kind") != KIND:
        kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise PlanFormatError(f"kind={kind!r:.80}: expected a document of kind {KIND!r}")
    if document.get("format") != FORMAT or isinstance(document["format"], bool):
        raise PlanFormatError(f"format={document.get('format')!r:.80}: this version reads wisdom of format {FORMAT}")
    if not isinstance(document.get("environments"), list):
        raise PlanFormatError("environments: expected a list")
    reader = _Reader()
    for entry in document["environments"]:
        with reader.forgiving("environment"):
            reader.environment(_members(entry, "an environment"))
    return reader.tables, reader.faults


class _Reader:
    """Collects rows and faults while walking a document."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Row]] = {"measurement": [], "plan": [], "profile": []}
        self.faults: list[str] = []

    @contextlib.contextmanager
    def forgiving(self, what: str) -> Iterator[None]:
        """Note a fault instead of failing, so that one bad entry does not spoil the rest."""
        try:
            yield
        except rows.RowError as error:
            self.faults.append(f"{what}: {error}")

    def environment(self, entry: dict[str, Any]) -> None:
        """Read all entries of one environment."""
        environment = rows.checked_text("environment", entry.get("environment"))
        if entry.get("profile") is not None:
            with self.forgiving("profile"):
                profile = _members(entry["profile"], "a profile")
                values = rows.read_profile(profile.get("values"))
                self._add("profile", environment, "", rows.pack_profile(values, _recorded(profile)))
        for item in _items(entry, "problems"):
            with self.forgiving("problem"):
                self.problem(environment, _members(item, "a problem"))

    def problem(self, environment: str, entry: dict[str, Any]) -> None:
        """Read all entries of one problem."""
        problem = rows.checked_text("problem", entry.get("problem"))
        for item in _items(entry, "measurements"):
            with self.forgiving("measurement"):
                self._add(
                    "measurement",
                    environment,
                    problem,
                    _measurement(_members(item, "a measurement")),
                )
        for item in _items(entry, "plans"):
            with self.forgiving("plan"):
                kept = _members(item, "a plan")
                plan = rows.read_plan(problem, kept.get("plan"))
                constraints = rows.checked_text("constraints", kept.get("constraints"), empty=True)
                self._add(
                    "plan",
                    environment,
                    problem,
                    rows.pack_plan(problem, constraints, plan, _recorded(kept)),
                )

    def _add(self, table: str, environment: str, problem: str, values: tuple[Any, ...]) -> None:
        """Keep a row."""
        self.tables[table].append(Row(environment, problem, values))


def _measurement(entry: dict[str, Any]) -> tuple[Any, ...]:
    """The columns of a measurement. Raises :class:`RowError` naming the fault."""
    error = entry.get("error")
    if error is not None and not (isinstance(error, list) and len(error) == 2):
        raise rows.RowError(f"error={error!r:.80}: expected two numbers or null")
    if not isinstance(entry.get("config"), dict):
        raise rows.RowError("config: expected an object")
    recorded = _recorded(entry)
    text = json.dumps(entry["config"], sort_keys=True, separators=(",", ":"))
    flat = {**entry, "config": text, "recorded": recorded}
    flat["l2"], flat["spread"] = error or (None, None)
    return rows.pack_measurement(rows.unpack_measurement([flat.get(column) for column in rows.MEASUREMENT]), recorded)


def _recorded(entry: dict[str, Any]) -> float:
    """When an entry was recorded. Raises :class:`RowError` where it does not say."""
    return rows.checked_time("recorded", entry.get("recorded"))


def _members(entry: object, what: str) -> dict[str, Any]:
    """``entry``, which must be an object. Raises :class:`RowError`."""
    if not isinstance(entry, dict):
        raise rows.RowError(f"{what} must be an object, not {type(entry).__name__}")
    return entry


def _items(entry: dict[str, Any], name: str) -> list[Any]:
    """The list called ``name``, empty where it is absent. Raises :class:`RowError`."""
    items = entry.get(name, [])
    if not isinstance(items, list):
        raise rows.RowError(f"{name}={items!r:.80}: expected a list")
    return items


def from_bytes(data: bytes) -> object:
    """The document in a file's content, to be parsed. Raises :class:`~tilewise.plan.PlanFormatError`."""
    try:
        document: object = rows.parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PlanFormatError(str(error)) from error
    return document


def read(path: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """Parse the document in a file, as :func:`parse` does.

    Raises ``OSError``, and :class:`~tilewise.plan.PlanFormatError` naming the file.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise PlanFormatError(f"{path}: has more than {MOST_BYTES} bytes; no wisdom is as large")
    if data.startswith(PACK):
        raise PlanFormatError(f"{path}: is a pack, whose wisdom lies beside code; 'tilewise wisdom import' would do")
    try:
        return parse(from_bytes(data))
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the document to ``path``, which holds the old content or all of the new one. Raises ``OSError``.

    A pipe or a device (``/dev/stdout``) is written to and stays what it is.
    """
    with whole_file(path) as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")
