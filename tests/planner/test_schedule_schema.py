"""The published schema of schedules against the reader: what is valid by the one is read by the other."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.test_schedule import JUNK, PLACES, STEP, at, example, outcome

from tilewise.cli.schemas import schema_text
from tilewise.planner import Schedule

jsonschema = pytest.importorskip("jsonschema")

CONTRADICTIONS = (
    r"problem\.key: problem",  # no key of a problem
    r"problem\.key='.*: expected a problem of device",
    r"plan\.problem=.*: expected the key of the problem",
    r"front\[\d+\]\.problem=.*: expected the key of the problem",
    r"counts=.*: expected a positive count for each of",
    r"\.passes: the same pass twice",
    r"\.left=.*: expected empty text, as the layer has passes",
    r"plan: another than that of layers",
    r"\.pass='.*': expected one of",  # kinds of layers can be added, so the schema does not list their passes
    r"options: (exclude|share_with|workspace)",  # names of solvers and devices
    r"layers\[\d+\]\.passes: has \d+ entries",
    r"=\d+\.0: expected (an integer|int)",  # to a schema 2.0 is the integer 2
    r"63 bits|deep: no schedule is|surrogates",
)
"""What no schema says: parts that contradict each other, names that only the library knows, and bounds of the whole."""


def written() -> dict[str, Any]:
    """The document of one of each thing, as tilewise writes it: a step's memory has a limit there."""
    return copy.deepcopy(replace(example(), step_memory={**STEP, "limit": 12}).to_json())


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(schema_text("plan"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def is_json(value: Any) -> bool:
    """Whether a value can stand in JSON, and is short: text of a million characters takes a schema's time alone."""
    try:
        return len(json.dumps(value, allow_nan=False)) < 5000
    except (TypeError, ValueError):
        return False


def changed(seed: int) -> Iterator[tuple[str, Any]]:
    """Documents with one value changed, taken away or put elsewhere, each with a word about it."""
    rng = random.Random(seed)
    plain = [junk for junk in JUNK if is_json(junk)]
    for path in PLACES:
        document, junk = written(), rng.choice([None, *plain])
        at(document, path[:-1])[path[-1]] = copy.deepcopy(junk)
        yield f"{path}={junk!r}", document
        document = written()
        del at(document, path[:-1])[path[-1]]
        yield f"{path} is missing", document
        document = written()
        at(document, path[:-1])[path[-1]] = copy.deepcopy(at(document, rng.choice(PLACES)))
        yield f"{path} is another part", document


def test_what_is_written_is_valid(validator: Any) -> None:
    validator.validate(written())


def test_what_is_valid_is_read(validator: Any) -> None:
    read = refused = 0
    for word, document in changed(0):
        found = outcome(lambda document=document: Schedule.from_json(document))
        if validator.is_valid(document):
            read += 1
            contradicts = isinstance(found, str) and any(re.search(known, found) for known in CONTRADICTIONS)
            assert isinstance(found, Schedule) or contradicts, f"{word}: {found}"
        elif isinstance(found, str):
            refused += 1
    assert min(read, refused) > 100


def test_every_field_of_a_wrong_type_is_refused(validator: Any) -> None:
    for path in PLACES:
        if "config" in path[:-1]:
            continue  # parameters of solvers may have any name and type
        document = written()
        parent = at(document, path[:-1])
        parent[path[-1]] = [[]] if isinstance(parent[path[-1]], dict) else {"x": {}}
        assert not validator.is_valid(document), path


def test_errors_name_the_place(validator: Any) -> None:
    document = written()
    document["layers"][0]["passes"][0]["candidates"][0]["version"] = "3"
    (error,) = validator.iter_errors(document)
    assert error.json_path == "$.layers[0].passes[0].candidates[0].version"
