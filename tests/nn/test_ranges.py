"""A profiler of torch sees layer, pass and solver of what runs by plan; without one nothing is added."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.nn.dividing import Dividing
from tests.nn.product_plans import Thin
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tilewise
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Operator, Place, Slot, Step
from tilewise.nn.ranges import in_range, shown, watched
from tilewise.plan import Plan
from tilewise.planner import Options
from tilewise.problems.base import Problem
from tilewise.solvers import get


def ranges(run: Callable[[], object]) -> Counter[str]:
    """The ranges of tilewise's that a profiler sees while something runs."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return Counter(event.name for event in seen.events() if event.name.startswith("tilewise: "))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.ConvTranspose2d(4, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(self.stem(x))
        return y


def images() -> torch.Tensor:
    return torch.randn(3, 2, 8, 8)


def trained(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_convolutions_forward_and_backward() -> None:
    model, x = Net(), images().requires_grad_()
    tilewise.optimize(model, x, planner=Dividing(), goal="passes")
    roles = ("forward", "grad_input", "grad_weight")
    layers = ("stem", "body.0", "body.1")
    expected = {f"tilewise: {layer} {role} micro_batch": 1 for layer in layers for role in roles}
    for _ in range(2):  # the second call is found by its likeness to the first
        assert ranges(lambda: trained(model, x)) == expected
    with torch.no_grad():
        assert ranges(lambda: model(x)) == {f"tilewise: {layer} forward micro_batch": 1 for layer in layers}
    with torch.autocast("cpu", torch.bfloat16):
        assert ranges(lambda: trained(model, x)) == expected
    tilewise.restore(model)
    assert not ranges(lambda: trained(model, x))


def test_what_torch_computes_has_no_range() -> None:
    model, x = Net(), images()
    tilewise.optimize(model, x, planner=Dividing(()), goal="passes")
    assert not ranges(lambda: trained(model, x))


def test_linear_layers() -> None:
    model, x = nn.Sequential(nn.Linear(8, 12)), torch.randn(16, 8).requires_grad_()
    tilewise.optimize(model, x, planner=Thin(), goal="passes")
    found = ranges(lambda: trained(model, x))
    assert {name.rsplit(" ", 1)[0] for name in found} == {
        f"tilewise: 0 {role}" for role in ("forward", "grad_input", "grad_weight")
    }


class Named(PlanTable):
    """A table whose plans are those of one solver, with its first config."""

    def __init__(self, solver: str) -> None:
        super().__init__(Options(), "plan")
        self.solver = solver

    def plan(self, problems: list[Problem], deterministic: bool) -> None:  # type: ignore[override]
        for p in self.missing(problems, deterministic):
            solver = get(self.solver)
            self.learn(p, deterministic, Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p)))))


@pytest.mark.parametrize(
    ("module", "x", "solver"),
    [
        (nn.GRU(4, 5), torch.randn(3, 2, 4), "stepped"),
        (nn.MaxPool2d(2), torch.randn(1, 4, 6, 6), "window_pooling"),
        (nn.LocalResponseNorm(3), torch.randn(1, 4, 6, 6), "channel_window"),
    ],
)
def test_layers_of_one_problem(module: nn.Module, x: torch.Tensor, solver: str) -> None:
    from tilewise.nn.layers.kinds import kind_of, run_by_plans
    from tilewise.nn.layers.weights import Weights

    pytest.importorskip("numba")
    kind = kind_of(module)
    assert kind is not None
    layers = kind.layers(Named(solver), Weights.CHANGING)
    layers.name = "block.0"
    run_by_plans(module, layers)

    def first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    leaf = x.requires_grad_()
    forward, backward = f"tilewise: block.0 forward {solver}", f"tilewise: block.0 backward {solver}"
    assert ranges(lambda: first(module(leaf)).sum().backward()) == {forward: 1, backward: 1}
    with torch.no_grad():
        assert ranges(lambda: module(leaf)) == {forward: 1}


def test_functions_have_no_layer() -> None:
    with tilewise.enabled(planner=Dividing(), wait=True, goal="passes") as session:
        layer, x = nn.Conv2d(2, 4, 3), images()
        for _ in range(3):
            trained(layer, x)
        session.wait()
        assert set(ranges(lambda: trained(layer, x))) == {
            "tilewise: forward micro_batch",
            "tilewise: grad_weight micro_batch",
        }


def test_layers_in_a_compiled_graph_share_plans_and_have_no_name() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)), images()
    tilewise.optimize(model, x, planner=Dividing(), goal="passes", training=False)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        assert ranges(lambda: compiled(x)) == {"tilewise: forward micro_batch": 2}


def test_a_program_of_steps_and_what_computes_each() -> None:
    slots = [Slot((4,), (1,), torch.float32, kind) for kind in ("input", "intermediate", "output")]
    steps = [
        Step("double", (0,), 1, lambda x, out: torch.add(x, x, out=out)),
        Step("relu", (1,), 2, operator=Operator(torch.ops.aten.clamp_min.out, (Place(0), 0), out="out")),
    ]
    program, x = Program(slots, steps, inputs=[0], outputs=[2]), torch.randn(4)
    want = program(x)
    assert ranges(lambda: program(x)) == {"tilewise: double": 1, "tilewise: relu aten.clamp_min.out": 1}
    assert torch.equal(program(x), want)


def test_copies_have_the_names_of_their_model() -> None:
    model, x = Net(), images()
    tilewise.optimize(model, x, planner=Dividing(), goal="passes", training=False)
    with torch.no_grad():
        assert "tilewise: stem forward micro_batch" in ranges(lambda: copy.deepcopy(model)(x))


def test_nothing_is_recorded_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("tilewise.nn.ranges.record_function", recorded)
    assert not watched()
    assert in_range("a", lambda x: x)(5) == 5
    with shown("a"):
        pass
    with profile(activities=[ProfilerActivity.CPU]):
        assert watched()
        with pytest.raises(AssertionError, match="a"):
            in_range("a", lambda x: x)(5)
        assert in_range("", lambda x: x)(5) == 5
