"""One budget for many kernels, against every choice there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tilewise.planner import NoPlanError
from tilewise.planner.budget.allocate import POLICIES, Group, Kernel, allocate

METHODS: dict[str, dict[str, Any]] = {
    "first": {}, "milp": {"most_looked_at": -1}, "exact": {"most_looked_at": -1, "time_limit_s": 0.0}
}  # fmt: skip
"""By the time limit of HiGHS that asks for them."""

points = st.tuples(st.integers(0, 12).map(lambda n: n / 4), st.integers(0, 9))
kernel_lists = st.lists(
    st.builds(Kernel, st.just("k"), st.lists(points, min_size=1, max_size=4).map(tuple), st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Kernel], list[Group]]:
    """Kernels, and groups in which a kernel is in no more branches than it occurs."""
    kernels = draw(kernel_lists)
    indices = st.lists(st.integers(0, len(kernels) - 1), max_size=3)
    groups = []
    for group in draw(st.lists(st.lists(indices, max_size=4), max_size=3)):
        times = [0] * len(kernels)
        branches = []
        for branch in group:
            kept = [k for k in dict.fromkeys(branch) if times[k] < kernels[k].count]
            for k in kept:
                times[k] += 1
            branches.append(kept)
        groups.append(branches)
    return kernels, groups


def needs(policy: str, kernels: Sequence[Kernel], groups: Sequence[Group], workspaces: Sequence[int]) -> int:
    """The total that one workspace a kernel takes, occurrence by occurrence."""
    if policy == "paper_wd":
        return sum(workspace for k, workspace in zip(kernels, workspaces, strict=True) for _ in range(k.count))
    moments = [[k] for k in range(len(kernels))]
    for group in groups:  # one kernel of each branch, whichever they are, at the same moment
        moments += [list(moment) for moment in itertools.product(*(branch for branch in group if branch))]
    return max(sum(workspaces[k] for k in moment) for moment in moments)


def every_choice(
    policy: str, kernels: Sequence[Kernel], groups: Sequence[Group]
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Time, total and choice of everything that could be chosen."""
    for choice in itertools.product(*(range(len(k.points)) for k in kernels)):
        chosen = [k.points[i] for k, i in zip(kernels, choice, strict=True)]
        ms = math.fsum(ms * k.count for k, (ms, _) in zip(kernels, chosen, strict=True))
        yield ms, needs(policy, kernels, groups, [workspace for _, workspace in chosen]), choice


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(drawn=networks(), total=st.integers(0, 40))
@example(drawn=([Kernel("a", ((1.0, 0),)), Kernel("b", ((2.0, 0),))], []), total=0)
def test_it_is_the_best_of_all_choices(policy: str, method: str, drawn: Any, total: int) -> None:
    kernels, groups = drawn
    choices = list(every_choice(policy, kernels, groups))
    least = min(needed for _, needed, _ in choices)
    if total < least:
        with pytest.raises(NoPlanError, match=f"least total that works is {least} bytes"):
            allocate(kernels, total, policy, groups, **METHODS[method])
        return
    found = allocate(kernels, total, policy, groups, **METHODS[method])
    by_choice = {choice: (ms, needed) for ms, needed, choice in choices}
    assert by_choice[found.choices] == (pytest.approx(found.time_ms), found.used)
    assert found.used <= total
    assert found.time_ms == pytest.approx(min(ms for ms, needed, _ in choices if needed <= total))
    assert (found.policy, found.total, found.least) == (policy, total, least)
    assert found.program.optimal
    assert method == "milp" or found.program.method == "exact"
    check_limits(found.limits, found.choices, policy, kernels, groups, total)


def check_limits(
    limits: Sequence[int],
    choices: Sequence[int],
    policy: str,
    kernels: Sequence[Kernel],
    groups: Sequence[Group],
    total: int,
) -> None:
    """Every kernel may use what was chosen for it, and the total is kept when all use all they may."""
    assert all(k.points[i][1] <= limit for k, i, limit in zip(kernels, choices, limits, strict=True))
    assert needs(policy, kernels, groups, limits) <= total


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20)
@given(drawn=networks(), total=st.integers(0, 40), more=st.integers(0, 10))
def test_more_is_never_slower(method: str, drawn: Any, total: int, more: int) -> None:
    """Nor is the arena slower than a segment for every occurrence."""
    kernels, groups = drawn
    times: dict[str, float] = {}
    for policy in POLICIES:
        try:
            less = allocate(kernels, total, policy, groups, **METHODS[method])
        except NoPlanError:
            continue
        times[policy] = less.time_ms
        again = allocate(kernels, total + more, policy, groups, **METHODS[method])
        assert again.time_ms <= less.time_ms * (1 + 1e-9)
    if "paper_wd" in times:
        assert times["arena"] <= times["paper_wd"] * (1 + 1e-9)


