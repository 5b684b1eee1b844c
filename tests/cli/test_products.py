"""Matrix products on the command line: plan, time and explain read benchdnn's notation."""

from __future__ import annotations

import json

import pytest

PRODUCT = '5x24:24x40n"head"'
FAST = ("--device", "cpu", "--rigor", "estimate")


def test_plan_has_every_storage(run, check_document):
    result = run("plan", PRODUCT, *FAST, "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    (layer,) = document["layers"]
    assert layer["names"] == ["head"]
    assert [each["problem"]["pass"] for each in layer["passes"]] == ["nn", "nt", "tn"]
    assert {each["problem"]["layer"] for each in layer["passes"]} == {"5x24:24x40"}
    assert document["options"]["batch"] == 1
    text = run("plan", PRODUCT, *FAST).stdout
    assert "head" in text
    assert "5x24:24x40" in text


def test_a_schedule_of_products_is_written_and_followed(run, tmp_path):
    file = tmp_path / "schedule.json"
    assert run("plan", PRODUCT, *FAST, "-o", str(file)).exit_code == 0
    assert json.loads(file.read_text())["layers"][0]["passes"][0]["problem"]["key"].startswith("gemm NN")
    assert run("time", PRODUCT, "--schedule", str(file), "--iterations", "1").exit_code == 0


def test_time_has_both_sides(run, check_document):
    result = run("time", PRODUCT, "--pass", "nt", *FAST, "--iterations", "1", "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    ((found,),) = (layer["passes"] for layer in document["layers"])
    assert found["problem"]["pass"] == "nt"
    assert found["framework_ms"] > 0
    assert document["training_step"] is None


@pytest.mark.parametrize(("words", "op"), [((), "nn"), (("--pass", "tt"), "tt")])
def test_explain_lists_every_solver(run, check_document, words, op):
    from tilewise.problems.gemm.problem import GemmProblem
    from tilewise.solvers import solving

    result = run("explain", PRODUCT, *words, *FAST, "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    assert document["problem"]["pass"] == op
    assert {each["solver"] for each in document["candidates"]} == {solver.name for solver in solving(GemmProblem)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "5x24:25x40"), "rows of the left operand have 24 numbers and columns of the right one 25"),
        (("plan", "5x24:24"), "not MxK:KxN"),
        (("time", "0x24:24x4"), "m=0: must be at least 1"),
        (("plan", PRODUCT, "--pass", "fprop"), "--pass 'fprop'"),
        (("plan", "mb1ic4oc4ih8kh3", "--pass", "nn"), "--pass 'nn'"),
        (("explain", "mb1ic4oc4ih8kh3", "--pass", "nt"), "--pass 'nt'"),
        (("plan", "alexnet", "--pass", "nt"), "--pass 'nt'"),
        (("plan", PRODUCT, "--batch", "4"), "--batch 4: sizes of a product are in its text"),
        (("plan", PRODUCT, "--layout", "channels_last"), "--layout 'channels_last'"),
        (("explain", "model"), "16x512:512x1024 for a product"),
    ],
)
def test_what_is_no_product_is_refused(run, words, says):
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.stderr
