"""Kinds of options: what values one has, how they are checked, and how they are read from an environment variable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.plan import parse_bytes

__all__ = [
    "Choice",
    "Count",
    "Flag",
    "FlagOrDefault",
    "Kind",
    "MemorySize",
    "Names",
    "Number",
    "Share",
    "Size",
    "memory_share",
]


class Kind:
    """What values an option has: how one is checked, and how it is read from an environment variable's text."""

    takes = ""
    """What a variable may hold, in words."""

    def check(self, name: str, value: Any) -> None:
        """Raise ``ValueError`` naming the option ``name``, the value and what would do."""
        raise NotImplementedError

    def read(self, name: str, text: str) -> Any:
        """The value that the variable ``name`` holds as ``text``. Raises ``ValueError`` as :meth:`check` does."""
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words, the words of a ``Literal`` type."""

    choices: tuple[str, ...]

    @property
    def takes(self) -> str:  # type: ignore[override]
        """What a variable may hold, in words."""
        *most, last = (f"`{choice}`" for choice in self.choices)
        return f"{', '.join(most)} or {last}"

    def check(self, name: str, value: Any) -> None:
        if value not in self.choices:
            raise ValueError(f"{name}={value!r}: one of {', '.join(self.choices)} would do")

    def read(self, name: str, text: str) -> str:
        self.check(name, text)
        return text


@dataclass(frozen=True)
class Flag(Kind):
    """``True`` or ``False``."""

    takes = "1 or 0"

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80}: True or False would do")

    def read(self, name: str, text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError(f"{name}={text!r}: 1 or 0 would do")
        return text == "1"


class FlagOrDefault(Flag):
    """As :class:`Flag`, or ``None`` where functions have different defaults."""

    def check(self, name: str, value: Any) -> None:
        if value is not None:
            super().check(name, value)


@dataclass(frozen=True)
class Size(Kind):
    """A number of bytes, text with a unit, or ``None`` for no limit."""

    takes = "a size such as `64MiB`, or `none`"

    def check(self, name: str, value: Any) -> None:
        if value is not None:
            parse_bytes(value, name)

    def read(self, name: str, text: str) -> int | None:
        return None if text == "none" else parse_bytes(text, name)


@dataclass(frozen=True)
class MemorySize(Kind):
    """As :class:`Size`, or a share of a device's memory. No variable holds one."""

    def check(self, name: str, value: Any) -> None:
        if value is not None and memory_share(value, name) is None:
            parse_bytes(value, name)


@dataclass(frozen=True)
class Number(Kind):
    """A limit of error: a positive number, or ``None`` for the planner's own."""

    takes = "a positive number such as `1e-5`"

    def check(self, name: str, value: Any) -> None:
        from tilewise.planner.options import Options

        Options(error_limit=value)

    def read(self, name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={text!r}: a positive number would do, such as 1e-5")
        return value


@dataclass(frozen=True)
class Share(Kind):
    """A share of something: above 0, and 1 at the most."""

    takes = "a share such as `0.02`"

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise ValueError(f"{name}={value!r:.80}: a number above 0 and up to 1 would do, such as 0.02")

    def read(self, name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise ValueError(f"{name}={text!r:.80}: a number above 0 and up to 1 would do, such as 0.02")
        return value


@dataclass(frozen=True)
class Count(Kind):
    """A whole number, 0 included; ``such_as`` is an example of one."""

    such_as: int
    takes = "a whole number"

    def check(self, name: str, value: Any) -> None:
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r}: a whole number would do, 0 to plan nothing")

    def read(self, name: str, text: str) -> int:
        try:
            return int(text if text.isdecimal() else "")
        except ValueError as error:  # also of more digits than Python reads
            raise ValueError(f"{name}={text[:80]!r}: a whole number would do, such as {self.such_as}") from error


@dataclass(frozen=True)
class Names(Kind):
    """Names with commas between them, each of ``one`` thing, which planning's ``option`` checks."""

    option: str
    one: str
    takes: str

    def check(self, name: str, value: Any) -> None:
        from tilewise.planner.options import Options

        Options(**{self.option: value})

    def read(self, name: str, text: str) -> tuple[str, ...]:
        names = tuple(word.strip() for word in text.split(","))
        try:
            self.check(name, names)
        except ValueError as error:
            raise ValueError(f"{name}={text!r}: {error}") from error
        return names


def memory_share(limit: object, argument: str) -> float | None:
    """The share of a device's memory that text such as ``"80%"`` asks for; ``None`` for a limit of another form.

    Raises ``ValueError`` naming ``argument``, the value and what would do.
    """
    if isinstance(limit, float):
        raise ValueError(f"{argument}={limit}: a share such as '80%', or a size such as '16GiB', would do")
    if not isinstance(limit, str) or not limit.strip().endswith("%"):
        return None
    try:
        share = float(limit.strip()[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"{argument}={limit!r}: a share above 0% and up to 100%, or a size such as '16GiB', would do")
    return share
