"""The sample of cases that ``make test`` runs: what it meets, and when there is none."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import EVERY, MOST_DRAWN, fewer_examples, is_narrowed, sample

ROOT = Path(__file__).parents[1]
values = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, object]]:
    """Cases of three parameters, some combinations missing."""
    every = list(itertools.product(draw(values), draw(values), draw(values)))
    kept = draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    return [dict(zip(("solver", "pass_", "dtype"), case, strict=True)) for case in kept]


@given(cases=tables(), count=st.integers(0, 20))
def test_every_combination_and_value_is_met(cases: list[dict[str, object]], count: int) -> None:
    kept = [cases[i] for i in sample(cases, count, ("solver", "pass_"))]
    for names in (("solver", "pass_"), ("solver", "dtype")):
        assert {tuple(case[n] for n in names) for case in kept} == {tuple(case[n] for n in names) for case in cases}
    for case in kept[:1]:
        assert case in cases


@given(cases=tables(), count=st.integers(1, 20))
def test_without_combinations_as_many_as_asked_for(cases: list[dict[str, object]], count: int) -> None:
    kept = [cases[i] for i in sample(cases, count)]
    assert len(kept) <= count
    if count >= len(cases):
        assert len(kept) == len(cases)
    if count >= 12:
        for name in ("solver", "pass_", "dtype"):
            assert {case[name] for case in kept} == {case[name] for case in cases}


@pytest.mark.parametrize(("asked", "drawn"), [(4 * MOST_DRAWN, MOST_DRAWN), (3, 3)])
def test_a_generated_test_draws_no_more_than_the_most(asked: int, drawn: int) -> None:
    seen: list[int] = []

    @settings(max_examples=asked)
    @given(st.integers())
    def generated(number: int) -> None:
        seen.append(number)

    fewer_examples(generated)
    generated()
    assert len(seen) == drawn


def test_a_diagonal_meets_all() -> None:
    cases = [{"pass_": p, "dims": d} for p in "fdw" for d in (1, 2, 3)]
    kept = [cases[i] for i in sample(cases, 3)]
    assert {case["pass_"] for case in kept} == set("fdw")
    assert {case["dims"] for case in kept} == {1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "keyword", "narrow"),
    [
        (["tests"], "", False),
        ([str(ROOT / "tests")], "", False),
        (["tests/solvers"], "", False),
        (["tests"], "winograd", True),
        (["tests/solvers/test_solvers.py"], "", True),
        (["tests/solvers/test_solvers.py::test_declarations_agree"], "", True),
        (["tests", "tests/test_fft.py::test_a[x-1.py]"], "", True),
    ],
)
def test_names_and_files_are_narrow(arguments: list[str], keyword: str, narrow: bool) -> None:
    config: Any = SimpleNamespace(args=arguments, getoption=lambda name, default: {"keyword": keyword}[name])
    assert is_narrowed(config) is narrow


@pytest.mark.parametrize("words", [["tests/solvers", "-k", "winograd-"], ["tests/solvers/test_solvers.py"]])
def test_everything_of_it_runs(words: list[str]) -> None:
    """As pytest itself collects it."""
    if not EVERY:
        pytest.skip("a pytest of its own takes seconds: in make test-all")
    environment = {key: value for key, value in os.environ.items() if key != "TILEWISE_EVERY_TEST"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    found = [line for line in done.stdout.splitlines() if "computes_what_it_supports[winograd-" in line]
    assert len([line for line in found if "-cpu]" in line]) == 9, done.stdout + done.stderr
