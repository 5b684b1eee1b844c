"""How much of what a pack, or the caches of this user, hold, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewise.kernels.packs import here
from tilewise.kernels.packs.archive import opened
from tilewise.kernels.packs.carry import kept, obstacle, read
from tilewise.kernels.packs.manifest import Entry

__all__ = ["Held", "held_here", "held_in"]


@dataclass(frozen=True, slots=True)
class Held:
    """Files of one kind for one target: their number and bytes, and why they are of no use here, empty where they are.

    ``kind`` is ``cpu``, ``triton``, ``cuda``, ``native`` or ``wisdom``; ``target`` such as ``sm_90``.
    """

    kind: str
    target: str
    files: int
    bytes: int
    obstacle: str = ""


def held_here() -> list[Held]:
    """What the caches of this user hold of this version's kernels.

    Raises ``OSError`` where they cannot be looked at.
    """
    found = (read(name) for name in kept())
    return _sums((entry, len(content), "") for entry, content in (one for one in found if one is not None))


def held_in(path: Path) -> list[Held]:
    """What a pack says it holds. Its content is not verified.

    Raises ``OSError`` and :class:`~tilewise.kernels.packs.manifest.PackError`.
    """
    with opened(path) as pack:
        manifest = pack.manifest
    return _sums((entry, entry.size, obstacle(entry, manifest, here.architectures())) for entry in manifest.entries)


def _sums(entries: Iterable[tuple[Entry, int, str]]) -> list[Held]:
    """One for each kind and target, with the sizes added up."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for entry, size, reason in entries:
        files, total = sums.get(key := (entry.kind, entry.target, reason), (0, 0))
        sums[key] = files + 1, total + size
    return [Held(kind, target, *numbers, reason) for (kind, target, reason), numbers in sorted(sums.items())]
