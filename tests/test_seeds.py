"""What tests draw: the same in every process and order where no seed is given, and the same for a seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.sampling import EVERY
from tests.seeds import chosen, seed_all

ROOT = Path(__file__).parents[1]
DRAWING = """
import sys
import zlib
from tests import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

seeds.use_profile()
for name in sys.argv[1:]:
    __import__(name)
found = []


@settings(max_examples=200)
@given(st.integers(), st.floats(), st.text())
def draw(a, b, c):
    found.append((a, b, c))


draw()
print(zlib.crc32(repr(found).encode()))
"""


def drawn(script: Path, *modules: str, **variables: str) -> str:
    """A digest of what hypothesis draws in a process that has loaded ``modules``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TILEWISE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **variables}
    command = [sys.executable, str(script), *modules]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_test_begins_alike_whatever_ran_before() -> None:
    def numbers() -> tuple[float, float]:
        return random.random(), float(torch.rand(()))

    seed_all("one", None)
    first = numbers()
    numbers()
    seed_all("one", None)
    assert numbers() == first
    seed_all("another", None)
    assert numbers() != first
    if not EVERY:
        return  # the run's own seed is left as it is
    seed_all("one", 7)
    assert numbers() != first


@pytest.mark.parametrize(
    ("given", "every", "seed"),
    [({}, False, None), ({"TILEWISE_SEED": "7"}, False, 7), ({"TILEWISE_SEED": "7"}, True, 7)],
)
def test_seeds_are_asked_for(given: dict[str, str], every: bool, seed: int | None) -> None:
    assert chosen(given, every) == seed
    assert given.get("TILEWISE_SEED") == (None if seed is None else str(seed))


def test_every_test_draws_anew() -> None:
    """And processes that are started later find the seed."""
    environments: list[dict[str, str]] = [{}, {}]
    seeds = [chosen(environment, True) for environment in environments]
    assert seeds[0] != seeds[1]
    assert [int(environment["TILEWISE_SEED"]) for environment in environments] == seeds


def test_draws_depend_on_nothing_that_is_loaded(tmp_path: Path) -> None:
    if not EVERY:
        pytest.skip("each is a process of its own: in make test-all")
    script = tmp_path / "drawing.py"
    script.write_text(DRAWING)
    fixed = drawn(script)
    assert fixed == drawn(script, "tilewise.solvers.winograd.winograd", "tilewise.nn") == drawn(script, CI="true")
    assert drawn(script, TILEWISE_SEED="7") == drawn(script, "tilewise.nn", TILEWISE_SEED="7") != fixed
    assert drawn(script, TILEWISE_EVERY_TEST="1") != fixed
