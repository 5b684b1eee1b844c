"""What one run of a benchmark is given: a device, its options and the planner to use."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tilewise import solvers
from tilewise.plan import parse_bytes
from tilewise.planner import Options, Planner
from tilewise.planner.options import BATCH_SIZES, RIGORS
from tilewise.solvers import Solver
from tilewise.wisdom import Wisdom

if TYPE_CHECKING:
    from harness.result import Result

REPORT_EVERY_S = 2.0
T = TypeVar("T")


class BadInput(ValueError):
    """Something on the command line that cannot be; the message names it and says what would do."""


class NothingToMeasure(Exception):
    """This device, or this version of tilewise, lacks a side of the comparison; the message says which."""


class Deadline:
    """``passed`` from so many seconds on; never for 0."""

    def __init__(self, seconds: int) -> None:
        self._end = time.monotonic() + seconds if seconds else float("inf")

    @property
    def passed(self) -> bool:
        """Whether it is time to stop."""
        return time.monotonic() >= self._end


class Progress:
    """Says on stderr how far planning is, at most every two seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if done < total and now - self._last >= REPORT_EVERY_S:
            self._last = now
            print(f"  planning {done}/{total} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Settings:
    """``options`` are texts by name: a benchmark's defaults, then its quick ones, then the command line's.

    ``earlier`` is the document that an earlier run on the same machine left where this run's will go, for benchmarks
    that go on where they stopped, and ``keep`` saves what there is so far, lest a run that is ended has measured for
    nothing. ``beside`` are the documents that runs with other labels left, in which some benchmarks look for rows.
    """

    device: torch.device
    quick: bool
    fresh: bool
    options: Mapping[str, str]
    earlier: Mapping[str, Any] | None = None
    keep: Callable[[Result], None] = lambda result: None
    beside: Sequence[Mapping[str, Any]] = ()
    _kept: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    def text(self, name: str) -> str:
        """One option as given."""
        return self.options[name]

    def integer(self, name: str) -> int:
        """One option as a whole number, not negative. Raises :class:`BadInput`."""
        return _whole_number(name, self.options[name])

    def integers(self, name: str) -> list[int]:
        """A comma-separated option of whole numbers. Raises :class:`BadInput`."""
        return [_whole_number(name, word) for word in self.words(name)]

    def earlier_with(self, *names: str) -> Mapping[str, Any] | None:
        """:attr:`earlier` where these options were what they are now; one that it does not know does not count."""
        return self.earlier if self.earlier is not None and self._is_like(self.earlier, names) else None

    def found_with(self, *names: str) -> list[Mapping[str, Any]]:
        """:attr:`earlier` and what lies :attr:`beside` it, as far as these options were what they are now."""
        found = [*self.beside, *([] if self.earlier is None else [self.earlier])]
        return [document for document in found if self._is_like(document, names)]

    def _is_like(self, document: Mapping[str, Any], names: Sequence[str]) -> bool:
        return all(document["settings"].get(name, self.text(name)) == self.text(name) for name in names)

    def deadline(self) -> Deadline:
        """The option ``seconds``, counted from now on."""
        return Deadline(self.integer("seconds"))

    def size(self, name: str) -> int:
        """One option in bytes. Raises :class:`BadInput`."""
        return self.sizes(name)[self.options[name]]

    def sizes(self, name: str) -> dict[str, int]:
        """A comma-separated option of sizes: bytes by text. Raises :class:`BadInput`."""
        return {word: parse_size(name, word) for word in self.words(name)}

    def chosen(self, name: str, known: Mapping[str, T]) -> list[T]:
        """What a comma-separated option names, all of ``known`` when it is empty. Raises :class:`BadInput`."""
        words = self.words(name) or list(known)
        for word in words:
            if word not in known:
                raise BadInput(f"{name}={word!r}: one of {', '.join(known)} would do")
        return [known[word] for word in words]

    def solver(self) -> Solver:
        """The solver that the option of this name names. Raises :class:`BadInput`."""
        try:
            return solvers.get(self.text("solver"))
        except KeyError as error:
            raise BadInput(f"solver={self.text('solver')!r}: {error.args[0]}") from error

    def words(self, name: str) -> list[str]:
        """A comma-separated option."""
        return [word for word in self.options[name].split(",") if word]

    def wisdom(self) -> Wisdom:
        """The user's wisdom, or with ``fresh`` an empty one that lasts as long as this run."""
        if not self.fresh:
            return Wisdom()
        return Wisdom(self._folder() / "wisdom.sqlite3")

    @contextmanager
    def cache_directory(self) -> Iterator[None]:
        """Within it, the command line uses the wisdom that :meth:`wisdom` would give."""
        before = os.environ.get("TILEWISE_CACHE_DIR")
        if self.fresh:
            os.environ["TILEWISE_CACHE_DIR"] = str(self._folder())
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("TILEWISE_CACHE_DIR", None)
            else:
                os.environ["TILEWISE_CACHE_DIR"] = before

    def _folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="tilewise-benchmark-")
        self._kept.append(folder)
        return Path(folder.name)

    def planner(self) -> Planner:
        """A planner that says on stderr what it does."""
        return Planner(self.wisdom(), Progress())

    def planning(self, workspace: int | None = None, batch_sizes: str = "powers_of_two") -> Options:
        """Planning options with the rigor asked for."""
        rigor = self.chosen("rigor", {name: name for name in RIGORS})[0]
        return Options(workspace=workspace, batch_sizes=batch_sizes, rigor=rigor)

    def policies(self, name: str) -> list[str]:
        """A comma-separated option of batch-size policies. Raises :class:`BadInput`."""
        return self.chosen(name, {policy: policy for policy in BATCH_SIZES})

    def say(self, text: str) -> None:
        """One line on stderr."""
        print(text, file=sys.stderr, flush=True)


def _whole_number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise BadInput(f"{name}={text!r}: a whole number would do")
    return int(text)


def parse_size(name: str, text: str) -> int:
    """Bytes of a size with a unit. Raises :class:`BadInput` naming the option."""
    try:
        return parse_bytes(text, name)
    except ValueError as error:
        raise BadInput(str(error)) from error
