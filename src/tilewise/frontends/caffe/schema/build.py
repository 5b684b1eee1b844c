"""Makes classes of messages from tables.

A table lists messages, with an empty line between them. The first line of a message is its name. Its fields follow,
``name:number:type`` with ``=default`` where the default is not zero, false or empty. ``type*`` is a repeated field,
``type#`` a repeated one that is packed. A type is one of protobuf's scalars, an enum of the same message, or any
message or enum of the tables. Lines that begin with ``enum`` list the names and numbers of an enum. A name that comes
in several tables is one message that has the fields of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

__all__ = ["PACKAGE", "message_classes"]

PACKAGE = "caffe"
"""The protobuf package. It is of a pool of its own, so that it does not meet Caffe's own module in one process."""
SPARE_NUMBERS = 20_000
"""From here on numbers are given to fields whose own number another field has."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "int32": _Field.TYPE_INT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "uint32": _Field.TYPE_UINT32,
}


def message_classes(tables: Iterable[str]) -> dict[str, type[Message]]:
    """The classes of all messages of some tables, by name.

    A field whose number is taken by a field of an earlier table gets a spare number from 20000 on.
    """
    messages, enums = _merged(tables)
    file = descriptor_pb2.FileDescriptorProto(name="tilewise_caffe.proto", package=PACKAGE, syntax="proto2")
    enum_names = {*enums, *(f"{message}.{name}" for message, (_, inner) in messages.items() for name in inner)}
    for name, values in enums.items():
        _add_values(file.enum_type.add(name=name), values)
    for message, (fields, inner) in messages.items():
        described = file.message_type.add(name=message)
        for name, values in inner.items():
            _add_values(described.enum_type.add(name=name), values)
        taken = {number for number, _ in fields.values() if number < SPARE_NUMBERS}
        numbers: set[int] = set()
        spare = (number for number in itertools.count(SPARE_NUMBERS) if number not in taken)
        for name, (number, kind) in fields.items():
            if number in numbers:
                number = next(spare)
            numbers.add(number)
            _set_type(described.field.add(name=name, number=number), kind, message, messages.keys(), enum_names)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in messages}


_Values = list[str]
_Message = tuple[dict[str, tuple[int, str]], dict[str, _Values]]


def _merged(tables: Iterable[str]) -> tuple[dict[str, _Message], dict[str, _Values]]:
    """Fields and enums of each message, and the enums outside messages."""
    messages: dict[str, _Message] = {}
    enums: dict[str, _Values] = {}
    for paragraph in itertools.chain.from_iterable(table.strip().split("\n\n") for table in tables):
        words = iter(paragraph.split())
        first = next(words)
        if first == "enum":
            enums.update(_enums(["enum", *words]))
            continue
        fields, inner = messages.setdefault(first, ({}, {}))
        body = list(words)
        start = body.index("enum") if "enum" in body else len(body)
        for word in body[:start]:
            name, number, kind = word.split(":", 2)
            fields.setdefault(name, (int(number), kind))
        inner.update(_enums(body[start:]))
    return messages, enums


def _enums(words: list[str]) -> Iterator[tuple[str, _Values]]:
    """The enums that follow each other in some words: ``enum Name: FIRST:0 SECOND:1``."""
    starts = [index for index, word in enumerate(words) if word == "enum"]
    for start, end in itertools.pairwise([*starts, len(words)]):
        yield words[start + 1].removesuffix(":"), words[start + 2 : end]


def _add_values(enum: descriptor_pb2.EnumDescriptorProto, values: _Values) -> None:
    for value in values:
        name, number = value.split(":")
        enum.value.add(name=name, number=int(number))


def _set_type(
    field: descriptor_pb2.FieldDescriptorProto, kind: str, message: str, messages: Iterable[str], enums: Iterable[str]
) -> None:
    """Give a field its label, type and default, as the table writes them: ``uint32*``, ``float=0.5``."""
    kind, has_default, default = kind.partition("=")
    field.label = _Field.LABEL_REPEATED if kind[-1] in "*#" else _Field.LABEL_OPTIONAL
    if kind[-1] == "#":
        field.options.packed = True
    kind = kind.rstrip("*#")
    if has_default:
        field.default_value = default
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    name = next(name for name in (f"{message}.{kind}", kind) if name in enums or name in messages)
    field.type = _Field.TYPE_ENUM if name in enums else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{name}"
