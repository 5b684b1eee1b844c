"""Micro-batches: sizes of each policy, and parts that are what the planner was told they are."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests import toys

from tilewise import solvers
from tilewise.plan import Config
from tilewise.planner.fronts import divide
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

micro_batch = solvers.get("micro_batch")
assert isinstance(micro_batch, solvers.Split)


@given(st.integers(2, 300))
def test_sizes_are_those_of_the_policy(batch: int) -> None:
    """mu-cuDNN III-D; the whole batch is no division."""
    problem = toys.small(batch=batch)
    assert list(micro_batch.sizes(problem, "undivided")) == []
    assert sorted([*micro_batch.sizes(problem, "all"), *micro_batch.between(problem, "all")]) == list(range(1, batch))
    powers = list(micro_batch.sizes(problem, "powers_of_two"))
    assert powers == sorted((2**n for n in range(9) if 2**n < batch), reverse=True)


def test_one_image_is_not_divided() -> None:
    assert micro_batch.why_not(toys.small(batch=1)) == ["a batch of 1 cannot be divided"]


@given(
    toys.problems(batch=(2, 12), dtypes=("fp32", "bf16")),
    st.tuples(*[st.sampled_from((2, 4, 8, 16))] * 3),
    st.data(),
)
def test_each_part_is_the_child_that_was_planned(
    problem: ConvProblem, alignment: tuple[int, int, int], data: st.DataObject
) -> None:
    """All but for more alignment, and the first sum of WGRAD, which the executor may set."""
    problem = replace(problem, alignment=alignment)
    sizes = data.draw(st.sets(st.integers(1, problem.batch - 1), min_size=1)) | {1}
    rates = {size: [(float(data.draw(st.integers(1, 9)) * size), 0)] for size in sizes}
    division = divide(problem.batch, rates)[0].sizes
    for size, part in zip(division, micro_batch.children(problem, Config(sizes=division)), strict=True):
        child = micro_batch.child(problem, size)
        assert part.problem is not None
        assert replace(part.problem, alignment=child.alignment) == child
        for role, has, promised in zip(ROLES, part.problem.alignment, child.alignment, strict=True):
            assert has % promised == 0, role


def test_images_of_odd_bytes_align_by_the_power_of_two_in_the_size() -> None:
    problem = toys.small(batch=12, channels=1, dtype="bf16")
    problem = replace(problem, axes=(replace(problem.axes[0], size=7),) * 2)  # 49 elements, 98 bytes an image
    assert [micro_batch.child(problem, size).alignment for size in (8, 6, 4, 3)] == [
        (16, 16, 16),
        (4, 16, 4),
        (8, 16, 8),
        (2, 16, 2),
    ]


@pytest.mark.parametrize("pass_", Pass)
def test_parts_know_how_they_are_written(pass_: Pass) -> None:
    problem = toys.small(pass_, dtype="bf16", bias=pass_ is not Pass.WGRAD)
    child = micro_batch.child(problem, 4)
    assert child.batch == 4
    assert not child.bias
    sums = pass_ is Pass.WGRAD
    assert child.accumulate is sums
    assert child.out_dtype == ("fp32" if sums else "bf16")
