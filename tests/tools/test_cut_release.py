"""A release is cut in all places or in none, and what is in the tree agrees."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tilewise.version import VERSION
from tools import cut_release

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FILES = (cut_release.VERSION_FILE, cut_release.CITATION, cut_release.CHANGELOG)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The three files as they are here, in a development version of 0.3.0 with something to release."""
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / cut_release.VERSION_FILE).write_text('"""The version."""\n\nVERSION = "0.3.0.dev0"\n', "utf-8")
    changelog = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n\n## [0.2.0] - 2026-01-02\n\n- Older.\n"
    (tmp_path / cut_release.CHANGELOG).write_text(changelog, "utf-8")
    return tmp_path


def contents(root: Path) -> dict[Path, str]:
    return {path: (root / path).read_text("utf-8") for path in FILES}


def citation(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / cut_release.CITATION).read_text("utf-8"))
    return found


def test_a_release_has_its_version_and_day_everywhere(tree: Path) -> None:
    before = citation(tree)
    assert cut_release.main(["0.3.0", "--date", "2026-11-28", "--root", str(tree)]) == 0
    assert (tree / cut_release.VERSION_FILE).read_text("utf-8") == '"""The version."""\n\nVERSION = "0.3.0"\n'
    made = citation(tree)
    assert (made.pop("version"), str(made.pop("date-released"))) == ("0.3.0", "2026-11-28")
    assert made == {name: value for name, value in before.items() if name not in ("version", "date-released")}
    assert (tree / cut_release.CHANGELOG).read_text("utf-8") == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.3.0] - 2026-11-28\n\n### Added\n\n- Something.\n\n"
        "## [0.2.0] - 2026-01-02\n\n- Older.\n"
    )


def test_the_next_release_takes_the_place_of_the_last(tree: Path) -> None:
    assert cut_release.main(["0.3.0", "--date", "2026-11-28", "--root", str(tree)]) == 0
    path = tree / cut_release.CHANGELOG
    path.write_text(path.read_text("utf-8").replace("## [Unreleased]\n", "## [Unreleased]\n\n- New.\n"), "utf-8")
    assert cut_release.main(["0.3.1", "--date", "2026-12-01", "--root", str(tree)]) == 0
    assert citation(tree)["version"] == "0.3.1"
    assert re.findall(r"## \[(.+)\]", path.read_text("utf-8")) == ["Unreleased", "0.3.1", "0.3.0", "0.2.0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0.2.0"], "a later one than 0.3.0.dev0"),
        (["0.3"], "three numbers such as 0.1.0"),
        (["v0.3.0"], "three numbers such as 0.1.0"),
        (["0.03.0"], "three numbers such as 0.1.0"),
        (["0.3.0", "--date", "28.11.2026"], "a day such as 2026-11-28"),
        (["0.3.0", "--date", "20261128"], "a day such as 2026-11-28"),
    ],
)
def test_a_bad_release_is_refused_and_writes_nothing(
    tree: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    assert cut_release.main([*words, "--root", str(tree)]) == 1
    assert said in capsys.readouterr().err
    assert contents(tree) == before


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (cut_release.VERSION_FILE, "VERSION", "RELEASE", "has no line such as VERSION"),
        (cut_release.VERSION_FILE, "0.3.0.dev0", "0.3.0", "a later one than 0.3.0 would do"),
        (cut_release.CITATION, "license: ", "licence: ", "has no line 'license: ...'"),
        (cut_release.CHANGELOG, "## [Unreleased]", "## Unreleased", "has no line"),
        (cut_release.CHANGELOG, "- Something.", "Something.", "nothing is under Unreleased"),
        (cut_release.CHANGELOG, "[0.2.0]", "[0.3.0]", "has 0.3.0 already"),
    ],
)
def test_files_of_another_form_are_refused(
    tree: Path, path: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tree / path).read_text("utf-8")
    assert old in text
    (tree / path).write_text(text.replace(old, new), "utf-8")
    before = contents(tree)
    assert cut_release.main(["0.3.0", "--root", str(tree)]) == 1
    assert said in capsys.readouterr().err
    assert contents(tree) == before


def test_version_changelog_and_citation_agree() -> None:
    releases = re.findall(r"^## \[(\d.*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    cited = citation(ROOT)
    latest = releases[0] if releases else (None, None)
    day = cited.get("date-released")
    assert (cited.get("version"), None if day is None else str(day)) == latest
    assert latest[0] == VERSION or VERSION.endswith(".dev0")


def test_the_citation_names_the_five_papers() -> None:
    cited = citation(ROOT)
    pages = [path.read_text("utf-8") for path in (ROOT / "docs" / "papers").glob("*.md")]
    assert len(cited["references"]) == len(pages) == 5
    for reference in cited["references"]:
        title = re.sub(r"[\W_]+", " ", reference["title"]).lower()
        (page,) = [page for page in pages if title in re.sub(r"[\W_]+", " ", page[:400]).lower()]
        for author in reference["authors"]:
            assert f"{author['given-names']} {author['family-names']}" in page
        assert str(reference["year"]) in page[:400]
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in project["authors"]]
    assert cited["license"] == project["license"]


def test_forms_for_issues_are_as_github_reads_them() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 3
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        names = [field["id"] for field in fields]
        assert len(set(names)) == len(names)
        for field in fields:
            assert field["type"] in ("textarea", "input", "dropdown")
            assert field["attributes"]["label"]
            assert all(isinstance(option, str) for option in field["attributes"].get("options", ()))
