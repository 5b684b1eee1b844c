"""``plan --memory-limit`` and ``--max-batch``."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from tests import toys
from tests.nn.step.test_live_models import Promising, Slow
from torch import nn

from tilewise import solvers
from tilewise.plan import Plan
from tilewise.planner import Options

FAST = ("--device", "cpu", "--batch-sizes", "undivided", "--rigor", "estimate")


@pytest.fixture(scope="module", autouse=True)
def _factory() -> Iterator[None]:
    module = types.ModuleType("stepping_networks")
    layers = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))  # noqa: E731
    module.two = lambda: (layers(), (4, 10, 10))
    sys.modules["stepping_networks"] = module
    yield
    del sys.modules["stepping_networks"]


@pytest.mark.slow
def test_a_step_within_a_limit(run, check_document):
    document = check_document(run("plan", "stepping_networks:two", *FAST, "--memory-limit", "1GiB", "--json").stdout)
    step = document["step_memory"]
    assert step["least"] <= step["peak"] <= step["limit"] == 2**30
    assert [(m["layer"], m["pass"]) for m in step["moments"]] == [
        ("0", "fprop"), ("2", "fprop"), ("2", "dgrad"), ("2", "wgrad"), ("0", "wgrad"),
    ]  # fmt: skip
    assert document["largest_batch"] is None
    assert document["summary"]["unplanned"] == 0
    result = run("plan", "stepping_networks:two", *FAST, "--memory-limit", "1GiB")
    assert "needs at least" in result.stdout
    result = run("plan", "stepping_networks:two", *FAST, "--memory-limit", "1KiB")
    assert result.exit_code == 1
    # Not what the first run said to the byte: plans are chosen by speed, and with them what is left to choose from.
    least = re.search(r"needs .* at least \((\d+) bytes\)", result.stderr)
    assert least is not None
    alive = max(moment["alive"] + moment["result"] for moment in step["moments"])
    assert 1024 < alive <= int(least[1]) <= step["limit"]
    assert "--max-batch" in result.stderr


@pytest.mark.slow
def test_the_largest_batch(run, check_document):
    words = ("--memory-limit", "256KiB", "--max-batch", "--json")
    document = check_document(run("plan", "stepping_networks:two", *FAST, *words).stdout)
    assert document["options"]["batch"] == document["largest_batch"]["batch"] > 1
    assert document["step_memory"]["peak"] <= 256 << 10
    assert all(
        f"mb{document['options']['batch']}ic" in p["problem"]["key"] for x in document["layers"] for p in x["passes"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ("mb2ic3oc4ih8kh3", "--memory-limit", "1GiB"),
        ("stepping_networks:two", "--max-batch"),
        ("stepping_networks:two", "--memory-limit", "101%"),
        ("stepping_networks:two", "--memory-limit", "lots"),
    ],
)
def test_limits_that_make_no_sense(run, words):
    result = run("plan", *words, "--device", "cpu")
    assert result.exit_code == 2
    assert "--m" in result.stderr


class PromisingAhead(Promising):
    """For commands: nothing is planned ahead."""

    def plan(self, problem: Any, options: Options | None = None) -> Plan:
        if options is not None and "slow" in options.exclude:
            return Plan(problem.key, "aten", solvers.get("aten").version)
        return super().plan(problem, options)

    def plan_ahead(self, *_: object, **__: object) -> None:
        return None


@pytest.fixture
def _slow_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every plan promises half of torch's time and sleeps."""
    monkeypatch.setattr("tilewise.cli.time.make_planner", lambda *_: PromisingAhead())
    monkeypatch.setattr("tilewise.cli.plan.make_planner", lambda *_: PromisingAhead())
    with toys.installed(Slow()), toys.one_thread():
        yield


@pytest.mark.usefixtures("_slow_plans")
def test_time_decides_by_the_whole_step(run, check_document):
    asked = ("time", "stepping_networks:two", "--device", "cpu", "--batch", "2", "--iterations", "1")
    step = check_document(run(*asked, "--json").stdout)["training_step"]
    assert step["compared"]["kept"] is False
    assert step["compared"]["planned_ms"] > step["compared"]["torch_ms"]
    assert len(step["taken_back"]) == step["compared"]["taken_back"] > 0
    text = run(*asked).stdout
    assert "(taken back: the step is not faster with it)" in text
    assert "plans are not surely faster" in text
    step = check_document(run(*asked, "--goal", "passes", "--json").stdout)["training_step"]
    assert step["compared"] is None
    assert step["taken_back"] == []
    assert "taken back" not in run(*asked, "--goal", "passes").stdout


def test_time_says_why_the_whole_step_does_not_decide(run, check_document):
    asked = ("time", "stepping_networks:two", *FAST, "--batch", "2", "--iterations", "1")
    step = check_document(run(*asked, "--json").stdout)["training_step"]
    assert step["compared"]["reason"] == "rigor='estimate' measures nothing"
    assert "step: not compared, rigor='estimate' measures nothing" in run(*asked).stdout


@pytest.mark.usefixtures("_slow_plans")
def test_plan_decides_by_the_whole_step(run, check_document):
    asked = ("plan", "stepping_networks:two", "--device", "cpu", "--batch", "2")
    document = check_document(run(*asked, "--json").stdout)
    assert document["summary"]["replaced"] == 0
    assert "plans are not surely faster" in run(*asked).stdout
    for others in (("--goal", "passes"), ("--workspace", "64MiB"), ("--pass", "fprop")):
        result = run(*asked, *others)
        assert "slow" in result.stdout
        assert "step:" not in result.stdout
