"""The workflow that publishes the manual builds it as ``make docs`` does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text("utf-8"))
    return found


def test_it_publishes_what_make_docs_builds(workflow: dict[Any, Any]) -> None:
    steps = workflow["jobs"]["build"]["steps"]
    targets = [word for step in steps for word in re.findall(r"^make (\w+)", step.get("run", ""))]
    assert targets == ["docs"]
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    (uploaded,) = [step["with"]["path"] for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    assert recipe[1].split()[-1] == uploaded


def test_only_main_is_published_and_only_that_job_may(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert "refs/heads/main" in publish["if"]
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert "permissions" not in workflow["jobs"]["build"]
