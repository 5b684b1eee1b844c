"""What a pack says it holds. Whatever it says is checked before anything in it is looked at."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "FORMAT",
    "KERNELS",
    "LIMITS",
    "MANIFEST",
    "MOST_BYTES",
    "MOST_ENTRIES",
    "MOST_MANIFEST",
    "WISDOM",
    "Entry",
    "Manifest",
    "PackError",
]

FORMAT = 1
"""Version of the format that this version of tilewise reads and writes."""
KIND = "tilewise kernels"
"""What a manifest says it is."""
MANIFEST = "manifest.json"
"""The name of the manifest in a pack."""
WISDOM = "wisdom.json"
"""The name of the wisdom that a pack may carry beside its kernels. It is data."""

MOST_ENTRIES = 1 << 15
"""Most entries of a pack: a hundred times those of a built-in network."""
MOST_BYTES = 1 << 31
"""Most bytes of all entries together, and of the file."""
MOST_MANIFEST = 1 << 24
LIMITS = {"cpu": 1 << 24, "triton": 1 << 24, "cuda": 1 << 24, "native": 1 << 24, "wisdom": 1 << 29}
"""Most bytes of one entry, by kind: many times the largest kernel's."""
NAMES = {
    "cpu": r"cpu/[a-z0-9_]{1,120}-[0-9a-f]{24}\.o",
    "triton": r"triton/[A-Z2-7]{52}/[A-Za-z_]\w{0,149}\.(json|cubin)",
    "cuda": r"cuda/[0-9a-f]{64}\.cubin",
    "native": r"native/(launches|planned_call|program_call)-[0-9a-f]{24}\.so",
    "wisdom": r"wisdom\.json",
}
"""The names that entries of each kind may have. None leads out of a folder."""
KERNELS = ("cpu", "triton", "cuda")
"""Kinds of kernels; ``native`` are the modules that launch them or run programs of them, ``wisdom`` is data."""
TARGET = re.compile(r"(cpu:[0-9a-f]{24}|sm_[0-9]{2,3}|native:[0-9a-f]{24}|any)", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
LONGEST_TEXT = 2000
"""Most characters of a text: the features of a processor take some 500."""
MOST_VERSIONS = 32


class PackError(ValueError):
    """A file is no pack, is damaged, or is not for this machine. The message says which and what would do."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One file of a pack.

    ``kind`` is a key of :data:`LIMITS`, ``target`` what it was compiled for: ``sm_90``, or ``cpu:`` and a hash of all
    that a CPU's code depends on. ``size`` is in bytes, ``sha256`` the hash of the content in hexadecimal digits.
    """

    kind: str
    target: str
    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pack says: who made it, from which sources, with which compilers, and all of its entries.

    ``sources`` is a hash of the text of all kernels. ``versions`` are those of the packages that compiled them, and of
    what they were compiled for, by name.
    """

    tilewise: str
    sources: str
    versions: dict[str, str]
    entries: tuple[Entry, ...]

    def to_bytes(self) -> bytes:
        """The manifest as JSON, the same for the same entries in any order."""
        head = {"kind": KIND, "format": FORMAT, "tilewise": self.tilewise, "sources": self.sources}
        entries = [asdict(entry) for entry in sorted(self.entries)]
        return json.dumps({**head, "versions": self.versions, "entries": entries}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest that :meth:`to_bytes` wrote. Raises :class:`PackError` for anything else."""
        try:
            document = json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_members)
        except (ValueError, RecursionError) as error:
            raise PackError(f"{MANIFEST}: is not JSON ({error})") from error
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise PackError(f"{MANIFEST}: says nothing of kind {KIND!r}; what 'tilewise kernels build' wrote would do")
        if type(document.get("format")) is not int or document["format"] != FORMAT:
            raise PackError(f"{MANIFEST}: format={document.get('format')!r:.80}; this version reads format {FORMAT}")
        expected = {"kind", "format", "tilewise", "sources", "versions", "entries"}
        if document.keys() != expected:
            raise PackError(f"{MANIFEST}: has {_names(document)}, where {_names(expected)} would do")
        versions, listed = document["versions"], document["entries"]
        if not isinstance(versions, dict) or len(versions) > MOST_VERSIONS:
            raise PackError(f"{MANIFEST}: versions={versions!r:.80}: an object of up to {MOST_VERSIONS} texts would do")
        if not isinstance(listed, list) or len(listed) > MOST_ENTRIES:
            raise PackError(f"{MANIFEST}: entries: a list of at most {MOST_ENTRIES} would do")
        checked = {_text("a version's name", name): _text(name, version) for name, version in versions.items()}
        sources = _matching("sources", document["sources"], DIGEST)
        entries = tuple(_entry(number, item) for number, item in enumerate(listed))
        _check_together(entries)
        return cls(_text("tilewise", document["tilewise"]), sources, checked, entries)


