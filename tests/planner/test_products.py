"""Matrix products through planning: found, divided, checked, remembered, explained, and written to a schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.products import fill, memory_of

from tilewise import execute, solvers
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.wisdom import Wisdom

PRODUCTS = (
    GemmProblem(5, 130, 70, "NT", bias=True),
    GemmProblem(70, 9, 300, "NN", leading=(301, 10, 11), alignment=(4, 4, 4)),
    GemmProblem(33, 40, 50, "TN", batch=3, bias=True),
    GemmProblem(20, 30, 40, "TT", dtype="bf16"),
)
QUICK = Options(rigor="estimate")


def planner(folder: Path) -> Planner:
    return Planner(Wisdom(folder / "wisdom.sqlite3"))


def check(plan: Plan, p: GemmProblem) -> None:
    """Compute by ``plan`` into memory full of NaN, and compare."""
    a, b = (fill(memory_of(p, role)[0], i) for i, role in enumerate("ab"))
    out, _ = memory_of(p, "c")
    bias = fill(torch.empty(p.n, dtype=p.torch_dtype("c")), 3) if p.bias else None
    execute.bind(plan, p, a, b, out)(a, b, bias, out)
    want = p.reference(a, b) + (0 if bias is None else bias.double())
    tolerance = 1e-4 if p.dtype == "fp32" else 0.1
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", PRODUCTS, ids=lambda p: f"{p.op}-{p.dtype}-{p.batch}")
def test_a_product_is_planned_and_remembered(p: GemmProblem, tmp_path: Path) -> None:
    plan = planner(tmp_path).plan(p)
    assert plan.problem == p.key
    check(plan, p)
    again = planner(tmp_path).plan(p, Options(rigor="wisdom_only"))
    assert again == plan


def test_every_solver_is_explained(tmp_path: Path) -> None:
    p = replace(PRODUCTS[0], bias=False)
    log = planner(tmp_path).explain(p, QUICK)
    assert {m.solver for m in log} == {solver.name for solver in solvers.solving(p)}
    assert all(m.reason or m.time_ms is not None or m.estimate_ms is not None for m in log), log


@pytest.mark.parametrize("axis", ["rows", "columns", "depth", "batch"])
@pytest.mark.parametrize("op", ["NN", "NT", "TN", "TT"])
def test_parts_of_every_axis_are_put_together(op: str, axis: str) -> None:
    """The executor takes the parts of any axis from a split that names it."""
    p = GemmProblem(12, 20, 16, op, batch=4 if axis == "batch" else 0)
    split = solvers.get("row_blocks")

    class AlongAxis(type(split)):  # type: ignore[misc]
        def axis_of(self, p: GemmProblem) -> str:
            return axis

    whole = p.extent(axis)
    sizes = (whole // 2, whole - whole // 2)
    before = solvers.get
    children = tuple(Plan(part.problem.key, "aten_gemm", 1, Config()) for part in p.split(axis, sizes))
    plan = Plan(p.key, "row_blocks", 1, Config(sizes=sizes), children, (1, 1))
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(solvers, "get", lambda name: AlongAxis() if name == "row_blocks" else before(name))
        check(plan, p)


@pytest.mark.parametrize(
    ("rows", "device", "idle"),
    [(65, "cuda:Some GPU", False), (64, "cuda:Some GPU", True), (9, "cuda:Some GPU", True), (65, "cpu", True)],
)
def test_rows_are_divided_without_a_limit_where_a_tile_is_not_full(rows: int, device: str, idle: bool) -> None:
    split = solvers.get("row_blocks")
    assert isinstance(split, solvers.Split)
    assert bool(split.idle(GemmProblem(rows, 64, 64, device=device))) is idle
    assert not split.sizes(GemmProblem(rows, 64, 64, device=device), "undivided")


@pytest.mark.parametrize("sizes", [(8, 4, 1), (13,), (6, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_divided(sizes: tuple[int, ...], bias: bool) -> None:
    p = GemmProblem(13, 24, 40, "NT", bias=bias)
    split = solvers.get("row_blocks")
    children = tuple(Plan(split.child(p, size).key, "thin_gemm", 3, thin(split.child(p, size))) for size in sizes)
    check(Plan(p.key, "row_blocks", 1, Config(sizes=sizes), children, (1,) * len(sizes)), p)


def thin(p: GemmProblem) -> Config:
    return next(iter(solvers.get("thin_gemm").configs(p)))


@pytest.mark.parametrize("p", [GemmProblem(64, 8, 33, "TN"), GemmProblem(5, 63, 33, "NN", bias=True)])
def test_shares_run_at_once(p: GemmProblem, tmp_path: Path) -> None:
    split = solvers.get("row_shares")
    assert split.divisions(p, 2)
    for sizes in split.divisions(p, 2):
        children = tuple(Plan(split.child(p, size).key, "aten_gemm", 1, Config()) for size in sizes)
        check(Plan(p.key, "row_shares", 1, Config(sizes=sizes), children, (1,) * len(sizes)), p)


def test_a_plan_without_any_workspace_is_found(tmp_path: Path) -> None:
    """Only a kernel that copies nothing keeps this limit."""
    p = GemmProblem(512, 48, 64, "TN")
    names = [solver.name for solver in solvers.solving(p)]
    others = tuple(name for name in names if name not in ("thin_gemm", "row_blocks", "aten_gemm"))
    plan = planner(tmp_path).plan(p, Options(workspace=0, exclude=others))
    assert (plan.workspace, plan.solver) == (0, "thin_gemm")
    check(plan, p)


@pytest.mark.parametrize("name", ["turned_gemm", "padded_gemm", "split_k_gemm", "onednn_gemm"])
def test_each_way_is_planned_where_it_is_alone(name: str, tmp_path: Path) -> None:
    p = GemmProblem(17, 65, 513, "NN")
    others = tuple(solver.name for solver in solvers.solving(p) if solver.name != name)
    plan = planner(tmp_path).plan(p, Options(exclude=others))
    assert plan.solver == name
    check(plan, p)
