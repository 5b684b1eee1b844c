"""``tilewise time NET --trace FILE``: the time line of a planned training step."""

from __future__ import annotations

import json

import pytest
from tests.cli.test_planning_commands import FAST, _factory  # noqa: F401 (a fixture)
from tests.planner.simulated import PROFILE

from tilewise.machine.device import environment
from tilewise.wisdom import Wisdom


@pytest.mark.slow
def test_a_file_with_a_planned_step(run, tmp_path):
    Wisdom().remember_profile(environment("cpu").key, PROFILE)
    path = tmp_path / "step.json"
    fast = (*FAST, "--batch", "2", "--rigor", "estimate", "--iterations", "1", "--goal", "passes")
    result = run("time", "some_networks:small", *fast, "--trace", str(path))
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text("utf-8"))
    names = [event["name"] for event in document["traceEvents"]]
    assert any(name.startswith("aten::") for name in names)
    assert any("ackward" in name for name in names)
    assert document["tilewise"]["layers"]["layers"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("some_networks:small", "--trace", "step.txt"), ["--trace", "step.txt", "ends in .json"]),
        (("some_networks:small", "--trace", "no/where/a.json"), ["--trace", "there is no folder 'no/where'"]),
        (("mb2ic4ih8oc4oh8kh3ph1", "--trace", "a.json"), ["--trace 'a.json'", "NET without --pass would do"]),
        (("some_networks:small", "--pass", "fprop", "--trace", "a.json"), ["NET without --pass would do"]),
    ],
)
def test_bad_input(run, arguments, words):
    result = run("time", *arguments, "--device", "cpu")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
