"""``plan --memory-limit`` and ``--max-batch``."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator

import pytest
from torch import nn

FAST = ("--device", "cpu", "--batch-sizes", "undivided", "--rigor", "estimate")


@pytest.fixture(scope="module", autouse=True)
def _factory() -> Iterator[None]:
    module = types.ModuleType("stepping_networks")
    layers = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))  # noqa: E731
    module.two = lambda: (layers(), (4, 10, 10))
    sys.modules["stepping_networks"] = module
    yield
    del sys.modules["stepping_networks"]


def test_a_step_within_a_limit(run, check_document):
    document = check_document(run("plan", "stepping_networks:two", *FAST, "--memory-limit", "1GiB", "--json").stdout)
    step = document["step"]
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


def test_the_largest_batch(run, check_document):
    words = ("--memory-limit", "256KiB", "--max-batch", "--json")
    document = check_document(run("plan", "stepping_networks:two", *FAST, *words).stdout)
    assert document["options"]["batch"] == document["largest_batch"]["batch"] > 1
    assert document["step"]["peak"] <= 256 << 10
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