def random_kernels(count: int, seed: int) -> list[Kernel]:
    """As many as a network has, with fronts whose sizes have no common unit."""
    numbers = random.Random(seed)
    made = []
    for index in range(count):
        ms, workspace, listed = numbers.uniform(0.05, 1.0), numbers.randrange(1 << 20, 1 << 28), []
        for _ in range(numbers.choice((1, 2, 4, 8))):
            listed.append((ms, workspace))
            ms, workspace = ms * numbers.uniform(1.05, 1.5), int(workspace * numbers.uniform(0.3, 0.9))
        made.append(Kernel(f"k{index}", (*listed, (ms * 1.1, 0)), numbers.choice((1, 1, 1, 2, 5))))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_both_methods_agree_on_a_network(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    kernels = random_kernels(60, seed)
    for total in (120 << 20, 2544 << 20):
        by_method = {name: allocate(kernels, total, "paper_wd", (), **given) for name, given in METHODS.items()}
        for name, found in by_method.items():
            assert found.time_ms == pytest.approx(by_method["exact"].time_ms, rel=1e-7)
            assert found.used <= total
            assert found.program.method == ("milp" if name == "milp" else "exact")
    assert capfd.readouterr().out == ""  # HiGHS tells of trouble with numbers on the process's own stdout


@pytest.mark.parametrize("method", METHODS)
def test_both_methods_agree_on_parallel_branches(method: str) -> None:
    """Inception-like modules of four branches: apart from each other, the best of each is the best of all."""
    kernels = random_kernels(12, 5)
    modules = [[[0], [1, 2], [3, 4], [5]], [[6], [7, 8], [9, 10], [11]]]
    total = 300 << 20
    whole = allocate(kernels, total, "arena", modules, **METHODS[method])
    halves = [allocate([kernels[k] for k in range(a, a + 6)], total, "arena", modules[:1]) for a in (0, 6)]
    assert whole.time_ms == pytest.approx(sum(half.time_ms for half in halves))
    assert whole.used <= total


def test_a_budget_is_kept_to_the_byte() -> None:
    """One byte less than the fastest choice needs is within any solver's tolerance of it."""
    kernels = [Kernel(f"k{i}", ((1.0, 40 << 20), (2.0, 0))) for i in range(3)]
    assert allocate(kernels, 120 << 20, "paper_wd").time_ms == 3.0
    less = allocate(kernels, (120 << 20) - 1, "paper_wd")
    assert (less.time_ms, less.used) == (4.0, 80 << 20)
    less = allocate(kernels, (120 << 20) - 1, "arena", [[[0], [1], [2]]])
    assert (less.time_ms, less.used) == (4.0, 80 << 20)


def test_the_smaller_program_is_built() -> None:
    """Rows of an arena: none in sequence, one a combination of short branches, else segments."""
    kernels = random_kernels(8, 1)
    total = max(workspace for k in kernels for _, workspace in k.points)
    alone = allocate(kernels, total).program
    assert alone.rows == len(kernels)
    pair = allocate(kernels, total, "arena", [[[0], [1]]]).program
    assert pair.rows == len(kernels) + 1
    long = allocate(kernels, total, "arena", [[[0, 1, 2, 3], [4, 5, 6, 7]]]).program
    assert long.rows == len(kernels) + 8 + 1


def test_a_group_that_always_fits_needs_no_row() -> None:
    kernels = [Kernel("a", ((1.0, 10),)), Kernel("b", ((1.0, 20), (2.0, 0)))]
    assert allocate(kernels, 30, "arena", [[[0], [1]]]).program.rows == 2


def test_nothing_to_divide() -> None:
    for policy in POLICIES:
        found = allocate([], "1MiB", policy)
        assert (found.choices, found.used, found.least, found.time_ms) == ((), 0, 0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"policy": "paper"}, "policy='paper': one of arena, paper_wd would do"),
        ({"total": -1}, "total=-1: must not be negative"),
        ({"total": "12 parsecs"}, "total='12 parsecs'"),
        ({"time_limit_s": math.nan}, "time_limit_s=nan"),
        ({"kernels": [Kernel("a", ())]}, "a has no points"),
        ({"kernels": [Kernel("a", ((math.nan, 0),))]}, "a has points"),
        ({"kernels": [Kernel("a", ((1.0, -1),))]}, "a has points"),
        ({"kernels": [Kernel("a", ((1.0, 0),), 0)]}, "a has count=0: 1 or more would do"),
        ({"groups": [[[0], [1]], [[0]]]}, "1 is no index of a kernel: 0 to 0 would do"),
        ({"groups": [[[0], [0]]]}, "a is in 2 branches at once and has count=1: 2 or more would do"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"kernels": [Kernel("a", ((1.0, 0),))], "total": 10} | arguments
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        allocate(**given)
