"""Models run by schedules: taken after a check, planned anew where they must be, and said so."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import toys
from tests.forked import run_script
from tests.nn.dividing import Dividing
from tests.planner.simulated import PROFILE
from torch import nn

import tilewise
from tilewise import Options, Schedule, solvers
from tilewise.machine.device import device_name, environment
from tilewise.machine.threads import with_threads
from tilewise.nn import report
from tilewise.plan import Config, Plan
from tilewise.planner import Planner
from tilewise.planner.gate import is_offered
from tilewise.planner.schedules.follow import follow
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom


class Never(Dividing):
    """Is not asked for a plan."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        raise AssertionError(f"asked for {problem.key}")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3), nn.Conv2d(3, 3, 3, padding=1))


ATEN = solvers.baseline(ConvProblem)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
PASSES, KERNELS = 8, 7
"""Both first layers have the same weight gradient."""


@pytest.fixture
def made() -> Schedule:
    return tilewise.schedule(tilewise.optimize(network(), X, planner=Dividing()))


def changed(made: Schedule, change: Callable[[Plan], Plan | None], **fields: Any) -> Schedule:
    """With every plan changed."""
    layers = []
    for result in made.layers:
        passes = (replace(p, plan=None if p.plan is None else change(p.plan)) for p in result.passes)
        layers.append(replace(result, passes=tuple(passes)))
    return replace(made, layers=tuple(layers), **fields)


def choices(made: Schedule) -> dict[ConvProblem, Config]:
    return {problem: found.plan.config for problem, found in made.kernels.items() if found.plan is not None}


def solvers_of(model: nn.Module) -> set[str]:
    return {one.plan.solver for _, _, one in report(model).passes() if one.plan is not None}


def notes_of(model: nn.Module) -> list[str]:
    return [one.note for _, _, one in report(model).passes() if one.note]


def test_what_optimize_found(made: Schedule) -> None:
    assert (made.target, made.device, made.batch, made.dtype) == ("Sequential", "cpu", 4, "fp32")
    assert [result.layer.names for result in made.layers] == [("0",), ("1",), ("2",)]
    assert [result.layer.transposed for result in made.layers] == [False, True, False]
    assert len(made.kernels) == KERNELS
    assert made.summary.divided == PASSES
    assert Schedule.from_json(made.to_json()) == made


def test_equal_layers_and_those_left_to_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x[:2].requires_grad_())) + self.a(x[:1].requires_grad_())

    model = tilewise.optimize(Net(), X.clone(), planner=Dividing())
    found = tilewise.schedule(model)
    assert [result.layer.names for result in found.layers] == [("a", "b"), ("a (call 2)",), ("unused",)]
    assert found.layers[-1].layer.left == "not called with tensors that can be planned"
    assert Schedule.from_json(found.to_json()) == found
    tilewise.restore(model)
    with pytest.raises(ValueError, match="has not been called on it"):
        tilewise.schedule(model)


def test_a_schedule_is_taken_as_it_is(made: Schedule, tmp_path: Path) -> None:
    made.save(tmp_path / "s.json")
    budget = {
        "policy": "arena", "total": 10**9, "used": 0, "least": 0, "segments": [],
        "program": {"variables": 1, "rows": 1, "solve_ms": 1.0, "optimal": True, "method": "exact"},
    }  # fmt: skip
    # Under a budget a plan's workspace is its limit. These plans were not measured: they say that they take none.
    divided = changed(made, lambda plan: replace(plan, workspace=1 << 20), budget=budget)
    for each in (made, str(tmp_path / "s.json"), tmp_path / "s.json", divided):
        model = network()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tilewise.optimize(model, X, schedule=each, planner=Never())
        assert notes_of(model) == []
        assert solvers_of(model) == {"micro_batch"}
        again = tilewise.schedule(model)
        assert again.budget == (budget if each is not made and isinstance(each, Schedule) else None)
        assert [p.plan.config for p in again.kernels.values() if p.plan] == [
            p.plan.config for p in made.kernels.values() if p.plan
        ]
        assert all(p.plan is not None and p.plan.error is not None for p in again.kernels.values())  # checked here
        torch.testing.assert_close(model(X), network()(X), rtol=1e-4, atol=1e-4)


