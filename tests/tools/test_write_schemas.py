"""Schemas are those of the tables in the manual, and tables that cannot be a schema are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.cli.schemas import DOCUMENTS, schema_text
from tools import write_schemas

PAGE = """
### *any document*

| field | type | meaning |
|---|---|---|
| `schema` | text | which |
| `version` | integer | of it |

### `tilewise/info` version 3

| field | type | meaning |
|---|---|---|
| `a.b` | number or null | see [there](there.md#x) |
| `list[].part` | *some part* or null | |
| `words[]` | text | `null` in its place where there are none |

### *some part*

| field | type | meaning |
|---|---|---|
| `on` | true or false | |
| `again[]` | *some part* | |
"""


def test_the_schemas_are_those_of_the_manual() -> None:
    made = write_schemas.schemas()
    assert tuple(made) == DOCUMENTS
    for kind, schema in made.items():
        assert schema_text(kind) == write_schemas.written(schema), "python -m tools.write_schemas would do"


def test_a_table_becomes_a_schema(tmp_path: Path) -> None:
    page = tmp_path / "json.md"
    page.write_text(PAGE, "utf-8")
    made = write_schemas.schemas(page)["info"]
    assert made["required"] == ["schema", "version", "a", "list", "words"]
    assert made["properties"]["schema"]["const"] == "tilewise/info"
    assert made["properties"]["version"]["const"] == 3
    a = made["properties"]["a"]
    assert a["properties"]["b"] == {"type": ["number", "null"], "minimum": 0, "description": "see there"}
    assert a["required"] == ["b"]
    entry = made["properties"]["list"]["items"]
    assert entry["properties"]["part"] == {"anyOf": [{"$ref": "#/$defs/some_part"}, {"type": "null"}]}
    words = made["properties"]["words"]
    assert words["type"] == ["array", "null"]
    assert words["items"] == {"type": "string"}
    part = made["$defs"]["some_part"]
    assert part["properties"]["again"] == {"type": "array", "items": {"$ref": "#/$defs/some_part"}}
    assert part["required"] == ["on", "again"]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("| `a.b` | number or null |", "| `a.b` | complex |", KeyError),
        ("*some part* or null", "*no such part*", StopIteration),
        ("| `words[]` |", "| `a.b` |", ValueError),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path: Path, old: str, new: str, error: type[Exception]) -> None:
    page = tmp_path / "json.md"
    assert old in PAGE
    page.write_text(PAGE.replace(old, new), "utf-8")
    with pytest.raises(error):
        write_schemas.schemas(page)


def test_ranges_and_choices_are_of_fields_that_there_are() -> None:
    found = write_schemas.tables()
    for table, fields in (write_schemas.RANGES | write_schemas.CHOICES).items():
        known = set(found[table]) | {path.removesuffix("[]") for path in found[table]}
        assert set(fields) <= known, table
