"""protobuf's binary format, read in place: which fields a message has and where their values lie.

A caffemodel is one message of up to gigabytes. protobuf's own parser copies all of it, some of it twice, and refuses
more than 2 GiB. Here a message is a range of a buffer, its fields are found one after the other, and what is long is
never copied. Every length is checked against the range that it must lie in, so that a file that lies about a length
costs no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["BYTES", "FIXED32", "FIXED64", "VARINT", "Message", "encoded_varint", "key", "length_prefixed"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The kinds of values: whole numbers, 8 bytes, a length with that many bytes, 4 bytes."""
LONGEST_TEXT = 1 << 16
"""Bytes of the longest name that is read."""
_LONGEST_VARINT = 10
_SIZES = {FIXED64: 8, FIXED32: 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message that lies in ``buffer`` from byte ``start`` up to ``end``. ``source`` names the file in messages."""

    buffer: memoryview
    start: int
    end: int
    source: str

    def fields(self) -> Iterator[tuple[int, int, int, int]]:
        """The fields in their order, each as :meth:`field` has it."""
        place = self.start
        while place < self.end:
            field = self.field(place)
            yield field
            place = field[3]

    def field(self, place: int) -> tuple[int, int, int, int]:
        """The field at a place: its number, its kind, and where its value starts and ends.

        A field of kind ``VARINT`` has its value in place of the start. Raises
        :class:`~tilewise.frontends.caffe.errors.CaffeError` for bytes that no message can have.
        """
        tag, start = self.varint(place)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise self.wrong(place, f"a field has the number {number}")
        if kind == VARINT:
            value, end = self.varint(start)
            return number, kind, value, end
        if kind == BYTES:
            size, start = self.varint(start)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise self.wrong(place, f"a field is of kind {kind}, which Caffe's files do not have")
        if size > self.end - start:
            raise self.wrong(place, f"a field has {size} bytes where {self.end - start} are left")
        return number, kind, start, start + size

    def varint(self, place: int) -> tuple[int, int]:
        """The whole number, below 2**64, at a place, and the place after it."""
        value = shift = 0
        for end in range(place, min(place + _LONGEST_VARINT, self.end)):
            byte = self.buffer[end]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, end + 1
            shift += 7
        raise self.wrong(place, "a whole number does not end")

    def part(self, start: int, end: int) -> Message:
        """The message that lies in a range of this one."""
        return Message(self.buffer, start, end, self.source)

    def text(self, start: int, end: int) -> str:
        """The text that lies in a range, in UTF-8, or else in Latin-1 as in prototxt files."""
        if end - start > LONGEST_TEXT:
            raise self.wrong(start, f"a name has {end - start} bytes, over {LONGEST_TEXT}")
        data = bytes(self.buffer[start:end])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("latin-1")

    def wrong(self, place: int, reason: str) -> CaffeError:
        """The error to raise for something at a place of the file."""
        return CaffeError(f"{self.source}, byte {place}: {reason}; a whole file that Caffe wrote would do")


def encoded_varint(value: int) -> bytes:
    """A whole number as the format writes it; negative ones in 10 bytes."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def key(number: int, kind: int) -> bytes:
    """What stands before the value of a field."""
    return encoded_varint(number << 3 | kind)


def length_prefixed(number: int, data: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return key(number, BYTES) + encoded_varint(len(data)) + data
