"""Files of layers, one a line, as ``--batch=`` of oneDNN's benchdnn reads them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.cli.given.early import check_target, kind_of_text
from tilewise.cli.program import BadInput
from tilewise.cli.settings import DTYPES, LAYOUTS, OPS, PASSES, PRECISIONS, ROLES, TASKS, Asked
from tilewise.frontends.names import BUILTIN

__all__ = ["Line", "is_batch_file", "read_batch"]

MOST_BYTES = 1 << 20
"""Most bytes of a file of layers."""
DRIVERS = ("--conv", "--matmul", "--rnn", "--pool", "--lrn")
"""benchdnn's names of kinds of layers. A layer's text says its kind here."""
TYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}
TAGS = {"any": "contiguous", "abx": "contiguous", "axb": "channels_last"}
DIRECTIONS = {
    "FWD_D": "fprop", "FWD_B": "fprop", "FWD_I": "fprop", "BWD_D": "dgrad", "BWD_W": "wgrad", "BWD_WB": "wgrad",
}  # fmt: skip
"""benchdnn's directions of convolutions, and the passes that they are. A bias is a word of the layer's text here."""


@dataclass(frozen=True, slots=True)
class Line:
    """A layer of a file: the number of its line, its text, and what holds for it."""

    number: int
    text: str
    settings: Asked
    passes: tuple[str, ...]


def is_batch_file(target: str) -> bool:
    """Whether ``target`` names a file of layers, and no layer or network.

    A text that looks like a path is meant as one: where there is no such file, reading it says so.
    """
    if kind_of_text(target) or target in BUILTIN or target.endswith((".prototxt", ".py")):
        return False
    return Path(target).is_file() or target.endswith(".txt")


def read_batch(path: str, settings: Asked, passes: tuple[str, ...]) -> list[Line]:
    """The layers of the file at ``path``, on whose lines options may stand that hold from there on.

    ``settings`` and ``passes`` hold until then, and after ``--reset``. Raises :class:`BadInput` naming the line at
    fault.
    """
    lines: list[Line] = []
    state = _State(settings, passes)
    for number, words in _words(path):
        try:
            for text in state.take(words):
                if not kind_of_text(text):
                    raise BadInput(f"{text!r:.80} is not a layer; text such as mb32ic64ih28oc64kh3ph1 would do")
                check_target(text, state.settings, state.passes)
                lines.append(Line(number, text, state.settings, state.passes))
        except BadInput as error:
            raise BadInput(f"{path}, line {number}: {error.message}") from error
    if not lines:
        raise BadInput(f"{path}: there is no layer in it; one a line, such as mb32ic64ih28oc64kh3ph1, would do")
    return lines


def _words(path: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each line that has some, without comments, and the line's number. Raises :class:`BadInput`."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise BadInput(f"{path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path!r} is no text in UTF-8; a list of layers, one a line, would do") from error
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path!r} has more than {MOST_BYTES} bytes; a list of layers, one a line, would do")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: a quotation mark has no other one") from error
        if words:
            yield number, words


class _State:
    """The options that hold at a place of a file."""

    def __init__(self, settings: Asked, passes: tuple[str, ...]) -> None:
        self._first = settings, passes
        self.settings, self.passes = settings, passes

    def take(self, words: list[str]) -> Iterator[str]:
        """Take the options among ``words``; yields the others, the layers. Raises :class:`BadInput`."""
        for word in words:
            if not word.startswith("--"):
                yield word
                continue
            name, _, value = word.partition("=")
            if name == "--reset":
                self.settings, self.passes = self._first
            elif name not in DRIVERS:
                self._set(name, value)

    def _set(self, name: str, value: str) -> None:
        """Set one option. Raises :class:`BadInput` for one that there is not, or a value that makes no sense."""
        setters: dict[str, Callable[[str, str], None]] = {
            "--mb": self._batch,
            "--dir": lambda name, value: self._passes(name, value, DIRECTIONS),
            "--pass": lambda name, value: self._passes(
                name, value, {word: word for word in (*PASSES, *ROLES, *OPS, *TASKS)}
            ),
            "--dt": lambda name, value: self._choose(name, value, "dtype", TYPES),
            "--dtype": lambda name, value: self._choose(name, value, "dtype", {word: word for word in DTYPES}),
            "--layout": lambda name, value: self._choose(name, value, "layout", {word: word for word in LAYOUTS}),
            "--precision": lambda name, value: self._choose(
                name, value, "precision", {word: word for word in PRECISIONS}
            ),
            **{tag: lambda name, value: self._choose(name, value, "layout", TAGS) for tag in ("--stag", "--dtag")},
        }
        if name not in setters:
            known = ", ".join((*setters, "--reset", *DRIVERS))
            raise BadInput(f"{name}: no option of a line; {known} would do")
        setters[name](name, value)

    def _batch(self, name: str, value: str) -> None:
        """Set the mini-batch; 0 is what each layer says, as in benchdnn."""
        if not value.isdecimal() or len(value) > 18:
            raise BadInput(f"{name}={value!r:.40}: a whole number would do, 0 for the layer's own")
        self.settings = replace(self.settings, batch=int(value) or None)

    def _passes(self, name: str, value: str, known: dict[str, str]) -> None:
        """Set the passes, several with commas between them."""
        words = value.split(",")
        for word in words:
            if word not in known:
                raise BadInput(f"{name}={value!r:.80}: one of {', '.join(known)} would do, or several with commas")
        self.passes = tuple(dict.fromkeys(known[word] for word in words))

    def _choose(self, name: str, value: str, option: str, known: dict[str, str]) -> None:
        """Set one of the settings. benchdnn may give it for each tensor: they must be equal here."""
        words = set(value.split(":"))
        if len(words) != 1 or not words <= known.keys():
            raise BadInput(f"{name}={value!r:.80}: one of {', '.join(known)} would do, the same for all tensors")
        chosen: dict[str, Any] = {option: known[words.pop()]}
        self.settings = replace(self.settings, **chosen)
