"""Recurrent layers on the command line: plan, time and explain read their text."""

from __future__ import annotations

import pytest

LAYER = "lstm:t5n2i3h4l2d2b0"
FAST = ("--device", "cpu", "--rigor", "estimate")


def test_plan_has_both_passes(run, check_document, tmp_path):
    file = tmp_path / "schedule.json"
    result = run("plan", LAYER, *FAST, "--json", "-o", str(file))
    assert result.exit_code == 0
    document = check_document(result.stdout)
    (layer,) = document["layers"]
    assert layer["names"] == ["lstm"]
    assert [each["problem"]["pass"] for each in layer["passes"]] == ["inference", "training"]
    assert {each["problem"]["layer"] for each in layer["passes"]} == {LAYER}
    assert document["options"]["batch"] == 2
    assert run("time", LAYER, "--schedule", str(file), "--iterations", "1").exit_code == 0


def test_time_has_both_sides(run, check_document):
    result = run("time", LAYER, "--pass", "training", *FAST, "--iterations", "1", "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    ((found,),) = (layer["passes"] for layer in document["layers"])
    assert found["problem"]["pass"] == "training"
    assert found["framework_ms"] > 0
    assert document["training_step"] is None


@pytest.mark.parametrize(("words", "task"), [((), "inference"), (("--pass", "training"), "training")])
def test_explain_lists_every_solver(run, check_document, words, task):
    from tilewise.problems.recurrent.problem import RecurrentProblem
    from tilewise.solvers import solving

    result = run("explain", LAYER, *words, *FAST, "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    assert document["problem"]["pass"] == task
    assert {each["solver"] for each in document["candidates"]} == {solver.name for solver in solving(RecurrentProblem)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "lstm:t5n2i3"), "has no h"),
        (("plan", "rnn:t5n2i3h4"), "not one of rnn_tanh, rnn_relu, gru, lstm"),
        (("time", "gru:t0n2i3h4"), "time=0: must be at least 1"),
        (("plan", LAYER, "--pass", "fprop"), "--pass 'fprop'"),
        (("plan", "mb1ic4oc4ih8kh3", "--pass", "training"), "--pass 'training'"),
        (("explain", "5x4:4x3", "--pass", "inference"), "--pass 'inference'"),
        (("plan", "alexnet", "--pass", "training"), "--pass 'training'"),
        (("plan", LAYER, "--batch", "4"), "--batch 4: a recurrent layer's is in its text"),
        (("plan", LAYER, "--layout", "channels_last"), "--layout 'channels_last'"),
        (("explain", "model"), "lstm:t99n16i64h64 for a recurrent layer"),
    ],
)
def test_what_is_no_layer_is_refused(run, words, says):
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.stderr


def test_choices_are_those_of_the_problem():
    from tilewise.cli.settings import TASKS
    from tilewise.problems.recurrent import tensors

    assert TASKS == tensors.TASKS