def test_a_budgets_workspace_is_known_as_well_as_it_was_measured() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), torch.randn(4, 3, 64, 64)
    made = tilewise.schedule(tilewise.optimize(model, x, total_workspace="1GiB"))
    less = changed(made, lambda plan: replace(plan, workspace=max(0, plan.workspace - (16 << 10))))
    again = tilewise.optimize(copy.deepcopy(tilewise.restore(model)), x, schedule=less)
    assert notes_of(again) == []
    tight = changed(made, lambda plan: Plan(plan.problem, ATEN.name, ATEN.version))
    found = follow(tight, next(iter(tight.kernels)), tight.options, Planner())
    assert found.plan is None
    assert "the limit is 128.0 KiB" in found.note


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda plan: replace(plan, version=99), "by micro_batch version 99, here is version 1"),
        (lambda plan: replace(plan, solver="quantum"), "needs the solver 'quantum', which there is not here"),
        (lambda plan: replace(plan, solver=ATEN.name, version=ATEN.version), "has parts below aten, which has none"),
        (lambda plan: replace(plan, config=Config(sizes=(1, 4))), "which is not the whole"),
        (lambda plan: replace(plan, config=Config(sizes=(4, 0))), "which is not the whole"),
        (lambda plan: replace(plan, counts=(10**12, 1)), "micro_batch does not offer"),
        (lambda plan: replace(plan, children=(plan, plan)), "has a part for"),
        (lambda plan: replace(plan, solver="fft", config=Config(basis="../x"), children=(), counts=()), "fft"),
        (lambda plan: None, "the schedule has no plan for it"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_run_here_is_made_anew(
    made: Schedule, change: Callable[[Plan], Plan | None], why: str
) -> None:
    planner, model = Dividing(), network()
    with pytest.warns(UserWarning, match=f"{KERNELS} of {KERNELS} kernels were not taken") as warned:
        tilewise.optimize(model, X, schedule=changed(made, change), planner=planner)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert why in str(warned[0].message)
    assert len(planner.planned) == KERNELS
    assert len(notes_of(model)) == PASSES
    assert all(why in note for note in notes_of(model))
    assert why in str(report(model))


def test_parts_of_another_solver_version_are_seen(made: Schedule) -> None:
    def older(plan: Plan) -> Plan:
        first, *others = plan.children
        return replace(plan, children=(replace(first, version=0), *others))

    with pytest.warns(UserWarning, match="aten version 0"):
        tilewise.optimize(network(), X, schedule=changed(made, older), planner=Dividing())


def test_another_environment_is_planned_anew_under_the_same_options(made: Schedule) -> None:
    elsewhere = replace(made, environment=made.environment.replace("torch=", "torch=0."), options=Options(2**30, "all"))
    planner = Dividing()
    with pytest.warns(UserWarning, match=r"another environment: torch=0\.\S+ there, torch=\S+ here"):
        tilewise.optimize(network(), X, schedule=elsewhere, planner=planner)
    assert set(planner.asked) == {Options(2**30, "all")}


def test_another_gpu_is_planned_anew(made: Schedule) -> None:
    data = made.to_json()
    gpu = "cuda:NVIDIA H100 80GB HBM3"
    for layer in data["layers"]:
        for one in layer["passes"]:
            key = one["problem"]["key"].removesuffix("cpu") + gpu
            one["problem"]["key"] = one["plan"]["problem"] = key
    data["device"], data["environment"] = gpu, f"device={gpu} hardware=sm90x132 torch=2.11.0"
    planner = Dividing()
    with pytest.warns(UserWarning, match="device=cuda:NVIDIA H100 80GB HBM3"):
        tilewise.optimize(network(), X, schedule=Schedule.from_json(data), planner=planner)
    assert len(planner.planned) == KERNELS


def leaf(solver: str) -> Callable[[Plan], Plan]:
    return lambda plan: Plan(plan.problem, solver, 1)


def test_what_computes_something_wrong_is_refused(made: Schedule) -> None:
    wrong = toys.toy(name="wrong", compute=lambda self, p, a, b: p.reference(a, b) * 1.001)
    raising = toys.toy(name="raising", bind=lambda self, p, c, a, b, out: 1 / 0)
    with toys.installed(wrong, raising):
        for name, why in (
            ("wrong", r"refused: wrong error 1\.\de-03 over the limit"),
            ("raising", "ZeroDivisionError"),
        ):
            planner = Dividing()
            with pytest.warns(UserWarning, match=why):
                model = tilewise.optimize(network(), X, schedule=changed(made, leaf(name)), planner=planner)
            assert len(planner.planned) == KERNELS
            assert solvers_of(model) == {"micro_batch"}


def test_a_limit_is_a_limit(made: Schedule) -> None:
    hungry = toys.toy(name="hungry", scratch=2**20)
    with toys.installed(hungry):
        plain = changed(made, lambda plan: replace(leaf("hungry")(plan), workspace=0), options=Options(2**16))
        with pytest.warns(UserWarning, match=r"hungry needs 1\.0 MiB of workspace, temporaries included"):
            tilewise.optimize(network(), X, schedule=plain, planner=Dividing())
        enough = replace(plain, options=Options(2**21))
        assert solvers_of(tilewise.optimize(network(), X, schedule=enough, planner=Never())) == {"hungry"}
        # Under a budget a kernel has what its plan was given, when it is planned anew too.
        step = {"limit": 2**30, "peak": 2**20, "least": 0, "moments": []}
        planner = Dividing()
        with pytest.warns(UserWarning, match=r"the limit is 128\.0 KiB"):
            tilewise.optimize(network(), X, schedule=replace(enough, step_memory=step), planner=planner)
        assert {options.workspace for options in planner.asked} == {0}


def test_only_deterministic_plans_where_they_are_asked_for(made: Schedule) -> None:
    with toys.installed(toys.toy(name="loose", deterministic=False)):
        loose = changed(made, leaf("loose"))
        assert solvers_of(tilewise.optimize(network(), X, schedule=loose, planner=Never())) == {"loose"}
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.warns(UserWarning, match="loose is not deterministic"):
                tilewise.optimize(network(), X, schedule=loose, planner=Dividing())
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_refused_plan_is_not_taken_from_wisdom_either() -> None:
    factor = [1.0]
    turning = toys.toy(name="turning", compute=lambda self, p, a, b: p.reference(a, b) * factor[0])
    problem, planner = toys.small(batch=2), tilewise.Planner()
    others = [solver.name for solver in solvers.all_solvers() if not solver.baseline]
    with toys.installed(turning, without=others), toys.one_thread():
        planner.wisdom.remember_profile(environment("cpu").key, PROFILE)
        plan = Plan(problem.key, "turning", 1, time_ms=1.0)
        key, options = environment("cpu").key, Options(rigor="estimate", batch_sizes="undivided")
        text = "workspace=None batch_sizes=undivided deterministic=False error_limit=None strict=False"
        planner.wisdom.remember(key, problem.key, f"rigor=estimate {text}", plan)
        assert planner.plan(problem, options).solver == "turning"
        factor[0] = 1.001
        assert "over the limit" in planner.confirm(problem, plan, options)[1]
        assert planner.plan(problem, options).solver != "turning"


def test_what_the_schedule_lacks(made: Schedule) -> None:
    model = nn.Sequential(*network(), nn.Conv2d(3, 5, 1))
    planner = Dividing()
    with pytest.warns(UserWarning, match=rf"3 of {KERNELS + 3} kernels .* planned anew \(3: not in the schedule\)"):
        tilewise.optimize(model, X, schedule=made, planner=planner)
    assert len(planner.planned) == 3
    with pytest.warns(UserWarning, match=r"left to torch \(3: not in the schedule\)"):
        tilewise.optimize(model, X, schedule=made, planner=Never(), unplanned="torch")
    assert notes_of(model) == ["not in the schedule"] * 3


def test_bad_input(made: Schedule, tmp_path: Path) -> None:
    for other in (nn.Sequential(nn.Conv2d(3, 8, 5)), network().double().float()):
        x = X if other[0].out_channels == 8 else X[:3]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"schedule of Sequential .* fits no layer of Sequential .*mb4"):
            tilewise.optimize(other, x, schedule=made, planner=Never())
    with pytest.raises(ValueError, match=r"workspace=1024: the schedule of Sequential was planned with workspace=None"):
        tilewise.optimize(network(), X, schedule=made, workspace=1024)
    with pytest.raises(TypeError, match="schedule=3"):
        tilewise.optimize(network(), X, schedule=3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        tilewise.optimize(network(), X, schedule=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(tilewise.ScheduleError, match=r"bad\.json: not JSON"):
        tilewise.optimize(network(), X, schedule=tmp_path / "bad.json")


@given(toys.problems(dtypes=("fp32", "bf16")), st.sampled_from((None, 300, 3_000, 30_000)))
@hypothesis.settings(max_examples=60)
def test_what_is_offered_here_is_known_again(problem: ConvProblem, ceiling: int | None) -> None:
    """What a search may find, also under a limit, is never taken for what somebody else wrote."""
    for solver in solvers.all_solvers():
        if not solver.why_not(problem):
            for config, _ in solver.offers(problem, ceiling):
                assert is_offered(solver, problem, config), (solver.name, config)


@pytest.mark.parametrize("name", ["winograd", "fused_lowering", "depthwise_fft"])
def test_what_is_offered_to_fewer_threads_is_known_again(name: str) -> None:
    problem = toys.small(batch=2, channels=8, groups=8 if name == "depthwise_fft" else 1)
    solver, found = solvers.get(name), list[Config]()
    with_threads(lambda: found.extend(config for config, _ in solver.offers(problem, None)), 3)
    assert found
    assert all(is_offered(solver, problem, config, 3) for config in found)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
def test_what_is_offered_on_a_gpu_is_known_again(pass_: Pass) -> None:
    device = device_name("cuda")
    for problem in (
        toys.small(pass_, device=device),
        toys.small(pass_, channels=16, groups=16, size=16, device=device),
    ):
        for solver in solvers.all_solvers():
            for ceiling in (None, 2**12, 2**16, 2**20):
                offered = [] if solver.why_not(problem) else list(solver.offers(problem, ceiling))
                assert all(is_offered(solver, problem, config) for config, _ in offered), solver.name


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [None, "64KiB"])
def test_a_schedule_on_a_gpu(workspace: str | None, tmp_path: Path) -> None:
    x = torch.randn(16, 3, 32, 32, device="cuda")
    wide = nn.Sequential(nn.Conv2d(3, 32, 5), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 3)).cuda()
    model = tilewise.optimize(copy.deepcopy(wide), x, workspace=workspace)
    tilewise.schedule(model).save(tmp_path / "s.json")
    fresh = Never()
    fresh.wisdom = tilewise.Wisdom(tmp_path / "other.sqlite3")
    again = tilewise.optimize(copy.deepcopy(wide), x, schedule=tmp_path / "s.json", planner=fresh)
    assert notes_of(again) == []
    assert choices(tilewise.schedule(again)) == choices(Schedule.load(tmp_path / "s.json"))
    with torch.no_grad():
        exact = copy.deepcopy(wide).double()(x.double())
        assert (again(x).double() - exact).norm() <= 1e-3 * exact.norm()  # torch's flag allows TF32


