"""Poolings and normalizations on the command line: plan, time and explain read their text."""

from __future__ import annotations

import pytest

POOLING = "max_pool:n2c3i9x11k3x3s2x2"
NORM = "lrn:n2c5s4x6k3,alpha=0.02"
FAST = ("--device", "cpu", "--rigor", "estimate")


@pytest.mark.parametrize(("text", "name"), [(POOLING, "max_pool"), (NORM, "lrn")])
def test_plan_and_time_have_both_passes(run, check_document, tmp_path, text, name):
    file = tmp_path / "schedule.json"
    result = run("plan", text, *FAST, "--json", "-o", str(file))
    assert result.exit_code == 0
    document = check_document(result.stdout)
    (layer,) = document["layers"]
    assert layer["names"] == [name]
    assert [each["problem"]["pass"] for each in layer["passes"]] == ["inference", "training"]
    assert {each["problem"]["layer"] for each in layer["passes"]} == {text}
    assert document["options"]["batch"] == 2
    result = run("time", text, "--schedule", str(file), "--iterations", "1", "--json")
    assert result.exit_code == 0
    (layer,) = check_document(result.stdout)["layers"]
    assert all(each["framework_ms"] > 0 for each in layer["passes"])


@pytest.mark.parametrize("text", [POOLING, NORM])
def test_explain_lists_every_solver(run, check_document, text):
    from tilewise.problems.kinds import from_key
    from tilewise.solvers import solving

    result = run("explain", text, "--pass", "training", "--layout", "channels_last", *FAST, "--json")
    assert result.exit_code == 0
    document = check_document(result.stdout)
    problem = from_key(document["problem"]["key"])
    assert problem.task == "training"
    assert problem.layout("x") == "channels_last"
    assert {each["solver"] for each in document["candidates"]} == {solver.name for solver in solving(type(problem))}


def test_info_lists_the_solvers(run):
    result = run("info", "--json")
    assert result.exit_code == 0
    for name in ("channel_tiles", "channel_window", "image_blocks", "window_tiles", "window_pooling", "pooling_blocks"):
        assert f'"{name}"' in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "max_pool:n2c3k2x2"), "has no i"),
        (("time", "lrn:n2c3"), "text such as 'lrn:n64c96s55x55k5'"),
        (("plan", POOLING, "--pass", "fprop"), "--pass 'fprop'"),
        (("plan", POOLING, "--batch", "4"), "--batch 4: that of a pooling is in its text, as n2 in max_pool"),
        (("explain", NORM, "--batch", "3"), "--batch 3: that of a normalization is in its text"),
        (("explain", "model"), "max_pool:n16c64i112x112k3x3s2x2 for a pooling"),
    ],
)
def test_what_is_no_layer_is_refused(run, words, says):
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.stderr
