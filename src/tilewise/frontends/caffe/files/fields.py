"""Which fields a text of protobuf's text format has, and where: for messages about unknown and wrong fields.

protobuf's own parser reads the values. It says at which line and column it failed, but not in which field of which
layer, and it skips unknown fields without saying which ones. So the text is gone through once more, by its words alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from typing import Any

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["DEEPEST", "Field", "Fields", "fields_of"]

DEEPEST = 50
"""Messages nest no deeper. Caffe's own nest 5 deep."""
MOST = 200_000
"""Fields of a text at most. Large published networks have some ten thousand."""

_TOKEN = re.compile(
    r"""(?:\s+|\#[^\n]*)+
    |(?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*')
    |(?P<word>[-+]?[\w.]+(?:(?<=[eE])[-+][\w.]+)?|-)
    |(?P<mark>[{}<>\[\]:;,])""",
    re.VERBOSE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field as it stands in a text: where it starts, its name after those of the messages around it, and what it is.

    ``descriptor`` is protobuf's, and ``None`` for a field that its message does not have. ``inside_unknown`` is true
    where a message around it is unknown as well.
    """

    start: int
    name: str
    around: str
    descriptor: Any
    inside_unknown: bool

    def __str__(self) -> str:
        return f"{self.around}, {self.name}" if self.around else self.name


class Fields:
    """All fields of a text, in the order in which they start."""

    def __init__(self, text: str, found: list[Field]) -> None:
        self._found = found
        self._starts = [field.start for field in found]
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def at(self, line: int, column: int) -> Field | None:
        """The last field that starts before a place, both numbers counted from 1."""
        if not 1 <= line <= len(self._lines):
            return self.last()
        index = bisect.bisect_right(self._starts, self._lines[line - 1] + column - 1)
        return self._found[index - 1] if index else None

    def last(self) -> Field | None:
        """The field that starts last."""
        return self._found[-1] if self._found else None

    def line(self, field: Field) -> int:
        """The line at which a field starts, counted from 1."""
        return bisect.bisect_right(self._lines, field.start)

    def unknown(self) -> list[Field]:
        """The fields that their messages do not have, without those inside of them."""
        return [field for field in self._found if field.descriptor is None and not field.inside_unknown]


@dataclasses.dataclass(slots=True)
class _Frame:
    """A message that is open at some place of the text. ``list_of`` is the field whose list of messages it is in."""

    descriptor: Any
    label: str
    list_of: Field | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.label} {self.name!r}" if self.name else self.label


class _Scan:
    """Goes through the words of a text and keeps which messages are open."""

    def __init__(self, text: str, descriptor: Any, source: str) -> None:
        self.text, self.source = text, source
        self.frames = [_Frame(descriptor, "")]
        self.found: list[Field] = []
        self.field: Field | None = None
        self.after_value = self.in_list = False

    def run(self) -> None:
        """Stop at the first word that cannot stand where it does: protobuf's parser says what is wrong there."""
        place = 0
        while place < len(self.text):
            match = _TOKEN.match(self.text, place)
            if match is None or not self._take(match):
                return
            place = match.end()

    def _take(self, match: re.Match[str]) -> bool:
        kind, word = match.lastgroup, match[0]
        if kind is None or (self.after_value and kind == "string"):
            return True
        self.after_value = False
        if kind == "mark":
            return self._mark(word, match.start())
        if self.field is None:
            if kind == "word":
                self._begin(word, match.start())
            return kind == "word"
        if kind == "string" and self.field.name == "name":
            self.frames[-1].name = word[1:-1]
        if not self.in_list and word != "-":
            self.field, self.after_value = None, True
        return True

    def _mark(self, mark: str, place: int) -> bool:
        if mark in "{<":
            return self.field is not None and self._open(self.field, place)
        if mark in "}>":
            return self.field is None and self._close()
        if mark == "[":
            self.in_list = self.field is not None
            return self.in_list
        if mark == "]":
            self.in_list, self.field = False, None
        return True

    def _begin(self, name: str, place: int) -> None:
        frame = self.frames[-1]
        known = None if frame.descriptor is None else frame.descriptor.fields_by_name.get(name)
        around = ", ".join(str(frame) for frame in self.frames[1:])
        # A message without any fields is known by its name alone: nothing is said of what it holds.
        unknown = frame.descriptor is None or not frame.descriptor.fields
        self.field = Field(place, name, around, known, unknown)
        self.found.append(self.field)
        if len(self.found) > MOST:
            raise CaffeError(f"{self.source} has over {MOST} fields; up to {MOST} would do")

    def _open(self, field: Field, place: int) -> bool:
        if len(self.frames) > DEEPEST:
            line = self.text.count("\n", 0, place) + 1
            raise CaffeError(
                f"{self.source}, line {line}: messages nest more than {DEEPEST} deep; Caffe's nest 5 deep at most"
            )
        message = None if field.descriptor is None else field.descriptor.message_type
        self.frames.append(_Frame(message, field.name, field if self.in_list else None))
        self.field, self.in_list = None, False
        return True

    def _close(self) -> bool:
        if len(self.frames) == 1:
            return False
        self.field = self.frames.pop().list_of
        self.in_list = self.field is not None
        return True


def fields_of(text: str, descriptor: Any, source: str) -> Fields:
    """The fields of a text that is to be a message of some descriptor, up to the first word that cannot be there.

    ``source`` names the text in messages. Raises :class:`CaffeError` where messages nest too deep.
    """
    scan = _Scan(text, descriptor, source)
    scan.run()
    return Fields(text, scan.found)
