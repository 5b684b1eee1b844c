"""Plans that this user did not make here are checked on first use, whichever way they came."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests import toys
from tests.planner.planted import leaf, planted
from tests.planner.simulated import PROFILE

from tilewise.machine.device import environment
from tilewise.plan import Config
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.remembered import plan_text
from tilewise.planner.search.search import Search
from tilewise.wisdom import Wisdom, rows

LIMIT = 2**20


pytestmark = pytest.mark.filterwarnings("ignore::tilewise.wisdom.WisdomWarning")


@pytest.fixture
def wisdom(tmp_path: Path) -> Wisdom:
    made = Wisdom(tmp_path / "wisdom.sqlite3")
    made.remember_profile(environment("cpu").key, PROFILE)
    return made


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many plans were run and held against float64 because nobody here had."""
    count = [0]
    monkeypatch.setattr(Search, "confirm", toys.counting(Search.confirm, count))
    return count


def test_a_plan_of_this_user_is_not_checked_again(wisdom: Wisdom, checks: list[int]) -> None:
    problem, options = toys.small(batch=2), Options(rigor="estimate")
    plan = Planner(wisdom).plan(problem, options)
    assert Planner(wisdom).plan(problem, options) == plan
    assert checks == [0]


def by_import(wisdom: Wisdom, tmp_path: Path) -> Wisdom:
    other = Wisdom(tmp_path / "other.sqlite3")
    wisdom.export(tmp_path / "w.json")
    other.import_(tmp_path / "w.json")
    return other


def by_copy(wisdom: Wisdom, tmp_path: Path, whole: bool = False) -> Wisdom:
    """Read under another cache directory, as another user or machine does; ``whole``: the secret is copied, too."""
    patch = pytest.MonkeyPatch()
    from tilewise.machine.cache import cache_dir

    secret = (cache_dir() / "wisdom.secret").read_bytes()
    there = tmp_path / "there"
    there.mkdir()
    if whole:
        (there / "wisdom.secret").write_bytes(secret)
        (there / "wisdom.secret").chmod(0o600)
    with closing(sqlite3.connect(wisdom.path)) as source, closing(sqlite3.connect(there / "wisdom.sqlite3")) as target:
        source.backup(target)
    patch.setenv("TILEWISE_CACHE_DIR", str(there))
    return Wisdom(there / "wisdom.sqlite3")


def by_copy_of_all(wisdom: Wisdom, tmp_path: Path) -> Wisdom:
    return by_copy(wisdom, tmp_path, whole=True)


def by_hand(wisdom: Wisdom, tmp_path: Path) -> Wisdom:
    """A claim changed, the checksum made right again, the seal left as it was."""
    with closing(sqlite3.connect(wisdom.path, isolation_level=None)) as db:
        problem, plan, constraints, recorded = db.execute(
            "SELECT p.text, t.plan, t.constraints, t.recorded FROM plan t JOIN name p ON p.id = t.problem "
            "WHERE t.constraints NOT LIKE 'front%'"
        ).fetchone()
        changed = plan.replace('"constant":0', '"constant":9')
        assert changed != plan
        crc = rows.checksum(environment("cpu").key, problem, constraints, changed, recorded)
        db.execute("UPDATE plan SET plan = ?, crc = ? WHERE constraints = ?", (changed, crc, constraints))
    return wisdom


def by_writing(wisdom: Wisdom, tmp_path: Path) -> Wisdom:
    """What a program kept that only said so."""
    (key,) = {kept.environment for kept in wisdom.summary()}
    problem, options = toys.small(batch=2), Options(rigor="estimate")
    plan = wisdom.plan(key, problem.key, plan_text(options))
    assert plan is not None
    wisdom.remember(key, problem.key, plan_text(options), plan)
    return wisdom


@pytest.mark.parametrize("moved", [by_import, by_copy, by_copy_of_all, by_hand, by_writing])
def test_what_was_not_made_here_is_checked_on_first_use_and_then_no_more(
    wisdom: Wisdom,
    checks: list[int],
    tmp_path: Path,
    moved: Callable[[Wisdom, Path], Wisdom],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "here"))
    problem, options = toys.small(batch=2), Options(rigor="estimate")
    plan = Planner(wisdom).plan(problem, options)
    front = Planner(wisdom).front(problem, replace(options, workspace=LIMIT))
    there = moved(wisdom, tmp_path)
    assert checks == [0]
    for _ in range(2):
        again = Planner(there).plan(problem, options)
        assert (again.solver, again.config, again.constant) == (plan.solver, plan.config, 0)
    counted = 0 if plan.solver == "aten" and moved is not by_import else 1
    assert checks[0] >= counted
    if moved not in (by_hand, by_writing):
        before = checks[0]
        for _ in range(2):
            points = Planner(there).front(problem, replace(options, workspace=LIMIT))
            assert {(p.solver, p.config) for p in points} <= {(p.solver, p.config) for p in front}
        assert checks[0] == before + len(front)


def test_wisdom_alone_is_checked_too(wisdom: Wisdom, checks: list[int]) -> None:
    wrong = toys.toy(name="wrong", compute=lambda self, p, a, b: p.reference(a, b) * 1.001)
    problem = toys.small(batch=2)
    with toys.installed(wrong):
        planted(wisdom, problem, Options(), leaf(problem, "wrong", Config()))
        with pytest.raises(NoPlanError, match=r"no wisdom .* refused: wrong error 1\.\de-03 over the limit"):
            Planner(wisdom).plan(problem, Options(rigor="wisdom_only"))
        assert checks == [1]
