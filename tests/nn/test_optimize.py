"""What optimize sees, plans, reports and leaves as it was; with the real planner too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.convolution import MOST_LAYERS
from tilewise.nn.layers.layer import Layer
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom


class Refusing(Planner):
    """Finds no plan for gradients of weights."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        if problem.pass_ is Pass.WGRAD:
            raise NoPlanError("nothing for weights today")
        return Dividing().plan(problem, options)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.extra = nn.Conv2d(4, 4, 1)
        self.unused = nn.Conv2d(4, 4, 5)

    def forward(self, x: torch.Tensor, *, deep: bool = False) -> torch.Tensor:
        x = self.second(self.drop(self.norm(self.first(x))))
        x = self.second(x[..., 1:-1])
        return self.extra(x) if deep else x


def example(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8)


def roles(model: nn.Module, name: str) -> list[str]:
    layer = next(layer for layer in report(model).layers if layer.name == name)
    return [one.role for one in layer.passes()]


def test_the_run_leaves_no_trace() -> None:
    model = Network()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    x, random = example(), torch.get_rng_state()
    tilewise.optimize(model, x, planner=Dividing())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


class Differentiating(nn.Module):
    """Calls backward in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        return y


def test_no_gradient_is_left() -> None:
    model = Differentiating()
    bias = model.conv.bias
    assert bias is not None
    bias.grad = grad = torch.ones_like(bias)
    tilewise.optimize(model, example(), planner=Dividing())
    assert report(model).layers[0].replaced
    assert model.conv.weight.grad is None
    assert bias.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Network()
    tilewise.optimize(model, example(), planner=Dividing())
    planned = model.first.forward
    with pytest.raises(RuntimeError, match="channels"):
        tilewise.optimize(model, torch.randn(3, 5, 8, 8), planner=Dividing())
    assert model.first.forward == planned
    assert "forward" not in model.extra.__dict__


def test_only_needed_gradients_are_planned() -> None:
    model = Network()
    tilewise.optimize(model, example(), planner=Dividing())
    assert roles(model, "first") == ["forward", "grad_weight"]
    assert roles(model, "second") == ["forward", "grad_input", "grad_weight"] * 2
    model.first.requires_grad_(False)
    model.norm.requires_grad_(False)
    tilewise.optimize(model, example(), planner=Dividing())
    assert roles(model, "first") == ["forward"]
    tilewise.optimize(model, example(), planner=Dividing(), training=False)
    assert roles(model, "second") == ["forward"] * 2


def test_layers_not_called_are_reported() -> None:
    model = Network()
    tilewise.optimize(model, example(), planner=Dividing())
    reasons = {layer.name: layer.reason for layer in report(model).layers}
    assert reasons["unused"] == reasons["extra"] == "not called with tensors that can be planned"
    assert not reasons["first"]
    assert "unused" in str(report(model))


def test_examples_may_be_named_or_several() -> None:
    model = Network()
    examples: list[Any] = [example(), (example(2),), {"x": example(2), "deep": True}]
    planner = Dividing()
    tilewise.optimize(model, examples, planner=planner)
    assert roles(model, "extra") == ["forward", "grad_input", "grad_weight"]
    assert roles(model, "first") == ["forward", "grad_weight"] * 2
    before = len(planner.planned)
    model(example(2), deep=True).sum().backward()
    model(example(3))
    assert len(planner.planned) == before


def test_equal_problems_are_planned_once() -> None:
    planner = Dividing()
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=i % 2 == 0) for i in range(6)))
    tilewise.optimize(model, torch.randn(3, 4, 8, 8), planner=planner)
    assert len(planner.planned) == len(set(planner.planned)) == 4  # forward with and without bias, two gradients
    assert all(layer.replaced for layer in report(model).layers)


def test_unplanned_shapes() -> None:
    for unplanned, more in (("plan", True), ("torch", False)):
        planner, model = Dividing(), nn.Conv2d(3, 4, 3)
        tilewise.optimize(model, example(), planner=planner, unplanned=unplanned)
        before = len(planner.planned)
        x = example(5)
        y = model(x)
        assert (len(planner.planned) > before) is more
        assert ("PlannedConv" in type(y.grad_fn).__name__) is more
        assert_same(y, nn.functional.conv2d(x, model.weight, model.bias))


def test_output_sizes_of_a_transposed_convolution_are_bounded() -> None:
    conv = nn.ConvTranspose2d(1, 1, 2, stride=13)
    x = torch.randn(2, 1, 2, 2)
    tilewise.optimize(conv, x, planner=Dividing(), unplanned="torch")
    sizes = [(15 + i, 15 + j) for i in range(13) for j in range(13)]
    for size in (*sizes, *sizes[:3]):
        assert_same(conv(x, output_size=size), nn.ConvTranspose2d.forward(conv, x, output_size=size))
    gc.collect()
    geometries = {kept.geometry for kept in gc.get_objects() if type(kept) is Layer}
    assert len([g for g in geometries if g.transposed and g.stride == (13, 13)]) <= MOST_LAYERS + 1


def test_training_after_planning_for_inference() -> None:
    model = nn.Conv2d(3, 4, 3)
    tilewise.optimize(model, example(), planner=Dividing(), training=False, unplanned="torch")
    x = example().requires_grad_()
    y = model(x)
    want = nn.functional.conv2d(x, model.weight, model.bias)
    assert_same(y, want)
    for mine, its in zip(*(torch.autograd.grad(t.sum(), (x, model.weight)) for t in (y, want)), strict=True):
        assert_same(mine, its)


def test_models_that_differentiate_inside_forward() -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.conv(x).square().sum(), x, create_graph=True)[0]

    model = Field()
    tilewise.optimize(model, torch.randn(3, 2, 9), planner=Dividing())
    assert roles(model, "conv") == ["forward", "grad_input", "grad_weight"]


def test_without_a_plan_torch_keeps_the_pass_unless_a_limit_forbids_it() -> None:
    model = nn.Conv2d(3, 4, 3)
    tilewise.optimize(model, example(), planner=Refusing())
    passes = {one.role: one for one in report(model).layers[0].passes()}
    assert passes["forward"].replaced
    assert not passes["grad_weight"].replaced
    assert passes["grad_weight"].reason == "nothing for weights today"
    model(example()).sum().backward()
    with pytest.raises(NoPlanError, match="nothing for weights today"):
        tilewise.optimize(nn.Conv2d(3, 4, 3), example(), planner=Refusing(), workspace="1MiB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workspace", "64 MB?"), ("workspace", -1), ("batch_sizes", "halves"), ("rigor", "some"), ("unplanned", "no"),
        ("error_limit", 0.0), ("training", "no"), ("frozen", 1), ("planner", True), ("progress", []), ("filter_fn", 5),
        ("exclude", b"fft"), ("schedule", "a\0b"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name + "=.* would do|must not"):
        tilewise.optimize(Network(), example(), **{name: value})


def test_no_model_no_example_and_no_step() -> None:
    for wrong in (5, None, nn.Conv2d, torch.ones(2)):
        with pytest.raises(ValueError, match=r"model=.*Module would do"):
            tilewise.optimize(wrong, example())  # type: ignore[type-var]
        with pytest.raises(ValueError, match=r"model=.*Module would do"):
            tilewise.restore(wrong)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"example_inputs=\[\]"):
        tilewise.optimize(Network(), [])
    with pytest.raises(ValueError, match=r"memory_step=5: a function of \(model\)"):
        tilewise.optimize(Network(), example(), memory_limit="1GiB", memory_step=5)  # type: ignore[arg-type]


def test_progress_and_planner_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="progress"):
        tilewise.optimize(Network(), example(), planner=Dividing(), progress=lambda *_: None)


def test_options_reach_the_planner() -> None:
    planner = Dividing()
    tilewise.optimize(
        nn.Conv2d(3, 4, 3), example(), planner=planner, workspace="2MiB", batch_sizes="all", rigor="patient",
        deterministic=True, error_limit=1e-3, strict=True,
    )  # fmt: skip
    assert set(planner.asked) == {Options(2**21, "all", "patient", True, 1e-3, True)}


def test_the_real_planner(tmp_path: Path) -> None:
    """Planned for real on this machine, whatever wins; then again from wisdom alone."""
    torch.manual_seed(0)
    want, got = (nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 7, groups=8)) for _ in range(2))
    got.load_state_dict(want.state_dict())
    x = torch.randn(4, 3, 24, 24)
    texts: list[str] = []
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"), progress=lambda done, total, text: texts.append(text))
    tilewise.optimize(got, x, planner=planner, goal="passes")
    assert texts
    made = report(got)
    for _, _, one in made.passes():
        assert one.plan is not None
        assert one.planned_ms is not None
        assert one.torch_ms is not None
        assert one.replaced is (one.plan.solver != "aten")
    results = []
    for model in (got, want):
        y = model(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)
    again = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    other = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 7, groups=8))
    tilewise.optimize(other, x, planner=again, rigor="wisdom_only")
    assert [one.plan for *_, one in report(other).passes()] == [one.plan for *_, one in made.passes()]


def test_without_wisdom_wisdom_only_leaves_torch(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3)
    planner = Planner(Wisdom(tmp_path / "empty.sqlite3"))
    tilewise.optimize(model, example(), planner=planner, rigor="wisdom_only", workspace="1MiB")
    assert "forward" not in model.__dict__
    assert all("no wisdom" in one.reason for *_, one in report(model).passes())
