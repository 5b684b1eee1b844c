"""Reads protobuf's text format: the prototxt files of networks and solvers.

protobuf's parser reads the values. Fields that Caffe's messages do not have are skipped with one warning that lists
them, as a fork's network has some. Whatever else is wrong is an error with the line, the column, and the field.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from tilewise.frontends.caffe.errors import CaffeError, warn
from tilewise.frontends.caffe.files.fields import DEEPEST, Field, Fields, fields_of

__all__ = ["LARGEST", "parse", "read_text"]

LARGEST = 16 << 20
"""Bytes of the largest text that is read. Large published networks take 1 MB."""
MOST_NAMED = 20
"""Unknown fields that a warning lists at most."""
LONGEST = 300
"""Characters of the parser's words that an error repeats at most."""

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a prototxt file: UTF-8, UTF-16 with a byte-order mark, or else Latin-1.

    Raises :class:`CaffeError` for a file that is too large or binary, and ``OSError`` where it cannot be read.
    """
    source = os.fspath(path)
    with open(source, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise CaffeError(f"{source} has more than {LARGEST >> 20} MiB; a network's text of at most that would do")
    mark, encoding = next((pair for pair in _MARKS if data.startswith(pair[0])), (b"", "utf-8"))
    try:
        text = data.removeprefix(mark).decode(encoding)
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "\0" in text or data.startswith(b"\x89HDF"):
        raise CaffeError(f"{source} is binary; a prototxt file would do, and read_weights reads a model's weights")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str, message: Any, source: str) -> Any:
    """Fill a message from its text and return it. ``source`` names the text in errors and warnings.

    Raises :class:`CaffeError` with line, column and field where the text is wrong.

        >>> from tilewise.frontends.caffe.schema import NetParameter
        >>> parse('name: "lenet"', NetParameter(), "net.prototxt").name
        'lenet'
    """
    fields = fields_of(text, message.DESCRIPTOR, source)
    try:
        text_format.Parse(text, message, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise CaffeError(_wrong(error, fields, source)) from None
    except (RecursionError, UnicodeError) as error:
        remedy = f"messages that nest at most {DEEPEST} deep, in UTF-8, would do"
        raise CaffeError(f"{source}: cannot be read ({type(error).__name__}); {remedy}") from None
    unknown = fields.unknown()
    if unknown:
        warn(f"{source}: {_listed(unknown, fields)}")
    return message


def _listed(unknown: Sequence[Field], fields: Fields) -> str:
    """Which fields were skipped, with their lines."""
    named = [f"{field} (line {fields.line(field)})" for field in unknown[:MOST_NAMED]]
    if len(unknown) > MOST_NAMED:
        named.append(f"and {len(unknown) - MOST_NAMED} more")
    what = "a field is unknown and was skipped" if len(unknown) == 1 else f"{len(unknown)} fields are unknown: skipped"
    return f"{what}: {'; '.join(named)}"


def _wrong(error: text_format.ParseError, fields: Fields, source: str) -> str:
    """What is wrong, where, and in which field, from the parser's own words."""
    line, column = error.GetLine(), error.GetColumn()
    reason = re.sub(r"^\d+:\d+ : ", "", str(error))
    reason = re.sub(r"^(['\"]).*\1: (?=[A-Z])", "", reason).rstrip(".")
    reason = re.sub(r'(Message|Enum) type "caffe\.([\w.]+)"', r"\2", reason)
    reason = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in reason[:LONGEST])
    if line is None or column is None:
        # The parser fails so only within unknown fields, which are skipped up to here.
        last = fields.last()
        return f"{source}, line {fields.line(last)}: {last}: {reason}" if last else f"{source}: {reason}"
    place = f"{source}, line {line}, column {column}"
    field = fields.at(line, column)
    if field is None:
        return f"{place}: {reason}"
    if "should not have multiple" in reason:
        return f"{place}: {field}: {reason}; one would do"
    remedy = "" if re.match('Expected "[^{tf]', reason) else _would_do(field.descriptor)
    return f"{place}: {field}: {reason}{remedy}"


def _would_do(descriptor: Any) -> str:
    """What a field takes."""
    if descriptor is None:
        return ""
    kind = descriptor.cpp_type
    if kind in _WHOLE:
        low, high = _WHOLE[kind]
        return f"; whole numbers from {low} to {high} would do"
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return f"; one of {', '.join(value.name for value in descriptor.enum_type.values)} would do"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return "; true or false would do"
    if kind in {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}:
        return "; a number would do"
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return "; text in quotes would do"
    return f"; {descriptor.name} {{ ... }} would do"
