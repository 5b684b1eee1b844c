"""Products with an activation: by what solvers do as they write, and by a pass behind those that do not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.products import fill, memory_of, products

from tilewise import execute, solvers
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.activations import ACTIVATIONS, activate, activated
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import Split, get
from tilewise.wisdom import Wisdom

ROUNDING = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}


def by(p: GemmProblem, name: str, c: Config | None = None) -> Plan:
    """The plan of a single solver, with its first config unless one is given."""
    solver = get(name)
    return Plan(p.key, name, solver.version, next(iter(solver.configs(p))) if c is None else c)


def check(plan: Plan, p: GemmProblem, *, new: bool = False) -> None:
    """Compute by ``plan`` into memory full of NaN, or with ``new`` into what the call allocates, and compare."""
    device = torch.device(p.device_type)
    a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
    out, base = memory_of(p, "c")
    bias = fill(torch.empty(p.n, dtype=p.torch_dtype("c"), device=device), 3) if p.bias else None
    bound = execute.bind(plan, p, a, b, out)
    got = bound(a, b, bias) if new else bound(a, b, bias, out)
    want = p.reference(a, b) + (0 if bias is None else bias.double())
    bound_of_gap = ROUNDING[p.dtype] * math.sqrt(p.k)
    torch.testing.assert_close(got.double(), activated(want, p.activation), rtol=0, atol=bound_of_gap)
    if not new:
        outside = torch.ones_like(base, dtype=torch.bool)
        outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        assert bool(base[outside].isnan().all())


@pytest.mark.parametrize("name", [solver.name for solver in solvers.solving(GemmProblem)])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), p=products(thin=True), activation=st.sampled_from(ACTIVATIONS[1:]), new=st.booleans())
def test_every_solver_computes_an_activation(
    name: str, data: st.DataObject, p: GemmProblem, activation: str, new: bool
) -> None:
    solver, p = get(name), replace(p, activation=activation, bias=data.draw(st.booleans()))
    if isinstance(solver, Split) or solver.why_not(p):
        return
    configs = list(solver.configs(p))
    if configs:
        check(by(p, name, data.draw(st.sampled_from(configs))), p, new=new)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [solver.name for solver in solvers.solving(GemmProblem)])
def test_every_solver_computes_an_activation_on_a_gpu(name: str, dtype: str, activation: str) -> None:
    solver, device = get(name), device_name(torch.device("cuda"))
    for sizes, op, batch, bias in (((33, 96, 320), "NT", 0, True), ((64, 65, 130), "NN", 0, False),
                                   ((24, 40, 513), "TN", 3, True)):  # fmt: skip
        p = GemmProblem(*sizes, op, batch, dtype=dtype, bias=bias, activation=activation, device=device)
        if isinstance(solver, Split) or solver.why_not(p):
            continue
        for c in list(solver.configs(p))[:3]:
            for new in (False, True):
                check(by(p, name, c), p, new=new)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("split", "sizes"), [("row_blocks", (8, 5)), ("row_shares", (7, 6))])
def test_parts_have_the_activation_of_the_whole(split: str, sizes: tuple[int, ...], bias: bool) -> None:
    p = GemmProblem(13, 8, 40, "NT", bias=bias, activation="gelu")
    for name in ("thin_gemm", "onednn_gemm", "aten_gemm"):
        solver = solvers.get(split)
        assert isinstance(solver, Split)
        parts = [solver.child(p, size) for size in sizes]
        assert {part.activation for part in parts} == {"none"}
        plan = Plan(p.key, split, 1, Config(sizes=sizes), tuple(by(part, name) for part in parts), (1,) * len(sizes))
        check(plan, p)


def test_who_applies_it() -> None:
    p = GemmProblem(4, 5, 6, "NT", bias=True, activation="relu")
    tanh = replace(p, activation="tanh")
    assert execute.activates(by(tanh, "onednn_gemm"), tanh)
    assert not execute.activates(by(p, "onednn_gemm"), p), "it would make 0 of a NaN"
    assert not execute.activates(by(p, "aten_gemm"), p)
    assert not execute.activates(by(p, "split_k_gemm", Config(splits=2)), p)
    gpu = replace(p, device="cuda:Some GPU")
    assert get("thin_gemm").does_activate(gpu, Config())
    lt = get("cublaslt_gemm")
    assert lt.does_activate(gpu, Config())
    assert lt.does_activate(replace(gpu, activation="gelu_tanh"), Config())
    assert not lt.does_activate(replace(gpu, activation="gelu"), Config())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays(activation: str) -> None:
    """A broken number shows in the results that it belongs to, by whatever solver on a CPU, and in no others."""
    p = GemmProblem(17, 40, 33, "NT", bias=True, activation=activation)
    ran = 0
    for solver in solvers.solving(p):
        if isinstance(solver, Split) or solver.why_not(p):
            continue
        for c in list(solver.configs(p))[:2]:
            a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
            bias = fill(torch.empty(p.n, dtype=torch.float32, device="cpu"), 3)
            a[2, 5] = bias[7] = math.nan
            got = execute.bind(by(p, solver.name, c), p, a, b)(a, b, bias)
            want = torch.zeros(p.shape("c"), dtype=torch.bool)
            want[2] = want[:, 7] = True
            assert torch.equal(got.isnan(), want), (solver.name, c)
            ran += 1
    assert ran >= 2


def test_a_bias_that_the_problem_does_not_have_is_refused() -> None:
    p = GemmProblem(4, 5, 6, "NT", activation="tanh")
    a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
    with pytest.raises(ValueError, match="none would do"):
        execute.bind(by(p, "aten_gemm"), p, a, b)(a, b, torch.ones(5, dtype=torch.float32))


@pytest.mark.parametrize("p", [GemmProblem(9, 40, 70, "NT", bias=True, activation="silu"),
                               GemmProblem(6, 7, 300, "TN", batch=2, activation="sigmoid")])  # fmt: skip
def test_it_is_planned_checked_and_remembered(p: GemmProblem, tmp_path: Path) -> None:
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    plan = planner.plan(p)
    check(plan, p)
    assert Planner(Wisdom(tmp_path / "wisdom.sqlite3")).plan(p, Options(rigor="wisdom_only")) == plan
    assert planner.plan(replace(p, activation="none")).problem != plan.problem


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_and_not_in_place_are_the_same(name: str) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    want = activated(x, name)
    assert activate(x, name) is x
    assert torch.equal(x, want)
