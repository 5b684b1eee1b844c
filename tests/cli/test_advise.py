"""Advice on the command line: documents, tables, pictures, interruption and bad input."""

from __future__ import annotations

import signal

import pytest

from tilewise.advice import gauge
from tilewise.solvers import all_solvers

FEW = ("--within", "0", "--batch-within", "0.3", "--seconds", "100", "--device", "cpu")
"""The mini-batch alone, of few sizes: all are measured long before the time is over."""
RNN = ("rnn", "--hidden", "6", "--batch", "4", "--cell", "gru", "--time", "2", "--exclude", "resident_rnn")
GEMM = ("gemm", "4x16:16x8")
CONV = ("conv", "mb4ic3ih5oc4kh3", "--pass", "fprop")
SLOW = [solver.name for solver in all_solvers() if solver.name not in ("aten", "gemm")]
"""Solvers that compile for long."""


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "IN_TURNS_MS", 50.0)


def test_rnn_as_tables(run):
    result = run("advise", *RNN, *FEW)
    assert result.exit_code == 0
    head, columns, asked, *_ = [line for line in result.stdout.splitlines() if line]
    assert head.startswith("gru:t2n4i6h6: batch 4")
    assert columns.split()[:3] == ["hidden", "batch", "samples/s"]
    assert asked.split()[:2] == ["6", "4"]
    assert "1.00x" in asked
    assert "as asked" in asked
    assert "points of hidden 6 to 6, batch 3 to 5" in result.stdout


@pytest.mark.slow
def test_gemm_as_a_document_and_a_picture(run, check_document, tmp_path):
    picture = tmp_path / "advice.png"
    result = run("advise", *GEMM, *FEW, "--json", "--picture", str(picture))
    assert result.exit_code == 0
    document = check_document(result.stdout)
    assert document["target"] == "4x16:16x8"
    assert [axis["name"] for axis in document["axes"]] == ["columns", "depth", "rows"]
    assert document["asked"]["sizes"] == {"columns": 8, "depth": 16, "rows": 4}
    assert [part["problem"]["pass"] for part in document["asked"]["parts"]] == ["nn", "nt", "tn"]
    assert {point["sizes"]["rows"] for point in document["points"]} == {3, 4, 5}
    assert document["best"]["samples_per_second"] >= document["asked"]["samples_per_second"]
    assert document["done"] is True
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture written to {picture}" in result.stderr


@pytest.mark.slow
def test_conv_draws_svg(run, tmp_path):
    picture = tmp_path / "advice.svg"
    others = [word for name in SLOW for word in ("--exclude", name)]
    result = run("advise", *CONV, *FEW, *others, "--picture", str(picture))
    assert result.exit_code == 0
    assert "<svg" in picture.read_text("utf-8")


def test_a_recurrent_layer_may_be_text(run, check_document):
    words = ("--pass", "inference", "--exclude", "resident_rnn", "--json")
    result = run("advise", "rnn", "lstm:t2n4i3h5", *words, *FEW)
    document = check_document(result.stdout)
    assert document["target"] == "lstm:t2n4i3h5"
    assert document["asked"]["parts"][0]["problem"]["pass"] == "inference"


def test_steps_that_are_not_given_follow_from_the_work():
    from tilewise.cli.advise import layer_text
    from tilewise.cli.settings import Asked

    def text(hidden: int, batch: int) -> str:
        asked = Asked(batch, "cpu", None, None, "powers_of_two", "measure", "fp32", "contiguous", False, (), ())
        none = dict.fromkeys(("cell", "steps", "inputs", "layers", "directions"))
        found, settings = layer_text(None, "training", asked, {**none, "hidden": hidden})
        assert settings.batch is None
        return found

    assert text(16, 4) == "lstm:t128n4i16h16"
    assert text(2560, 64) == "lstm:t4n64i2560h2560"


def test_ctrl_c_shows_what_was_measured(run, monkeypatch):
    measured = gauge.Gauge.measure
    points = []

    def measure(self, sizes, level):
        points.append(measured(self, sizes, level))
        if len(points) == 5:
            signal.raise_signal(signal.SIGINT)
        return points[-1]

    monkeypatch.setattr(gauge.Gauge, "measure", measure)
    result = run("advise", *GEMM, "--device", "cpu", "--seconds", "100")
    assert result.exit_code == 130
    assert "as asked" in result.stdout
    assert "stopped before all was measured" in result.stdout
    assert "interrupted; what was measured is kept" in result.stderr


def test_without_a_plan_it_exits_with_1(run):
    from tilewise.problems.gemm.problem import GemmProblem
    from tilewise.solvers import solving

    names = [word for solver in solving(GemmProblem) for word in ("--exclude", solver.name)]
    result = run("advise", *GEMM, *FEW, *names)
    assert result.exit_code == 1
    assert "no plan" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("rnn",), "--hidden: missing"),
        (("rnn", "--hidden", "8"), "--batch: missing"),
        (("rnn", "lstm:t2n4i3h5", "--hidden", "8"), "--hidden: the text 'lstm:t2n4i3h5' has it"),
        (("rnn", "lstm:t2n4i3h5", "--time", "8"), "--time: the text"),
        (("rnn", "lstm:t2n4i3h5", "--batch", "8"), "--batch 8"),
        (("rnn", "lstm:t2n4"), "has no i, h"),
        (("rnn", "--hidden", "8", "--batch", "2", "--cell", "lru"), "'lru' is not one of"),
        (("gemm", "4x16:15x8"), "4x16:15x8"),
        (("gemm", "4x16:16x8", "--pass", "training"), "'training' is not one of"),
        (("conv", "mb4ic3"), "oc: missing"),
        ((*GEMM, "--seconds", "0"), "--seconds"),
        ((*GEMM, "--within", "1"), "--within"),
        ((*GEMM, "--rigor", "estimate"), "--rigor': 'estimate'"),
        ((*GEMM, "--picture", "advice.bmp"), ".png, .svg, .pdf"),
        ((*GEMM, "--picture", "no_such_folder/advice.png"), "no folder"),
        (("net", "alexnet"), "net"),
    ],
)
def test_what_makes_no_sense_is_refused(run, words, says):
    result = run("advise", *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_choices_and_defaults_are_those_of_the_library():
    from tilewise.advice.advise import SECONDS
    from tilewise.advice.sweep import BATCH_SHARE, SIZE_SHARE
    from tilewise.cli import advise
    from tilewise.problems.recurrent.tensors import CELLS

    assert advise.CELLS == CELLS
    assert (advise.SIZE_SHARE, advise.BATCH_SHARE, advise.SECONDS) == (SIZE_SHARE, BATCH_SHARE, SECONDS)
