"""Triton's cache as a place of kernels: each is a folder with the machine code and what Triton needs to launch it.

Triton's own list of an entry's files holds absolute paths, so a pack has none: it is written anew for the files here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewise.kernels.building.noted import triton_entry
from tilewise.kernels.packs import here
from tilewise.kernels.packs.manifest import NAMES, Entry, Manifest, PackError
from tilewise.kernels.packs.places import other_architecture, other_version
from tilewise.machine import trusted

__all__ = ["TritonCache"]

PARTS = ("cubin", "json")
"""The files of an entry that Triton loads; the others are text for people."""
LOCATION, OURS = b'loc("', b"/tilewise/kernels/triton/"
"""How Triton tells the file that a kernel stands in."""
KEY = re.compile(r"[A-Z2-7]{52}", re.ASCII)


class TritonCache:
    """What Triton keeps of this package's kernels."""

    kind = "triton"

    def folder(self) -> Path:
        """The folder that entries are in. Raises ``OSError`` where there can be none."""
        from tilewise.kernels.triton.own_cache import folder

        return folder()

    def names(self) -> Iterator[str]:
        """The names of both files of each entry of a kernel of this package."""
        if importlib.util.find_spec("triton") is None:
            return
        wanted = kernel_names()
        for place in sorted(self.folder().glob("*")):
            if KEY.fullmatch(place.name) is None:
                continue
            for path in sorted(place.glob("*.cubin")):
                if path.stem in wanted and not _is_of_others(path.with_suffix(".source")):
                    yield from self.files(place.name, path.stem)

    def files(self, key: str, name: str) -> Iterator[str]:
        """The names in a pack of the files of the entry ``key``, of the kernel ``name``."""
        found = [f"triton/{key}/{name}.{part}" for part in PARTS]
        if all(re.fullmatch(NAMES["triton"], one, re.ASCII) for one in found):
            yield from found

    def of_entry(self, key: str) -> Iterator[str]:
        """The names of the files of the entry ``key``, which this process has compiled or loaded."""
        for path in sorted((self.folder() / key).glob("*.cubin")):
            yield from self.files(key, path.stem)

    def read(self, name: str) -> tuple[Entry, bytes] | None:
        """As :meth:`~tilewise.kernels.packs.places.Place.read`; both files of an entry must be sound."""
        _, key, file = name.split("/")
        stem = file.partition(".")[0]
        import triton

        try:
            content = trusted.read(self.folder() / key / file)
            metadata = trusted.read(self.folder() / key / f"{stem}.json")
            told = self._told(key, stem, metadata)
            if json.loads(metadata).get("triton_version") != triton.__version__:
                return None  # what this version would not look for
        except (OSError, trusted.Untrusted, PackError):
            return None
        return Entry("triton", told, name, 0, ""), content

    def obstacle(self, entry: Entry, manifest: Manifest, architectures: Sequence[str]) -> str:
        """As :meth:`~tilewise.kernels.packs.places.Place.obstacle`."""
        if entry.target not in architectures:
            return other_architecture(entry.target, architectures)
        return other_version("triton", manifest)

    def check(self, entry: Entry, content: bytes) -> None:
        """As :meth:`~tilewise.kernels.packs.places.Place.check`."""
        _, key, file = entry.path.split("/")
        name, _, part = file.partition(".")
        target = here.architecture_of(content) if part == "cubin" else self._told(key, name, content)
        if target != entry.target:
            raise PackError(f"{entry.path}: is for {target or 'no GPU'}, and says {entry.target}")

    @staticmethod
    def _told(key: str, name: str, content: bytes) -> str:
        """The architecture that an entry's metadata tell. Raises :class:`PackError` where they are of another entry."""
        try:
            metadata: Any = json.loads(content)
            target = metadata["target"]
            same = triton_entry(metadata["hash"]) == key and metadata["name"] == name
            if not same or target["backend"] != "cuda" or type(target["arch"]) is not int:
                raise ValueError("they are of another kernel, or not for CUDA")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PackError(f"triton/{key}/{name}.json: are no metadata of this entry ({error})") from error
        return f"sm_{target['arch']}"

    def store(self, entries: Sequence[tuple[Entry, bytes]]) -> bool:
        """As :meth:`~tilewise.kernels.packs.places.Place.store`.

        The list of files comes last: Triton takes an entry without it for none.
        """
        place = self.folder() / entries[0][0].path.split("/")[1]
        files = {place / entry.path.rpartition("/")[2]: content for entry, content in entries}
        paths = {path.name: str(path) for path in files}
        group = place / next(f"__grp__{name}" for name in paths if name.endswith(".json"))
        if self._is_listed(group, paths) and all(_has(path, content) for path, content in files.items()):
            return False
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            trusted.require_file(group)
            group.unlink()  # nobody loads files of two entries while they are exchanged
        for path, content in files.items():
            trusted.write(path, content)
        trusted.write(group, json.dumps({"child_paths": paths}).encode())
        return True

    @staticmethod
    def _is_listed(group: Path, paths: dict[str, str]) -> bool:
        """Whether Triton's list of an entry names these files, beside others that it may have."""
        try:
            return bool(paths.items() <= json.loads(trusted.read(group))["child_paths"].items())
        except (OSError, trusted.Untrusted, ValueError, TypeError, KeyError, AttributeError):
            return False


def _is_of_others(source: Path) -> bool:
    """Whether the text that Triton keeps beside a kernel says that it stands in another package's file.

    Kernels of any package may have equal names. What a pack has brought has no such text.
    """
    try:
        text = trusted.read(source)
    except (OSError, trusted.Untrusted):
        return False
    return LOCATION in text and OURS not in text


def _has(path: Path, content: bytes) -> bool:
    """Whether a file has this content already. One that cannot be trusted has not."""
    try:
        return trusted.read(path) == content
    except (OSError, trusted.Untrusted):
        return False


@functools.cache
def kernel_names() -> frozenset[str]:
    """The names of this package's kernels, read from its text: Triton need not be imported for that."""
    found = set()
    for path in (Path(__file__).parents[1] / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return frozenset(found)
