"""Cut a release: set its version and date wherever they stand, so that the commit can be tagged.

    python -m tools.cut_release 0.1.0 --date 2026-11-28

The version goes to ``src/tilewise/version.py`` and ``CITATION.cff``. In ``CHANGELOG.md`` what is under *Unreleased*
moves under the version, and an empty *Unreleased* stays above it. Nothing is written unless all of it can be.
CONTRIBUTING has the steps before and after, under *Releasing*.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = Path("src/tilewise/version.py")
CITATION = Path("CITATION.cff")
CHANGELOG = Path("CHANGELOG.md")
UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """The release cannot be cut; the message says why and what would do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Cut the release. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Set a release's version and date wherever they stand.")
    parser.add_argument("version", help="three numbers, such as 0.1.0")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="such as 2026-11-28 (default: today)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        changed = cut(options.root, options.version, options.date)
    except ReleaseError as error:
        print(f"cut_release: {error}", file=sys.stderr)
        return 1
    for path, text in changed.items():
        (options.root / path).write_text(text, "utf-8")
        print(f"wrote {path}")
    return 0


def cut(root: Path, version: str, date: str) -> dict[Path, str]:
    """New contents of the files that a release changes, below ``root``. Raises :class:`ReleaseError`."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ReleaseError(f"version={version!r}: three numbers such as 0.1.0 would do")
    if not is_day(date):
        raise ReleaseError(f"--date {date!r}: a day such as 2026-11-28 would do")
    texts = {path: (root / path).read_text("utf-8") for path in (VERSION_FILE, CITATION, CHANGELOG)}
    return {
        VERSION_FILE: with_version(texts[VERSION_FILE], version),
        CITATION: cited(texts[CITATION], version, date),
        CHANGELOG: released(texts[CHANGELOG], version, date),
    }


def is_day(text: str) -> bool:
    """Whether ``text`` is a day as year, month and day with hyphens; Python also reads other forms of ISO 8601."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def with_version(text: str, version: str) -> str:
    """The module that has the version, with ``version``, which must be later than the one it has."""
    found = re.search(r'^VERSION = "((\d+)\.(\d+)\.(\d+)(\.dev\d+)?)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError(f'{VERSION_FILE}: has no line such as VERSION = "0.1.0.dev0"')
    now, numbers, is_development = found[1], tuple(map(int, found.group(2, 3, 4))), found[5] is not None
    asked = tuple(map(int, version.split(".")))
    if asked < numbers or (asked == numbers and not is_development):
        raise ReleaseError(f"version={version!r}: a later one than {now} would do")
    return text[: found.start(1)] + version + text[found.end(1) :]


def cited(text: str, version: str, date: str) -> str:
    """The citation, of this version and day."""
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(("version:", "date-released:"))]
    place = next((i for i, line in enumerate(kept) if line.startswith("license:")), None)
    if place is None:
        raise ReleaseError(f"{CITATION}: has no line 'license: ...', before which the version stands")
    return "".join([*kept[:place], f"version: {version}\n", f"date-released: {date}\n", *kept[place:]])


def released(text: str, version: str, date: str) -> str:
    """The changelog, with what was under *Unreleased* under ``version``."""
    before, heading, rest = text.partition(UNRELEASED)
    if not heading:
        raise ReleaseError(f"{CHANGELOG}: has no line {UNRELEASED.strip()!r}")
    if f"## [{version}]" in rest:
        raise ReleaseError(f"{CHANGELOG}: has {version} already")
    entries = rest.partition("\n## [")[0]
    if not re.search(r"^- ", entries, re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG}: nothing is under Unreleased, so there is nothing to release")
    return f"{before}{UNRELEASED}\n## [{version}] - {date}\n{rest}"


if __name__ == "__main__":
    sys.exit(main())
