"""Write the JSON Schemas of tilewise's documents from the tables of ``docs/json.md``.

    python -m tools.write_schemas

The page is the one description of the documents: fields, types and meanings come from its tables. What tables do not
say, such as ranges and the words of a choice, stands in :data:`RANGES` and :data:`CHOICES` here. The schemas lie in
``src/tilewise/cli/schemas/``, and ``tilewise schema`` prints them. A test fails where they are not up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "json.md"
FOLDER = ROOT / "src" / "tilewise" / "cli" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLANNING = ("plan", "mesh", "time", "explain", "advise")
"""Documents that also say for what and where they hold."""
INT64_MAX = 2**63 - 1
LONGEST = 4096

Row = tuple[str, str]
"""Type and meaning of a field."""
Schema = dict[str, Any]

KINDS: dict[str, Schema] = {
    "text": {"type": "string"},
    "integer": {"type": "integer", "minimum": 0, "maximum": INT64_MAX},
    "number": {"type": "number", "minimum": 0},
    "true or false": {"type": "boolean"},
    "object": {"type": "object"},
}
"""Schemas of the page's types. Sizes, counts and times are never negative; :data:`RANGES` has what differs."""

NAME: Schema = {"minLength": 1, "maxLength": LONGEST}
MILLISECONDS: Schema = {"minimum": 1e-9, "maximum": 1e12}
SHARE: Schema = {"maximum": 1}
SOME: Schema = {"minimum": 1}
CONFIG: Schema = {
    "additionalProperties": {
        "anyOf": [
            {"type": ["string", "number", "boolean"]},
            {"type": "array", "items": {"type": "integer", "minimum": -INT64_MAX, "maximum": INT64_MAX}},
        ]
    }
}

RANGES: dict[str, dict[str, Schema]] = {
    "any planning document": {
        "target": NAME,
        "device": NAME,
        "environment": NAME,
        "options.batch": SOME,
        "options.error_limit": {"exclusiveMinimum": 0},
    },
    "layer": {"names": {"minItems": 1}, "names[]": {"maxLength": LONGEST}},
    "pass": {"framework_ms": MILLISECONDS, "planned_ms": MILLISECONDS, "load": SHARE},
    "run times": {"count": SOME, "least_ms": MILLISECONDS, "median_ms": MILLISECONDS},
    "problem": {"key": NAME},
    "candidate": {
        "solver": NAME,
        "config": CONFIG,
        "time_ms": MILLISECONDS,
        "framework_ms": MILLISECONDS,
        "load": SHARE,
    },
    "plan": {
        "format": {"const": 1},
        "config": CONFIG,
        "counts[]": SOME,
        "load": SHARE,
        "error": {"minItems": 2, "maxItems": 2},
    },
    "device rates": {
        "bytes_per_second": {"minimum": 1, "maximum": 1e18},
        "flops_per_second": {"minimum": 1, "maximum": 1e18},
    },
    "budget": {"segments[].layer": {"maxLength": LONGEST}, "segments[].time_ms": MILLISECONDS},
    "step memory": {"moments[].layer": {"maxLength": LONGEST}},
    "largest batch": {"batch": SOME},
    "side": {"loss": {"minimum": None}},
}
"""What a field's type does not say, by table and field; ``None`` takes a bound away."""

MORE_THAN = {"explained candidate": "candidate"}
"""Objects that have all fields of another one, by the names of both."""
RANGES |= {more: RANGES[less] for more, less in MORE_THAN.items()}

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "any planning document": {
        "options.dtype": ("fp32", "bf16", "fp16"),
        "options.precision": ("ieee", "tf32"),
        "options.layout": ("contiguous", "channels_last"),
        "options.batch_sizes": ("undivided", "powers_of_two", "all"),
        "options.rigor": ("estimate", "measure", "patient", "wisdom_only"),
    },
    "budget": {"policy": ("arena", "paper_wd"), "program.method": ("milp", "exact")},
}
"""Words of which a text is one, by table and field."""

SOMETIMES: dict[str, tuple[str, ...]] = {"tilewise/info": ("solvers[].passes[]", "solvers[].dims[]")}
"""Fields that an object may lack, by document."""


def tables(page: Path = PAGE) -> dict[str, dict[str, Row]]:
    """Type and meaning by field, by heading: the name of an object, or a schema with its version."""
    found: dict[str, dict[str, Row]] = {}
    rows: dict[str, Row] = {}
    for line in page.read_text("utf-8").splitlines():
        heading = re.fullmatch(r"### (?:\*(.+)\*|`(.+)` version (\d+))", line)
        if heading is not None:
            rows = found.setdefault(heading[1] or f"{heading[2]} {heading[3]}", {})
        row = re.match(r"\| `([^`]+)` \| ([^|]+) \| (.*)\|$", line)
        if row is not None:
            if row[1] in rows:
                raise ValueError(f"{page}: {row[1]} stands twice in one table")
            rows[row[1]] = (row[2].strip(), row[3].strip())
    return found | {more: found[less] | found[more] for more, less in MORE_THAN.items() if more in found}


