"""Which kernels planning may want, told before: on a CPU all of them, on a GPU those that it would begin with."""

from __future__ import annotations

import importlib.util
import os

import pytest
from tests.sampling import EVERY

from tilewise import solvers
from tilewise.kernels.building.noted import noted
from tilewise.kernels.building.target import Architecture, sought
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.search.foreseen import compile_all, to_compile
from tilewise.problems.base import Problem
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import Pass

HOPPER = Architecture(9, 0)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
LAYERS = (
    "g4mb4ic4ih14oc4oh14kh5ph2",
    "mb6ic24ih10oc48oh5kh3ph1sh2",
    "mb7ic17ih9oc19oh9kh3ph1",
    "g16mb4ic16iw64oc16kw9pw4",
)


def conv(text: str, pass_: Pass = Pass.FPROP, device: str = "cpu", **fields: str) -> Problem:
    return parse_layer(text, pass_=pass_, device=device, **fields)


def test_parts_are_foreseen_as_splits_make_them() -> None:
    problem = conv("mb8ic16ih16oc16oh16kh3ph1")
    undivided = to_compile([problem], Options(batch_sizes="undivided"), None)
    assert {part for part, _ in undivided} == {problem}
    batches = {part.batch for part, _ in to_compile([problem], Options(), None)}
    assert batches >= {8, 4, 2, 1}
    limited = to_compile([problem], Options(workspace=1 << 16), None)
    assert any(part.axes != problem.axes for part, _ in limited), "tiles of images, where the limit keeps something out"
    assert len(to_compile([problem, problem], Options(), None)) == len(to_compile([problem], Options(), None))


def test_what_is_excluded_is_not_foreseen() -> None:
    problem = conv("mb4ic8ih8oc8oh8kh3ph1")
    names = {plan.solver for _, plan in to_compile([problem], Options(), None)}
    left = {plan.solver for _, plan in to_compile([problem], Options(exclude=("winograd",)), None)}
    assert left == names - {"winograd"}


@needs_triton
def test_on_a_gpu_only_what_is_compiled_and_promising_is_foreseen() -> None:
    problem = conv("mb256ic64ih28oc64oh28kh3ph1", device="cuda:sm_90")
    found = to_compile([problem], Options(), HOPPER)
    assert found
    assert all(solvers.get(plan.solver).compiles for _, plan in found)
    assert {part.batch for part, _ in found} >= {256, 128}
    small = conv("mb32ic64ih28oc64oh28kh3ph1", device="cuda:sm_90")
    assert {part.batch for part, _ in to_compile([small], Options(), HOPPER)} == {32}, "its cache holds the whole"
    patient = to_compile([problem], Options(rigor="patient"), HOPPER)
    assert len(patient) > len(found)
    assert sought() is None


@needs_triton
def test_a_candidate_that_cannot_be_compiled_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are none that Triton compiles, which is how tests of this process see them."""
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("TILEWISE_COMPILE_WORKERS", "0")
    problem = conv("g8mb2ic8ih12oc8oh12kh3ph1", device="cuda:sm_90")
    options = Options(batch_sizes="undivided")
    found = [(part, plan) for part, plan in to_compile([problem], options, HOPPER) if plan.solver == "depthwise"]
    told: list[str] = []
    lost = compile_all(found, HOPPER, told.append)
    assert list(lost) == told
    assert all(reason for reason in lost.values())


@pytest.mark.skipif(not EVERY, reason="compiles for a minute: make test-all runs it")
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("workspace", [None, 1 << 16])
@pytest.mark.parametrize("layer", LAYERS)
def test_planning_on_a_cpu_wants_no_kernel_that_was_not_foreseen(layer: str, workspace: int | None) -> None:
    for pass_ in Pass:
        problem, options = conv(layer, pass_), Options(workspace=workspace)
        assert compile_all(to_compile([problem], options, None), None) == {}
        foreseen = set(noted())
        try:
            Planner().plan(problem, options)
        except NoPlanError:
            assert workspace is not None
        assert set(noted()) == foreseen
