"""The solver of the manual's page for authors, as it stands there, in all that every other solver must pass."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from tests import toys
from tests.factories import defaults_in
from tests.solvers.test_solvers import Memory, cases, check_allocations, check_declarations, exercise
from tests.strategies import problems, with_memory
from tests.test_architecture import SHARED, imported
from tests.test_docs import BLOCK, ROOT

from tilewise import execute, solvers
from tilewise.plan import Config
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Solver

PAGE = ROOT / "docs" / "solvers.md"
NAME = "tap_products"
MODULE = f"tilewise.solvers.{NAME}"
(CODE,) = (block for block in BLOCK.findall(PAGE.read_text("utf-8")) if "(ConvSolver):" in block)


def example() -> Solver:
    """An instance of the page's solver."""
    module = types.ModuleType(MODULE)
    exec(compile(CODE, str(PAGE), "exec"), module.__dict__)
    kind = module.__dict__["TapProducts"]
    solver: Solver = kind()
    assert solver.name == NAME
    return solver


SOLVER = example()


@pytest.mark.sampled(0, each=("solver", "device", "pass_", "dims"))
@pytest.mark.parametrize(("solver", "pass_", "dims", "dtype", "precision", "device"), cases([SOLVER]))
def test_it_computes_what_it_supports(
    solver: Solver, pass_: Pass, dims: int, dtype: str, precision: str, device: str
) -> None:
    exercise(solver, pass_, dims, dtype, precision, device)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(found=with_memory(problems()))
def test_its_declarations_agree(found: tuple[ConvProblem, Memory]) -> None:
    check_declarations(SOLVER, found[0])


@pytest.mark.gpu
def test_it_allocates_what_it_declares() -> None:
    check_allocations(SOLVER, Pass.FPROP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's code in a file, as its author would write it."""
    path = tmp_path / "solvers"
    path.mkdir()
    (path / f"{NAME}.py").write_text(CODE, "utf-8")
    return path


def test_its_file_is_found_by_being_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "__path__", [*solvers.__path__, str(folder)])
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))  # so that it is taken out again
    del sys.modules[MODULE]
    monkeypatch.setattr(solvers, NAME, None, raising=False)
    before = {solver.name for solver in solvers.all_solvers()}
    found = {solver.name for solver in solvers.all_solvers.__wrapped__()}
    assert found == before | {NAME}


def test_its_file_keeps_the_rules_for_solvers(folder: Path) -> None:
    path = folder / f"{NAME}.py"
    names = imported(path)
    assert {name.split(".")[0] for name in names} == SHARED
    assert defaults_in(path, CODE, True) == []


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
def test_it_is_explained_and_run_like_any_other(layout: str) -> None:
    problem = toys.small(batch=8, layouts=(layout, layout, layout))
    with toys.installed(SOLVER):
        options = Options(rigor="estimate", batch_sizes="undivided")
        tried = Planner().explain(problem, options, every_config_of=(NAME,))
        own = {m.config: m for m in tried if m.solver == NAME}
        assert set(own) == {Config(images=n) for n in (8, 2, 1)}
        for config, m in own.items():
            assert m.reason == ""
            assert m.time_ms is not None
            assert m.estimate_ms is not None
            assert m.error is not None
            assert m.error.l2 < 1e-6
            assert m.workspace is not None
            assert m.workspace >= SOLVER.workspace(problem, config)
        a, b = toys.operands(problem)
        out = toys.poison(problem)
        result = execute.bind(toys.leaf(NAME, problem, Config(images=2)), problem, a, b, out)(a, b, None, out)
        assert result is out
        assert toys.distance(out, problem.reference(a, b)) < 1e-6


def test_it_fits_a_limit_by_smaller_blocks() -> None:
    problem = toys.small(batch=8, channels=8, size=16)
    sizes = {c: SOLVER.workspace(problem, c) for c in SOLVER.configs(problem)}
    least, most = min(sizes.values()), max(sizes.values())
    assert 4 * least < most
    hidden = SOLVER.hidden_workspace(problem, Config(images=1))
    with toys.installed(SOLVER):
        options = Options(workspace=least + hidden, rigor="estimate", batch_sizes="undivided")
        tried = {m.config: m.reason for m in Planner().explain(problem, options, every_config_of=(NAME,))
                 if m.solver == NAME}  # fmt: skip
    assert tried[Config(images=1)] == ""
    assert tried[Config(images=8)].startswith("needs ")


def test_depthwise_layers_are_refused_with_the_reason() -> None:
    problem = toys.small(groups=4)
    (reason,) = SOLVER.why_not(problem)
    assert "4 groups" in reason


def test_a_fault_in_it_would_be_found() -> None:
    """The checks see one tap too few."""
    wrong = CODE.replace("steps = buffers(p, images), list(taps(p))", "steps = buffers(p, images), list(taps(p))[1:]")
    assert wrong != CODE
    names: dict[str, object] = {"__name__": MODULE}
    exec(compile(wrong, str(PAGE), "exec"), names)
    kind = names["TapProducts"]
    assert isinstance(kind, type)
    with pytest.raises(AssertionError):
        exercise(kind(), Pass.FPROP, 2, "fp32", "ieee", "cpu")
