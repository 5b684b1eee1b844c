"""Running the command, in this process and as one of its own; holding its documents to ``docs/json.md``."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tools.write_schemas import PLANNING
from tools.write_schemas import tables as rows_of_page

from tilewise.cli import cli
from tilewise.cli.schemas import schema_text

CHECKS = {
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "true or false": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lines of progress in this process: where one begins depends on how busy the machine is."""
    monkeypatch.setattr("tilewise.report.progress.LATE_S", threading.TIMEOUT_MAX)


@pytest.fixture
def run() -> Callable[..., Result]:
    """``run("plan", LAYER)`` through click's runner; exceptions that a user would see as a traceback are raised."""

    def invoke(*arguments: str) -> Result:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, list(arguments), prog_name="tilewise")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """``start("plan", LAYER)`` as a process of its own."""

    def popen(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tilewise", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            # A shell in the background hands its children SIGINT ignored, and Python then leaves it so.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return popen


@pytest.fixture
def check_document() -> Callable[[str], dict[str, Any]]:
    """``check_document(text)`` is the JSON document, every field of which is as described and none is missing."""
    return checked


@functools.cache
def tables() -> dict[str, dict[str, str]]:
    """Type by field, by heading."""
    return {heading: {name: kind for name, (kind, _) in rows.items()} for heading, rows in rows_of_page().items()}


def fields_of(document: dict[str, Any]) -> dict[str, str]:
    """The rows that describe a document."""
    kind = document["schema"].removeprefix("tilewise/")
    rows = dict(tables()["any document"])
    if kind in PLANNING:
        rows |= tables()["any planning document"]
    if kind == "explain":
        rows |= tables()["pass"]
    return rows | tables()[f"{document['schema']} {document['version']}"]


def checked(text: str) -> dict[str, Any]:
    """The document in ``text``, every field of which is as described and none is missing."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    check_object(document, fields_of(document), document["schema"])
    if importlib.util.find_spec("jsonschema") is not None:
        schema_of(document["schema"]).validate(document)
    return document


@functools.cache
def schema_of(name: str) -> Any:
    """What holds a document to its published schema."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema_text(name.removeprefix("tilewise/"))))


def check_object(value: dict[str, Any], rows: dict[str, str], where: str) -> None:
    """Hold an object to its rows; ``a.b`` and ``a[].b`` describe nested ones."""
    nested: dict[str, dict[str, str]] = {}
    for path, kind in rows.items():
        name, _, rest = path.partition(".")
        nested.setdefault(name, {})[rest] = kind
    assert {name.removesuffix("[]") for name in nested} == set(value), where
    for name, kinds in nested.items():
        found, place = value[name.removesuffix("[]")], f"{where}.{name}"
        if name in ("error[]", "front[]", "candidates[]") and found is None:
            continue  # the lists that may be null, as their rows say
        entries = found if name.endswith("[]") else [found]
        assert isinstance(entries, list), place
        for entry in entries:
            if "" in kinds:
                check_value(entry, kinds[""], place)
            else:
                assert isinstance(entry, dict), place
                check_object(entry, declared(entry, kinds), place)


def declared(entry: dict[str, Any], kinds: dict[str, str]) -> dict[str, str]:
    """The rows of an entry: a solver of another kind than convolutions declares no passes and dimensions."""
    if entry.get("solves", "conv") == "conv":
        return kinds
    return {name: kind for name, kind in kinds.items() if name not in ("passes[]", "dims[]")}


def check_value(value: object, kind: str, where: str) -> None:
    """Hold a value to a type as the page names it."""
    options = ["true or false"] if kind == "true or false" else kind.split(" or ")
    for option in options:
        if option.startswith("*") and isinstance(value, dict):
            check_object(value, tables()[option.strip("*")], where)
            return
        if not option.startswith("*") and CHECKS[option](value):
            return
    raise AssertionError(f"{where}: {value!r} is not {kind}")