def _entry(number: int, item: object) -> Entry:
    """An entry, checked by itself."""
    where = f"entries[{number}]"
    names = {field.name for field in fields(Entry)}
    if not isinstance(item, dict) or item.keys() != names:
        raise PackError(f"{MANIFEST}: {where}: an object of {_names(names)} would do")
    kind = item["kind"]
    if not isinstance(kind, str) or kind not in LIMITS:
        raise PackError(f"{MANIFEST}: {where}: kind={kind!r:.80}; one of {', '.join(LIMITS)} would do")
    path = _matching(f"{where}: path", item["path"], re.compile(NAMES[kind], re.ASCII))
    target = _matching(f"{where}: target", item["target"], TARGET)
    families = {"cpu": "cpu:", "native": "native:", "wisdom": "any"}
    if not target.startswith(families.get(kind, "sm_")):
        raise PackError(f"{MANIFEST}: {where}: target={target!r} for the kind {kind!r}")
    size = item["size"]
    if type(size) is not int or not 0 < size <= LIMITS[kind]:
        raise PackError(f"{MANIFEST}: {where}: size={size!r:.80}; 1 to {LIMITS[kind]} bytes would do for {kind!r}")
    return Entry(kind, target, path, size, _matching(f"{where}: sha256", item["sha256"], DIGEST))


def _check_together(entries: Iterable[Entry]) -> None:
    """Check what no entry shows by itself. Raises :class:`PackError`."""
    counts = Counter(entry.path.casefold() for entry in entries)
    if twice := [path for path, count in counts.items() if count > 1]:
        raise PackError(f"{MANIFEST}: {twice[0]!r:.200} is there more than once")
    if (total := sum(entry.size for entry in entries)) > MOST_BYTES:
        raise PackError(f"{MANIFEST}: {total} bytes in all; at most {MOST_BYTES} would do")
    parts: dict[str, set[str]] = {}
    for entry in entries:
        if entry.kind == "triton":
            parts.setdefault(entry.path.rpartition(".")[0], set()).add(
                f"{entry.path.rpartition('.')[2]} {entry.target}"
            )
    folders = Counter(stem.rpartition("/")[0] for stem in parts)
    for stem, found in parts.items():
        target = next(iter(found)).partition(" ")[2]
        if found != {f"json {target}", f"cubin {target}"} or folders[stem.rpartition("/")[0]] > 1:
            raise PackError(f"{MANIFEST}: {stem}: one .json and one .cubin of one target would do")


def _text(name: str, value: object) -> str:
    """A short printable text."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT or not value.isprintable():
        raise PackError(f"{MANIFEST}: {name:.80}={value!r:.80}: a text of up to {LONGEST_TEXT} characters would do")
    return value


def _matching(name: str, value: object, pattern: re.Pattern[str]) -> str:
    """A text of a known form."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise PackError(f"{MANIFEST}: {name}={value!r:.200}: no known name; {pattern.pattern} would do")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which no member is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise PackError(f"{MANIFEST}: a member is there more than once")
    return found


def _refuse(name: str) -> None:
    raise PackError(f"{MANIFEST}: {name} is no JSON")


def _names(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(sorted(map(str, names)))[:200]