def schemas(page: Path = PAGE) -> dict[str, Schema]:
    """The schema of each document, by its kind such as ``plan``."""
    found = tables(page)
    return {
        heading.removeprefix("tilewise/").split()[0]: _document(heading, found)
        for heading in found
        if heading.startswith("tilewise/")
    }


def _document(heading: str, found: dict[str, dict[str, Row]]) -> Schema:
    """The schema of one kind of document, with every object that it may hold under ``$defs``."""
    name, version = heading.split()
    kind = name.removeprefix("tilewise/")
    parts = ["any document", *(["any planning document"] if kind in PLANNING else [])]
    parts += ["pass"] if kind == "explain" else []
    whole: Schema = {"type": "object", "properties": {}, "required": []}
    for part in (*parts, heading):
        made = _object(part, found[part], SOMETIMES.get(name, ()))
        whole["properties"] |= made["properties"]
        whole["required"] = list(dict.fromkeys([*whole["required"], *made["required"]]))
    whole["properties"]["schema"] |= {"const": name}
    whole["properties"]["version"] = {
        "const": int(version),
        "description": whole["properties"]["version"]["description"],
    }
    return {
        "$schema": DIALECT,
        "$id": f"urn:tilewise:{kind}:{version}",
        "title": name,
        "description": "Fields that are not named here may be added at any time: ignore them.",
        **whole,
        "$defs": {_name(part): _object(part, found[part]) for part in sorted(_parts_of(whole, found))},
    }


def _name(part: str) -> str:
    """The name of an object in a schema, where a blank would have to be escaped."""
    return part.replace(" ", "_")


def _parts_of(schema: Schema, found: dict[str, dict[str, Row]]) -> set[str]:
    """Names of all objects that ``schema`` refers to, also through others."""
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        for name in re.findall(r'"#/\$defs/([^"]+)"', json.dumps(waiting.pop())):
            part = next(part for part in found if _name(part) == name)
            if part not in seen:
                seen.add(part)
                waiting.append(_object(part, found[part]))
    return seen


def _object(part: str, rows: dict[str, Row], sometimes: tuple[str, ...] = ()) -> Schema:
    """The schema of an object, from its table. ``a.b`` and ``a[].b`` describe nested ones."""
    made: Schema = {"type": "object", "properties": {}, "required": []}
    for path, row in rows.items():
        place = made
        *outer, last = path.split(".")
        for word in outer:
            place = _nested(place, word)
        _add(place, last, _field(part, path, row), required=path not in sometimes)
    for path, more in RANGES.get(part, {}).items():
        if path.removesuffix("[]") == path and f"{path}[]" in rows:  # a bound of the list, not of its entries
            made["properties"][path] |= more
    return made


def _nested(place: Schema, word: str) -> Schema:
    """The object that ``word`` names in ``place``, made where it is not there; ``a[]`` is an entry of a list."""
    name = word.removesuffix("[]")
    empty: Schema = {"type": "object", "properties": {}, "required": []}
    if name not in place["properties"]:
        place["properties"][name] = {"type": "array", "items": empty} if word.endswith("[]") else empty
        place["required"].append(name)
    found: Schema = place["properties"][name]
    inner: Schema = found["items"] if word.endswith("[]") else found
    return inner


def _add(place: Schema, word: str, schema: Schema, *, required: bool) -> None:
    """Put a field's schema into the object ``place``; that of ``a[]`` into a list of such entries."""
    name = word.removesuffix("[]")
    if word.endswith("[]"):
        description = schema.pop("description", "")
        kind: object = ["array", "null"] if "`null` in its place" in description else "array"
        schema = {"type": kind, "items": schema} | ({"description": description} if description else {})
    place["properties"][name] = schema
    if required:
        place["required"].append(name)


def _field(part: str, path: str, row: Row) -> Schema:
    """The schema of a field's value, or of an entry where it is a list."""
    kind, meaning = row
    options = ["true or false"] if kind == "true or false" else kind.split(" or ")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", meaning)  # links lead to pages that lie elsewhere
    described = {"description": plain} if plain else {}
    null = "null" in options
    (word,) = [option for option in options if option != "null"]
    if word.startswith("*"):
        reference: Schema = {"$ref": f"#/$defs/{_name(word.strip('*'))}"}
        return {"anyOf": [reference, {"type": "null"}]} | described if null else reference | described
    made = dict(KINDS[word])
    for name, value in RANGES.get(part, {}).get(path, {}).items():
        if value is None:
            made.pop(name)
        else:
            made[name] = value
    choices = CHOICES.get(part, {}).get(path)
    if choices is not None:
        made["enum"] = list(choices)
    if null:
        made["type"] = [made["type"], "null"]
    return made | described


def written(schema: Schema) -> str:
    """The text of a schema's file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write every schema, and remove files of documents that there are no more."""
    made = {FOLDER / f"{kind}.json": written(schema) for kind, schema in schemas().items()}
    for path in FOLDER.glob("*.json"):
        if path not in made:
            path.unlink()
    for path, text in made.items():
        path.write_text(text, "utf-8")
    print(f"wrote {len(made)} schemas to {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
