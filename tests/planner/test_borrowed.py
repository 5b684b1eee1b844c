"""Products computed by way of others: turned or larger ones, by the solvers and configs that are good for these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.planner.test_products import check
from tests.products import products

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.gemm._nested import NestedSolver
from tilewise.wisdom import Wisdom

NESTED = ("padded_gemm", "turned_gemm")


def nested(name: str) -> NestedSolver:
    solver = solvers.get(name)
    assert isinstance(solver, NestedSolver)
    return solver


def measured(planner: Planner, p: GemmProblem) -> None:
    """Have all configs of ``thin_gemm`` measured, whatever is expected of them."""
    others = (solver.name for solver in solvers.solving(p) if solver.name not in ("thin_gemm", "aten_gemm"))
    planner.plan(p, Options(rigor="patient", exclude=tuple(others)))


@pytest.mark.parametrize("name", NESTED)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), p=products(thin=True, batched=False), bias=st.booleans())
def test_another_solver_computes_the_other_product(name: str, data: st.DataObject, p: GemmProblem, bias: bool) -> None:
    """Each form by a solver that is there on a CPU and writes where it is told to."""
    outer, inner, p = nested(name), solvers.get("thin_gemm"), replace(p, bias=bias)
    forms = [form for form in outer.forms(p) if not inner.why_not(outer.child(p, form))]
    if not forms:
        return
    form = data.draw(st.sampled_from(forms))
    child = outer.child(p, form)
    assert child.flops >= p.flops
    configs = list(inner.configs(child))
    if configs:
        c = Config(**form, solver=inner.name, **data.draw(st.sampled_from(configs)))
        assert outer.computes_with(c) == inner.name
        check(Plan(p.key, name, outer.version, c), p)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_vendors_algorithms_compute_the_other_product(name: str, dtype: str) -> None:
    outer, device = nested(name), device_name(torch.device("cuda"))
    for sizes, op in (((130, 65, 200), "NN"), ((33, 257, 129), "NT"), ((64, 40, 65), "TN")):
        p = GemmProblem(*sizes, op, dtype=dtype, device=device)
        found = [c for c in outer.configs(p) if outer.computes_with(c) == "cublaslt_gemm"]
        assert found
        for c in found:
            a, b = (torch.randn(p.shape(r), device="cuda", dtype=p.torch_dtype(r)) for r in "ab")
            out = torch.full(p.shape("c"), float("nan"), device="cuda", dtype=p.torch_dtype("c"))
            run = outer.bind(p, c, a, b, out)
            run(a, b, out, torch.full((outer.workspace(p, c),), 0xFF, device="cuda", dtype=torch.uint8))
            near = 1e-3 if dtype == "fp32" else 0.3
            torch.testing.assert_close(out.double(), p.reference(a, b), rtol=near, atol=near)


def test_a_larger_neighbour_lends_its_plan(tmp_path: Path) -> None:
    """What was measured of a larger product, in another process or this one, is tried for a smaller one."""
    small, large = GemmProblem(17, 257, 130, "NN"), GemmProblem(17, 260, 132, "NN")
    assert nested("padded_gemm").child(small, Config(sizes=(17, 260, 132))) == large
    measured(Planner(Wisdom(tmp_path / "wisdom.sqlite3")), large)
    log = Planner(Wisdom(tmp_path / "wisdom.sqlite3")).explain(small)
    lent = [m for m in log if m.solver == "padded_gemm" and m.config.get("solver") == "thin_gemm"]
    assert lent
    assert {m.config["sizes"] for m in lent} == {(17, 260, 132)}
    assert all(m.time_ms is not None or m.reason for m in lent)


def test_what_cannot_be_lent_keeps_its_reason(tmp_path: Path) -> None:
    small, large = GemmProblem(17, 257, 130, "NN"), GemmProblem(17, 260, 132, "NN")
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    measured(planner, large)
    log = planner.explain(small, Options(exclude=("thin_gemm",)))
    lent = [m for m in log if m.config.get("solver") == "thin_gemm"]
    assert lent
    assert all(m.reason for m in lent)


@pytest.mark.parametrize(
    ("name", "c"),
    [
        ("padded_gemm", {"sizes": (8, 8, 8), "solver": "aten_gemm"}), ("padded_gemm", {"sizes": (8, 8, 8), "tile": 3}),
        ("padded_gemm", {"solver": "thin_gemm"}), ("turned_gemm", {"turn": "a", "solver": "padded_gemm"}),
        ("turned_gemm", {"turn": "a", "solver": "row_blocks"}), ("turned_gemm", {"turn": "x"}),
        ("turned_gemm", {"turn": "a", "solver": "direct"}), ("turned_gemm", {"turn": "a", "solver": "no_such"}),
    ],
)  # fmt: skip
def test_configs_that_are_none_are_refused(name: str, c: dict[str, Any]) -> None:
    p = GemmProblem(7, 8, 7)
    tensors = [torch.empty(p.shape(role), dtype=torch.float32, device="cpu") for role in "abc"]
    with pytest.raises(solvers.SolverUnavailable, match="is no config of"):
        nested(name).bind(p, Config(**c), *tensors)
