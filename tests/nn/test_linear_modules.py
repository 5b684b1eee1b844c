"""``nn.Linear`` in models: planned, left alone where it is changed, copied, restored, reported."""

from __future__ import annotations

import copy
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tilewise
from tilewise.nn.layers.kinds import is_planned, kind_of
from tilewise.nn.layers.linear.module import Linears
from tilewise.planner import Planner
from tilewise.wisdom import Wisdom

OTHERS = ("aten_gemm", "onednn_gemm", "turned_gemm", "padded_gemm", "split_k_gemm", "row_blocks", "row_shares")
"""Solvers that are left out, so that what is planned does not depend on times."""


class Net(nn.Module):
    """Two linear layers, one of which is called twice with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 33)
        self.last = nn.Linear(33, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden) + self.last(hidden[:1])


def optimized(model: nn.Module, x: Any, folder: Path, **options: Any) -> nn.Module:
    planner = Planner(Wisdom(folder / "wisdom.sqlite3"))
    chosen = {"goal": "passes", "rigor": "estimate", "exclude": OTHERS, **options}
    return tilewise.optimize(model, x, planner=planner, **chosen)


def stepped(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24)])
def test_linear_layers_are_planned(shape: tuple[int, ...], tmp_path: Path) -> None:
    net, x = Net(), torch.randn(shape)
    want, names = stepped(net, x), set(net.state_dict())
    optimized(net, x, tmp_path)
    assert is_planned(net.first)
    assert is_planned(net.last)
    torch.testing.assert_close(stepped(net, x), want, rtol=1e-4, atol=1e-4)
    report = tilewise.nn.report(net)
    assert {layer.name: layer.kind for layer in report.layers} == {"first": "Linear", "last": "Linear"}
    example, met = report.layers[0].calls  # the step's input needs a gradient, which the example's did not
    assert [each.role for each in example.passes] == ["forward", "grad_weight"]
    assert [each.role for each in met.passes] == ["grad_input"]
    assert "thin_gemm" in str(report)
    assert set(net.state_dict()) == names
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(stepped(twin, x), want, rtol=1e-4, atol=1e-4)
    assert is_planned(copy.deepcopy(net).first)
    tilewise.restore(net)
    assert "forward" not in vars(net.first)
    torch.testing.assert_close(stepped(net, x), want)


@pytest.mark.parametrize("limit", [{"workspace": "64MiB"}, {"total_workspace": "64MiB"}])
def test_under_a_memory_limit_they_are_torchs(limit: dict[str, str], tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 2)), torch.randn(2, 3, 5)
    optimized(net, x, tmp_path, exclude=(), **limit)
    layers = {layer.name: layer for layer in tilewise.nn.report(net).layers}
    assert layers["2"].reason == "is planned without memory limits alone"
    assert not layers["0"].reason


def test_a_schedule_is_followed(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(7, 24)
    optimized(net, x, tmp_path)
    tilewise.nn.schedule(net).save(tmp_path / "schedule.json")
    tilewise.restore(net)
    planner = Planner(Wisdom(tmp_path / "other.sqlite3"))
    tilewise.optimize(net, x, planner=planner, schedule=tmp_path / "schedule.json", goal="passes")
    assert is_planned(net.first)
    assert not [each.note for layer in tilewise.nn.report(net).layers for each in layer.passes() if each.note]


def test_a_schedule_of_other_kinds_leaves_them_to_torch(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 2)), torch.randn(2, 3, 5)
    optimized(net, x, tmp_path, exclude=(), workspace="64MiB")
    tilewise.nn.schedule(net).save(tmp_path / "schedule.json")
    tilewise.restore(net)
    planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
    tilewise.optimize(net, x, planner=planner, schedule=tmp_path / "schedule.json", goal="passes")
    assert tilewise.nn.report(net).layers[1].reason


@pytest.mark.slow
def test_sizes_that_were_not_seen_are_torchs(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(7, 24)
    optimized(net, x, tmp_path)
    for other in (torch.randn(3, 24), torch.randn(24), torch.randn(2, 2, 24)):
        got = net(other) if other.dim() > 1 else net.first(other)
        plain = tilewise.restore(copy.deepcopy(net))
        torch.testing.assert_close(got, plain(other) if other.dim() > 1 else plain.first(other))


def replaced(module: nn.Linear) -> None:
    module.forward = types.MethodType(lambda self, x: x, module)


def derived(module: nn.Linear) -> None:
    module.__class__ = type("Derived", (nn.Linear,), {})


@pytest.mark.parametrize(
    ("change", "says"), [(replaced, "has a forward set on the instance"), (derived, "is a Derived")]
)
def test_modules_that_are_changed_are_left_alone(change: Any, says: str, tmp_path: Path) -> None:
    net = Net()
    change(net.first)
    kind = kind_of(net.first)
    assert isinstance(kind, Linears)
    assert says in kind.obstacle(net.first)


def test_the_projection_of_attention_is_left_alone(tmp_path: Path) -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    optimized(attention, (x, x, x), tmp_path)
    (layer,) = tilewise.nn.report(attention).layers
    assert layer.name == "out_proj"
    assert not layer.replaced
    assert "NonDynamicallyQuantizableLinear" in layer.reason


def test_a_changed_class_or_function_is_seen_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net(), torch.randn(7, 24)
    optimized(net, x, tmp_path)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: torch.zeros(1))
    assert torch.equal(net.first(x), torch.zeros(1))


def test_parametrized_and_pruned_modules_use_their_weight(tmp_path: Path) -> None:
    x = torch.randn(7, 24)
    net = Net()
    prune.l1_unstructured(net.first, "weight", 0.5)
    want = stepped(net, x)
    optimized(net, x, tmp_path)
    torch.testing.assert_close(stepped(net, x), want, rtol=1e-4, atol=1e-4)
    net = Net()
    nn.utils.parametrizations.orthogonal(net.last)
    want = stepped(net, x)
    optimized(net, x, tmp_path)
    assert not is_planned(net.last)
    torch.testing.assert_close(stepped(net, x), want, rtol=1e-4, atol=1e-4)


def test_under_autocast_a_layer_is_planned_for_that_type(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(7, 24)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(x)
        optimized(net, x, tmp_path, exclude=("aten_gemm",))
        assert {one.problem.dtype for one in tilewise.nn.report(net).layers[0].passes()} == {"bf16"}
        assert is_planned(net.first)
        torch.testing.assert_close(net(x), want, rtol=2e-2, atol=2e-2)


def test_hooks_see_the_planned_result(tmp_path: Path) -> None:
    net, x, seen = Net(), torch.randn(7, 24), []
    optimized(net, x, tmp_path)
    net.first.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    net(x)
    assert seen == [(7, 33)]
