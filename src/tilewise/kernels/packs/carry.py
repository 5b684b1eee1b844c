"""Making packs of what is compiled here, and copying what a pack holds into this user's own caches.

A pack is code: what is imported runs later with the user's rights. So it is imported only where the caller trusts it.
Everything in it is verified before anything is written, and nothing is loaded while it is imported.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.kernels.building.noted import noted
from tilewise.kernels.packs import here
from tilewise.kernels.packs.archive import Pack, opened, write
from tilewise.kernels.packs.manifest import KERNELS, WISDOM, Entry, Manifest, PackError
from tilewise.kernels.packs.places import Place, code_places
from tilewise.kernels.packs.triton_place import TritonCache
from tilewise.machine import trusted
from tilewise.plan import format_bytes

__all__ = ["Imported", "Step", "export", "import_pack", "kept", "not_in", "obstacle", "read", "used", "wisdom_of"]

Step = Callable[[str], None]
"""Told the name of each next file."""


def _no_step(_: str) -> None:
    """Tell nobody."""


def _places() -> dict[str, Place]:
    """The place of each kind of code."""
    every: tuple[Place, ...] = (*code_places(), TritonCache())
    return {place.kind: place for place in every}


def kept() -> Iterator[str]:
    """The names of all kernels of this package that lie in the caches of this user.

    Raises ``OSError`` and :class:`~tilewise.machine.trusted.Untrusted` where they cannot be looked at.
    """
    for place in _places().values():
        yield from place.names()


def used() -> Iterator[str]:
    """The names of the kernels that this process has compiled or loaded."""
    for name in noted():
        if name.startswith("triton/"):
            yield from TritonCache().of_entry(name.partition("/")[2])
        else:
            yield name


def not_in(manifest: Manifest) -> int:
    """How many kernels this process has compiled or loaded that a pack does not hold."""
    held = {part for entry in manifest.entries for part in (entry.path, entry.path.rpartition("/")[0])}
    return sum(name not in held for name in noted())


def read(name: str) -> tuple[Entry, bytes] | None:
    """The entry called ``name``, whose size and hash are not worked out, and its content; ``None`` without any."""
    return _places()[name.partition("/")[0]].read(name)


def obstacle(entry: Entry, manifest: Manifest, architectures: Sequence[str]) -> str:
    """Why an entry of a pack is of no use on this machine with GPUs of ``architectures``; empty where it is."""
    if entry.kind == "wisdom":
        return ""
    return _made_elsewhere(manifest) or _places()[entry.kind].obstacle(entry, manifest, architectures)


def export(path: Path, names: Iterable[str], targets: Sequence[str] = (), *, step: Step = _no_step,
           wisdom: bytes | None = None) -> Manifest:  # fmt: skip
    """Write a pack of the kernels called ``names``, of :func:`kept` or :func:`used`, and return what it holds.

    Of kernels those of ``targets`` are taken, without any all. What is not whole or may have been written by others is
    left out. ``wisdom`` is a document to carry beside them. Raises ``OSError`` where the file cannot be written, and
    :class:`~tilewise.kernels.packs.manifest.PackError` where it would hold no kernels and no wisdom, or too many.
    """
    contents = _contents(names, targets, step)
    if wisdom is not None:
        contents = _followed_by(contents, (Entry("wisdom", "any", WISDOM, 0, ""), wisdom))
    first = next(contents, None)
    if first is None:
        raise PackError(f"{path}: there are no kernels to write; planning or 'tilewise kernels build' compiles some")
    return write(path, here.head(), _followed_by(iter([first]), *contents))


def _followed_by(first: Iterator[tuple[Entry, bytes]], *more: tuple[Entry, bytes]) -> Iterator[tuple[Entry, bytes]]:
    """What ``first`` gives and then ``more``."""
    yield from first
    yield from more


def _contents(names: Iterable[str], targets: Sequence[str], step: Step) -> Iterator[tuple[Entry, bytes]]:
    """Entries with their contents. Of Triton's a file is taken with the one that it belongs to."""
    places, pending = _places(), dict[str, tuple[Entry, bytes]]()
    for name in dict.fromkeys(names):
        step(name)
        found = places[name.partition("/")[0]].read(name)
        if found is None or (targets and found[0].kind in KERNELS and found[0].target not in targets):
            continue
        if found[0].kind != "triton":
            yield found
            continue
        stem = name.rpartition(".")[0]
        other = pending.pop(stem, None)
        if other is None:
            pending[stem] = found
        else:
            yield from (other, found)


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of an import.

    ``written`` kernels are new here and ``kept`` were here already. ``left_out`` counts the files of a pack that are of
    no use here, by the reason.
    """

    written: int
    kept: int
    left_out: dict[str, int]


def import_pack(path: Path, *, trust: bool, architectures: Sequence[str] = (), step: Step = _no_step) -> Imported:
    """Copy the kernels of a pack into this user's caches, where planning and programs then find them.

    With ``trust`` the caller says that code of whoever made the pack may run here. ``architectures`` are GPUs, such as
    ``sm_90``, whose kernels are wanted although there is none here. All of the pack is verified before anything is
    written. Of equal kernels the one here stays. ``step`` is told each file, once as it is verified and once as it is
    written.

    Raises :class:`~tilewise.kernels.packs.manifest.PackError` for a file that is no pack or is damaged, without
    ``trust``, and for a pack of other sources or of which nothing is for this machine; ``OSError`` where the file
    cannot be read or the caches cannot be written; :class:`~tilewise.machine.trusted.Untrusted` where others may write
    these.
    """
    with opened(path) as pack:
        groups = _by_kernel(pack.manifest)
        if not groups:
            raise PackError("holds no kernels, wisdom alone; 'tilewise wisdom import' would do")
        if not trust:
            count = format_bytes(sum(entry.size for entries in groups.values() for entry in entries))
            raise PackError(f"holds code ({count}), which runs here with your rights; --trust would take it, where you "
                            "trust whoever made it")  # fmt: skip
        wanted, left_out = _fitting(
            pack.manifest, groups, tuple(dict.fromkeys((*here.architectures(), *architectures)))
        )
        _verify(pack, step)
        _require_room(wanted)
        written = sum(_store(pack, entries, step) for entries in wanted)
        return Imported(written, len(wanted) - written, left_out)


def _by_kernel(manifest: Manifest) -> dict[str, list[Entry]]:
    """The files of each kernel, which are of use together alone."""
    groups: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        if entry.kind != "wisdom":
            whole = entry.path.rpartition(".")[0] if entry.kind == "triton" else entry.path
            groups.setdefault(whole, []).append(entry)
    return groups


def _fitting(
    manifest: Manifest, groups: dict[str, list[Entry]], architectures: Sequence[str]
) -> tuple[list[list[Entry]], dict[str, int]]:
    """The kernels that are of use here, and how many are not by the reason. Raises :class:`PackError` where none is."""
    if reason := _made_elsewhere(manifest):
        raise PackError(reason)
    reasons: dict[tuple[str, str, str], str] = {}
    left_out: Counter[str] = Counter()
    wanted = []
    for entries in groups.values():
        kind, target, path = entries[0].kind, entries[0].target, entries[0].path
        asked = kind, target, path if kind == "native" else ""  # each native module is a target of its own
        if asked not in reasons:
            reasons[asked] = obstacle(entries[0], manifest, architectures)
        if reasons[asked]:
            left_out[reasons[asked]] += 1
        else:
            wanted.append(entries)
    kernels = [entries for entries in wanted if entries[0].kind in KERNELS]
    if left_out and not kernels:
        raise PackError(f"holds nothing for this machine: {'; '.join(left_out)}")
    return wanted, dict(left_out)


def _made_elsewhere(manifest: Manifest) -> str:
    """Why nothing of a pack is looked for by this version of tilewise; empty where it is of the same."""
    own = here.head()
    if manifest.tilewise == own.tilewise and manifest.sources == own.sources:
        return ""
    text = f"tilewise {manifest.tilewise}, and here is {own.tilewise}"
    if manifest.tilewise == own.tilewise:
        text = f"a tilewise {manifest.tilewise} whose kernels are others than those here"
    return f"was made by {text}, which would not look for it; a pack of the same version would do"


def _verify(pack: Pack, step: Step) -> None:
    """Verify all of the pack, also what is not wanted: a pack that is damaged anywhere is not used."""
    places = _places()
    for entry in pack.manifest.entries:
        step(entry.path)
        content = pack.content(entry)
        if entry.kind != "wisdom":
            places[entry.kind].check(entry, content)


def _require_room(wanted: Iterable[Sequence[Entry]]) -> None:
    """Raise ``OSError`` where a disk has not the room for all that is wanted, before any of it is written."""
    places, needed = _places(), Counter[Path]()
    for entries in wanted:
        place = places[entries[0].kind].folder()
        needed[next(parent for parent in (place, *place.parents) if parent.is_dir())] += sum(e.size for e in entries)
    for folder, size in needed.items():
        if size > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{folder} has {format_bytes(free)} of room, and {format_bytes(size)} are needed")


def _store(pack: Pack, entries: Sequence[Entry], step: Step) -> bool:
    """Write one kernel, verified once more as it is read; whether it is new here."""
    step(entries[0].path)
    place = _places()[entries[0].kind]
    try:
        return place.store([(entry, pack.content(entry)) for entry in entries])
    except trusted.Untrusted as error:
        raise OSError(str(error)) from error


def wisdom_of(path: Path) -> bytes | None:
    """The wisdom that a pack carries, ``None`` where it has none. It is data, and is checked where it is read.

    Raises as :func:`import_pack`.
    """
    with opened(path) as pack:
        for entry in pack.manifest.entries:
            if entry.kind == "wisdom":
                return pack.content(entry)
    return None
