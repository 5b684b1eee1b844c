"""``tilewise schema``: each document's schema, without anything heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from tilewise.cli.schemas import DOCUMENTS, schema_text


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_it_prints_the_schema_of_each_document(run: Callable[..., Result], kind: str) -> None:
    result = run("schema", kind)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == f"tilewise/{kind}"
    assert result.stdout == schema_text(kind)


def test_a_schedules_schema_is_the_default(run: Callable[..., Result]) -> None:
    assert run("schema").stdout == schema_text("plan")


def test_another_document_is_refused(run: Callable[..., Result]) -> None:
    result = run("schema", "plans")
    assert result.exit_code == 2
    assert "'plans'" in result.stderr
    assert "explain" in result.stderr
    with pytest.raises(ValueError, match=r"kind='plans': one of plan, mesh"):
        schema_text("plans")


def test_nothing_is_imported_that_computes() -> None:
    program = (
        "import sys\nfrom tilewise.cli import cli\ncli.main(['schema', 'info'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
