"""Parts of a plan that another device computes than its whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import toys

from tilewise import solvers
from tilewise.execute import PlanMismatch, bind
from tilewise.execute.elsewhere import Elsewhere, example_there
from tilewise.execute.nodes import node_of
from tilewise.machine.device import device_name, environment
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import Part
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands
from tilewise.wisdom import Wisdom


@given(
    problem=toys.problems(batch=(2, 4), dtypes=("fp32", "bf16")),
    bias=st.booleans(),
    accumulate=st.booleans(),
    own_output=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_tensors_are_copied_there_and_results_back(
    problem: ConvProblem, bias: bool, accumulate: bool, own_output: bool
) -> None:
    """On one device the copies are the same as between two."""
    problem = replace(problem, accumulate=accumulate, bias=bias and problem.pass_ is Pass.FPROP)
    alone = problem.changed(accumulate=False)
    examples = [tuple(example_there(alone, r) for r in roles) for roles in (alone.operands, alone.results)]
    with toys.installed(toys.toy(name="there", scratch=300, adds_bias=True, own_output=own_output)):
        there = Elsewhere(node_of(toys.leaf("there", alone), alone, *examples), problem)
    operands = make_operands(problem, 3)
    out = spread(toys.poison(problem))
    added = (toys.bias_of(problem),) if problem.bias else ()
    (result,) = there.run(tuple(map(spread, operands)), (out,), None, *added)
    assert result is out
    want = toys.reference(problem, *operands, 1.0, problem.bias)
    assert toys.distance(out, want) < 2 * toys.DTYPE_ERROR[problem.dtype]
    assert there.workspace == 0
    assert there.elsewhere["cpu"] >= 300 + sum(problem.nbytes(role) for role in problem.roles)


def spread(t: torch.Tensor) -> torch.Tensor:
    """A view with the values of ``t`` and NaN between them."""
    return torch.stack((t, torch.full_like(t, math.nan)), -1)[..., 0]


def test_nothing_is_kept_of_an_operand_on_another_device() -> None:
    constant = replace(toys.small(Pass.FPROP, batch=2), constant_weight=True, device="cuda:another")
    whole = replace(toys.small(Pass.FPROP, batch=4), device="cpu")
    with toys.installed(Shared(constant)), pytest.raises(PlanMismatch, match="cannot keep a constant operand"):
        bind(shared(whole, constant, 2), whole, *make_operands(whole))


class Shared(toys.Cut):
    """Cuts the batch in two and has the second part computed as ``part`` says, on its device."""

    name, version = "shared", 1

    def __init__(self, part: ConvProblem) -> None:
        self._part = part

    def children(self, p: ConvProblem, c: Config) -> tuple[Part, ...]:
        first, second = super().children(p, c)
        assert second.problem is not None
        changes = {"device": self._part.device, "constant_weight": self._part.constant_weight}
        return first, replace(second, problem=replace(second.problem, **changes))


def shared(whole: ConvProblem, part: ConvProblem, size: int) -> Plan:
    """The plan that computes ``size`` images on the device of ``whole``, and the others on that of ``part``."""
    sizes = (size, whole.batch - size)
    parts = Shared(part).children(whole, Config(axis="batch", sizes=sizes))
    leaves = tuple(Plan(p.problem.key, "aten", toys.leaf("aten", p.problem).version) for p in parts if p.problem)
    return Plan(whole.key, "shared", 1, Config(axis="batch", sizes=sizes), leaves, (1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("whole_on_gpu", [False, True])
def test_a_part_on_a_cpu_and_a_part_on_a_gpu(pass_: Pass, accumulate: bool, whole_on_gpu: bool) -> None:
    names = device_name("cuda"), "cpu"
    axis = Axis(14, 3, before=1, after=1)
    problem = ConvProblem(pass_, 6, 16, 8, (axis, axis), device=names[not whole_on_gpu], accumulate=accumulate)
    part = problem.on(names[whole_on_gpu])
    plan = shared(problem, part, 4)
    assert [child.device for child in plan.children] == [problem.device, part.device]
    with toys.installed(Shared(part)):
        operands = make_operands(problem, 3)
        out = toys.poison(problem).to(operands[0].device)
        bound = bind(plan, problem, *operands, out)
        assert bound.workspaces[part.device] > 0
        for _ in range(2):
            out.copy_(toys.poison(problem))
            bound(*operands, None, out)
        want = toys.reference(problem, *(t.cpu() for t in operands), 1.0)
        assert toys.distance(out.cpu(), want) < 1e-5


class OnCpu(toys.Cut):
    """Has parts of the batch computed on the CPU, whatever the device of the whole."""

    name, version = "on_cpu", 1
    axis, level = "batch", 1

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        return (p.batch // 2,)

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        return replace(p.split("batch", (size, p.batch - size))[0].problem, device="cpu")

    def children(self, p: ConvProblem, c: Config) -> tuple[Part, ...]:
        parts = p.split("batch", c["sizes"])
        return tuple(replace(part, problem=part.problem.on("cpu")) for part in parts)


@pytest.mark.gpu
def test_parts_on_another_device_are_measured_there(tmp_path: Path) -> None:
    axis = Axis(14, 3, before=1, after=1)
    whole = ConvProblem(Pass.FPROP, 6, 16, 8, (axis, axis), device=device_name("cuda"))
    others = tuple(s.name for s in solvers.all_solvers() if s.name not in ("aten", "micro_batch"))
    with toys.installed(OnCpu(), without=others):
        wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
        log = Planner(wisdom).explain(whole, Options(rigor="patient"))  # a busy CPU is far too slow for others
        (tried,) = (m for m in log if m.solver == "on_cpu")
        assert tried.time_ms is not None, log
        assert tried.workspace == 0
        part = OnCpu().child(whole, 3)
        known = {m.solver: m for m in wisdom.measurements(environment("cpu").key, part.key)}
        assert known["aten"].time_ms is not None
        assert not wisdom.measurements(environment(whole.device).key, part.key)


def test_a_plans_device_is_the_last_word_of_its_problem() -> None:
    for device in ("cpu", "cuda:NVIDIA H100 80GB HBM3"):
        problem = toys.small(Pass.FPROP).on(device)
        assert Plan(problem.key, "aten", 1).device == device == problem.device
