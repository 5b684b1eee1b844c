"""Planning with all algorithms of cuBLASLt, by a stand-in for the library that takes tensors on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.solvers.lt_standin import SCRATCH, LtStand, bound
from tests.solvers.lt_standin import stand as stand  # a fixture

from tilewise import execute, solvers
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.planner.gate import is_offered
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import make_operands
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.gemm import cublaslt_gemm
from tilewise.wisdom import Wisdom

OTHERS = tuple(s.name for s in solvers.solving(GemmProblem) if s.name not in ("aten_gemm", "cublaslt_gemm"))
P = GemmProblem(32, 48, 64, "NT", bias=True)


@pytest.fixture(autouse=True)
def _on_a_cpu(stand: LtStand, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: object, p: GemmProblem, c: Config, *tensors: Any) -> Any:
        return bound(p, c, *tensors)

    monkeypatch.setattr(cublaslt_gemm.CublasLtGemm, "devices", frozenset({"cpu"}))
    monkeypatch.setattr(cublaslt_gemm.CublasLtGemm, "bind", bind)


def explained(folder: Path, **options: Any) -> dict[Config, Any]:
    """What was measured of the library's algorithms, by config."""
    planner = Planner(Wisdom(folder / "wisdom.sqlite3"))
    found = planner.explain(P, Options(exclude=OTHERS, **options))
    return {m.config: m for m in found if m.solver == "cublaslt_gemm"}


def test_every_algorithm_is_measured_and_right(stand: LtStand, tmp_path: Path) -> None:
    measured = explained(tmp_path)
    assert {c["algo"] for c in measured} == {1, 2, 3, 5}
    for m in measured.values():
        assert m.reason == ""
        assert m.time_ms is not None
        assert m.workspace >= SCRATCH[m.config["algo"]]


@pytest.mark.slow
def test_a_limit_keeps_algorithms_out(stand: LtStand, tmp_path: Path) -> None:
    measured = explained(tmp_path, workspace=2**20)
    assert {c["algo"] for c, m in measured.items() if not m.reason} == {1, 2, 3}


def test_an_algorithm_that_is_gone_is_lost_with_its_reason(stand: LtStand) -> None:
    solver = solvers.get("cublaslt_gemm")
    plan = Plan(P.key, solver.name, solver.version, next(iter(solver.configs(P))), time_ms=1.0)
    a, b = make_operands(P)
    bias = torch.randn(P.n, dtype=torch.float32, device="cpu")
    want = (P.reference(a, b) + bias.double()).float()
    torch.testing.assert_close(execute.bind(plan, P, a, b)(a, b, bias), want, rtol=1e-4, atol=1e-4)
    stand.gone |= {1, 2, 3}
    for cached in (cublaslt_gemm._listing, cublaslt_gemm._algorithm):
        cached.cache_clear()
    with pytest.raises(SolverUnavailable, match="cublasLtMatmulAlgoInit"):
        execute.bind(plan, P, a, b)
    table = PlanTable(Options(), "plan")
    table.learn(P, False, plan)
    device = torch.device("cpu")
    assert table.ready([P], False, device)
    assert table.bound(P, False, device) is None, "torch computes it"


@pytest.mark.parametrize(
    ("c", "offered"),
    [
        (Config(algo=2, tile=7, stages=2, cluster=2), True),
        (Config(algo=4, tile=20, stages=1, cluster=1), False),
        (Config(algo=1, tile=1.0, stages=1), False),
        (Config(algo=1, tile=21, stages=1, cluster=2, twin=3), False),
    ],
)
def test_a_plan_from_elsewhere_is_taken_where_the_library_has_its_algorithm(
    stand: LtStand, c: Config, offered: bool
) -> None:
    assert is_offered(solvers.get("cublaslt_gemm"), P, c) is offered
