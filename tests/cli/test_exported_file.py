"""Files that begin as exported models do are told from lists of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.cli.given.exported_file import is_exported


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x10\0\0\0\0\0\0\0{}", True),
        (b"\x10\0\0\0\0\0\0\0[]", False),
        (b"\x10\0\0\0\0\0\0", False),
        (b"", False),
        (b"alexnet {", False),
        (b"mb2ic4ih6oc4oh4kh3\n", False),
        (b"{layers}{", False),
    ],
    ids=["safetensors", "other", "short", "empty", "text", "layers", "braces"],
)
def test_by_how_it_begins(tmp_path: Path, content: bytes, expected: bool) -> None:
    (tmp_path / "file").write_bytes(content)
    assert is_exported(str(tmp_path / "file")) == expected


def test_what_is_no_file(tmp_path: Path) -> None:
    assert not is_exported(str(tmp_path))
    assert not is_exported(str(tmp_path / "missing"))
    assert not is_exported("a\0b")
