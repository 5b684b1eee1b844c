"""Shares of a batch on several devices at once: right whatever runs beside them, in their threads, told and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests import toys

from tilewise import execute, solvers
from tilewise.execute import bind
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Config, Plan
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.shares import Shares

devices = solvers.get("devices")
assert isinstance(devices, solvers.Split)
needs_threads = pytest.mark.skipif(not bounds_threads(), reason="torch's threads cannot be bounded here")
LEAVES = (
    toys.toy(name="writer"),
    toys.toy(name="adder", accumulates=True, adds_bias=True, scratch=513),
    toys.toy(name="giver", own_output=True, scratch=64),
)
some = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    execute.release_workspaces()


def plan_of(problem: ConvProblem, config: Config, names: Sequence[str]) -> Plan:
    """The plan that shares the batch as ``config`` says, with one solver of ``names`` for each part."""
    parts = devices.children(problem, config)
    leaves = tuple(
        toys.leaf(name, part.problem) for name, part in zip(names, parts, strict=True) if part.problem is not None
    )
    return Plan(problem.key, "devices", devices.version, config, leaves, (1,) * len(leaves))


@st.composite
def shares(draw: st.DrawFn, batch: int) -> Config:
    """Shares between the tensors' own device and the CPU, which may be the same: either may have nothing."""
    here = draw(st.integers(0, batch))
    cuts = draw(toys.cuts(batch - here)) if here < batch else ()
    return Shares(("here", "cpu"), ((here,) if here else (), tuple(cuts)), draw(st.integers(1, 3))).config()


@needs_threads
@some
@given(st.data())
def test_any_shares_give_the_reference(data: st.DataObject) -> None:
    """Views, odd batches and channels, 16-bit sums, biases, results that are added to or begin as NaN."""
    problem = data.draw(toys.problems(batch=(2, 7), dtypes=("fp32", "bf16")))
    config = data.draw(shares(problem.batch))
    a, b = toys.operands(problem)
    want = toys.reference(problem, a, b, 1.0, problem.bias)
    bias = toys.bias_of(problem) if problem.bias else None
    limit = 2 * toys.DTYPE_ERROR[problem.out_dtype]
    torch.set_num_threads(data.draw(st.sampled_from((1, 2, 3, 5))))
    with toys.installed(*LEAVES):
        count = len(devices.children(problem, config))
        names = [data.draw(st.sampled_from(LEAVES)).name for _ in range(count)]
        plan = plan_of(problem, config, names)
        out = toys.poison(problem)
        surroundings = out.untyped_storage()
        bound = bind(plan, problem, a, b, out)
        assert bound(a, b, bias, out) is out
        assert toys.distance(out, want) <= limit
        if problem.layout(problem.result) == "view":
            flat = torch.empty(0, dtype=out.dtype).set_(surroundings)  # type: ignore[call-overload]
            assert int((flat == 7.0).sum()) >= 3 * math.prod(out.shape[:-1])
        if not problem.accumulate:
            assert toys.distance(bind(plan, problem, a, b)(a, b, bias), want) <= limit
