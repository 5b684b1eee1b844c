"""A page on its way to the disk: a disk that is full, a document that was cut off while it was written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.report.schedules import schedule

from tilewise.cli import cli


def report(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments])


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file of this process can grow beyond ``most`` bytes: writing fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(schedule(2)), "utf-8")
    return path


def test_a_full_disk_leaves_the_old_page_and_nothing_else(source, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    with full_disk(20_000):
        result = report(str(source), "-o", str(target))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise: -o: ")
    assert "page.html" in line
    assert "cannot be written: File too large" in line
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "plan.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_without_room_is_one_line(source):
    result = report(str(source), "-o", "/dev/full")
    assert result.exit_code == 2
    assert "cannot be written: No space left on device" in result.stderr
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "from tilewise.cli import main; main()", "report", str(source), "-o", "-"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == "tilewise: -o: stdout cannot be written: No space left on device"


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.77, 0.999])
def test_a_half_written_document_says_that_it_ends_too_early(share, tmp_path):
    text = json.dumps(schedule(2), ensure_ascii=False)
    source = tmp_path / "plan.json"
    source.write_text(text[: int(len(text) * share)], "utf-8")
    result = report(str(source))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "is not JSON" in line
    assert "ends before the document does" in line
    assert list(tmp_path.iterdir()) == [source]
