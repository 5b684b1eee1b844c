"""``tilewise report``: a document in, a page out, one line for whatever is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from tests.report.schedules import schedule

from tilewise.cli import cli
from tilewise.cli import report as report_command
from tilewise.report.page import page


def test_a_page_is_written(run, tmp_path):
    document = schedule(2)
    source, target = tmp_path / "plan.json", tmp_path / "page.html"
    source.write_text(json.dumps(document), "utf-8")
    target.write_text("old")
    result = run("report", str(source), "-o", str(target))
    assert result.exit_code == 0
    assert target.read_text("utf-8") == page(document)
    assert result.stdout == f"{target.stat().st_size / 1024:.1f} KiB written to {target}\n"


def test_without_a_name_it_is_the_document_s(run, tmp_path):
    source = tmp_path / "plan.json"
    source.write_text(json.dumps(schedule(1)), "utf-8")
    assert run("report", str(source)).exit_code == 0
    assert (tmp_path / "plan.html").read_text("utf-8").startswith("<!doctype html>")


def test_stdin_and_stdout():
    document = schedule(1)
    result = CliRunner().invoke(cli, ["report", "-", "-o", "-"], input=json.dumps(document))
    assert result.exit_code == 0
    assert result.stdout == page(document)


def test_what_plan_prints_makes_a_page(run, tmp_path):
    arguments = ("mb4ic3ih12oc8oh12kh3ph1", "--device", "cpu", "--rigor", "wisdom_only", "--json")
    source = tmp_path / "plan.json"
    source.write_text(run("plan", *arguments).stdout, "utf-8")
    result = run("report", str(source), "-o", "-")
    assert result.exit_code == 0
    assert "no wisdom" in result.stdout
    assert "mb4ic3ih12oc8oh12kh3ph1" in result.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", ["is not JSON: Expecting value", "'tilewise plan NET --json'", "would do"]),
        ("", ["is not JSON: Expecting value", "it ends before the document does"]),
        ("[" * 100_000, ["SCHEDULE"]),
        ("\xff", ["is not JSON but no text at all", "'tilewise plan NET --json'"]),
        ("<!doctype html>", ["is not JSON but an HTML page", "'tilewise plan NET --json'"]),
        ('{"schema": NaN}', ["NaN"]),
        ('{"schema": "tilewise/info", "version": 1}', ["tilewise/info", "tilewise/plan"]),
        ('{"schema": "tilewise/plan", "version": 99}', ["version=99"]),
        ('{"schema": "tilewise/plan", "version": 1, "layers": [5]}', ["layers[0]"]),
        ('{"schema": "tilewise/plan", "version": ' + "9" * 5000 + "}", ["SCHEDULE"]),
        (json.dumps(schedule(2))[:-100], ["is not JSON"]),
    ],
    ids=["text", "empty", "deep", "latin", "page", "nan", "schema", "version", "layer", "digits", "truncated"],
)
def test_a_broken_document_is_one_line(run, tmp_path, text, words):
    source = tmp_path / "broken.json"
    source.write_bytes(text.encode("latin-1"))
    result = run("report", str(source))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise: SCHEDULE: ")
    assert "broken.json" in line
    assert all(word in line for word in words)
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_of_weights_is_told_from_a_document(run, tmp_path):
    source = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2, dtype=torch.float32, device="cpu")}, source)
    (line,) = run("report", str(source)).stderr.splitlines()
    assert line.startswith(f"tilewise: SCHEDULE: {str(source)!r}: is not JSON but a file of weights")
    assert "; what 'tilewise plan NET --json', 'time NET --json' or " in line


def test_files_that_cannot_be_read_or_written(run, tmp_path, monkeypatch):
    source = tmp_path / "plan.json"
    source.write_text(json.dumps(schedule(1)), "utf-8")
    for arguments, words in [
        (("no_such_file.json",), ["SCHEDULE", "no_such_file.json", "No such file"]),
        ((str(tmp_path),), ["SCHEDULE", "is a folder"]),
        ((".",), ["SCHEDULE", "is a folder"]),
        ((str(source), "-o", str(tmp_path / "none" / "x.html")), ["-o", "No such file"]),
        ((str(source), "-o", str(source)), ["-o", "SCHEDULE itself"]),
    ]:
        result = run("report", *arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert all(word in line for word in words)
    monkeypatch.setattr(report_command, "LARGEST", 100)
    result = run("report", str(source))
    assert result.exit_code == 2
    assert "more than 100 B" in result.stderr


def test_style_and_script_are_files_of_the_package():
    from importlib import resources

    names = {entry.name for entry in resources.files("tilewise.report.page").iterdir()}
    assert {"style.css", "script.js"} <= names