SCRIPT = """
import sys
import torch
import tilewise
from tests.nn.test_scheduled import Dividing, Never, X, network
from tilewise.nn import report
torch.set_num_threads(1)
if sys.argv[1] == "save":
    tilewise.schedule(tilewise.optimize(network(), X, planner=Dividing())).save(sys.argv[2])
else:
    model = tilewise.optimize(network(), X, schedule=sys.argv[2], planner=Never())
    exact = network().double()
    got, want = model(X), exact(X.double())
    got.square().sum().backward(), want.square().sum().backward()
    pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(model.parameters(), exact.parameters()))]
    for a, b in pairs:
        assert (a.double() - b).norm() <= 1e-5 * b.norm(), (a.double() - b).norm() / b.norm()
    assert not any(one.note for _, _, one in report(model).passes())
    assert any(one.replaced for _, _, one in report(model).passes())
"""


def test_two_processes(tmp_path: Path, kernels: Path) -> None:
    from tests.conftest import share_kernels

    root = Path(__file__).parents[2]
    for step in ("save", "run"):
        cache = tmp_path / step
        share_kernels(cache, kernels)
        variables = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "TILEWISE_CACHE_DIR": str(cache)}
        variables["OMP_NUM_THREADS"] = "1"
        done = run_script("-c", SCRIPT, step, str(tmp_path / "s.json"), environment=variables)
        assert done.returncode == 0, done.stderr


def test_what_wisdom_holds_as_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Following a schedule on the machine that made it costs no more than wisdom does."""
    asked = {"rigor": "estimate", "exclude": ("aten",)}
    planner, other = (Planner(wisdom=Wisdom(tmp_path / name)) for name in ("here.sqlite3", "there.sqlite3"))
    made_here = tilewise.schedule(tilewise.optimize(network(), X, planner=planner, **asked))
    confirmed: list[Planner] = []

    def confirming(self: Planner, *args: Any, **kwargs: Any) -> Any:
        confirmed.append(self)
        return confirm(self, *args, **kwargs)

    confirm = Planner.confirm
    monkeypatch.setattr(Planner, "confirm", confirming)
    tilewise.optimize(network(), X, planner=planner, schedule=made_here, **asked)
    assert not confirmed
    tilewise.optimize(network(), X, planner=other, schedule=made_here, **asked)
    assert confirmed.count(other) == KERNELS, "a planner that knows nothing checks what it is given"
