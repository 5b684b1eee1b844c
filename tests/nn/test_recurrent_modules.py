"""Recurrent modules in models: planned, reported, copied, restored, scheduled, taken back, left alone where changed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.recurrent_plans import CLASSES, close, flat, forced
from torch import Tensor, nn

import tilewise
from tilewise.nn.layers.kinds import is_planned, kind_of
from tilewise.nn.layers.recurrent.call import describe, given_of
from tilewise.nn.layers.swaps import swap_back
from tilewise.planner import Planner
from tilewise.wisdom import Wisdom

KERNELS = ("resident_rnn", "persistent_grid")


class Net(nn.Module):
    """A layer that is called twice, and one with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 8, 2, batch_first=True)
        self.last = nn.GRU(8, 5, bidirectional=True)
        self.projected = nn.LSTM(10, 6, proj_size=3)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.first(x)
        y, _ = self.first(x.flip(1), hx=state)
        return self.projected(self.last(y)[0])[0]  # type: ignore[no-any-return]


def optimized(model: nn.Module, x: Any, folder: Path, **options: Any) -> nn.Module:
    """By ``stepped``: the others are excluded, torch's own choice too, and nothing is measured."""
    planner = Planner(Wisdom(folder / "wisdom.sqlite3"))
    chosen = {"goal": "passes", "rigor": "estimate", "exclude": ("aten_rnn", *KERNELS), **options}
    return tilewise.optimize(model, x, planner=planner, **chosen)


def stepped(model: nn.Module, x: Tensor) -> list[Any]:
    """A training step: loss and gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_a_model_is_planned_reported_copied_and_restored(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(3, 4, 6)
    want, state = stepped(net, x), net.state_dict()
    optimized(net, x, tmp_path)
    assert is_planned(net.first)
    assert is_planned(net.last)
    assert is_planned(net.projected)
    close(stepped(net, x), want)
    report = tilewise.nn.report(net)
    layers = {layer.name: layer for layer in report.layers}
    assert [each.role for each in layers["first"].passes()] == ["forward"]
    assert {each.problem.task for each in layers["first"].passes()} == {"training"}
    assert layers["first"].calls[0].shape == (4, 3, 6)
    assert {each.problem.projection for each in layers["projected"].passes()} == {3}
    assert "stepped" in str(report)
    assert list(net.state_dict()) == list(state)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        close(stepped(twin, x), want)
        twin.load_state_dict(Net().state_dict())
        plain = tilewise.restore(copy.deepcopy(twin))
        close(stepped(twin, x), stepped(plain, x))
        close(stepped(net, x), want)
    assert is_planned(copy.deepcopy(net).first)
    with torch.no_grad():
        close(net(x), tilewise.restore(copy.deepcopy(net))(x))
    tilewise.restore(net)
    assert "forward" not in vars(net.first)
    assert all(torch.equal(a, b) for a, b in zip(stepped(net, x), want, strict=True))


def test_a_model_for_inference_is_planned(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.randn(3, 4, 6)
    optimized(net, x, tmp_path, training=False)
    layers = {layer.name: layer for layer in tilewise.nn.report(net).layers}
    assert {each.problem.task for each in layers["first"].passes()} == {"inference"}
    with torch.no_grad():
        close(net(x), tilewise.restore(copy.deepcopy(net))(x))


def test_other_calls_are_torchs_where_nothing_is_planned_later(tmp_path: Path) -> None:
    net, x = nn.LSTM(6, 8), torch.randn(4, 3, 6)
    optimized(net, x, tmp_path, unplanned="torch")
    plain = tilewise.restore(copy.deepcopy(net))
    assert is_planned(net)
    for other in (torch.randn(5, 3, 6), torch.randn(4, 6)):
        assert all(torch.equal(a, b) for a, b in zip(flat(net(other)), flat(plain(other)), strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(flat(net(x)), flat(plain(x)), strict=True))


def test_where_torch_wins_a_module_stays_as_it_was(tmp_path: Path) -> None:
    net = nn.LSTM(6, 8)
    before = dict(vars(net))
    optimized(net, torch.randn(4, 3, 6), tmp_path, exclude=("stepped", *KERNELS))
    assert vars(net) == before
    (layer,) = tilewise.nn.report(net).layers
    assert not layer.replaced
    assert not layer.reason


@pytest.mark.parametrize("limit", [{"workspace": "64MiB"}, {"total_workspace": "64MiB"}])
def test_under_a_memory_limit_they_are_torchs(limit: dict[str, str], tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Conv1d(3, 4, 1), nn.LSTM(5, 2)), torch.randn(2, 3, 5)
    optimized(net, x, tmp_path, exclude=(), **limit)
    layers = {layer.name: layer for layer in tilewise.nn.report(net).layers}
    assert layers["1"].reason == "is planned without memory limits alone"
    assert not layers["0"].reason


def test_a_schedule_is_followed(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(3, 4, 6)
    optimized(net, x, tmp_path)
    tilewise.nn.schedule(net).save(tmp_path / "schedule.json")
    tilewise.restore(net)
    want = stepped(net, x)
    planner = Planner(Wisdom(tmp_path / "other.sqlite3"))
    tilewise.optimize(net, x, planner=planner, schedule=tmp_path / "schedule.json", goal="passes")
    assert is_planned(net.first)
    assert not [each.note for layer in tilewise.nn.report(net).layers for each in layer.passes() if each.note]
    close(stepped(net, x), want)


def test_plans_are_taken_back(tmp_path: Path) -> None:
    net, x = nn.LSTM(6, 8), torch.randn(4, 3, 6)
    optimized(net, x, tmp_path)
    layers = net.forward.__func__._tilewise_planned  # type: ignore[attr-defined]
    run = layers.resolve(describe(given_of(net, x, None)))  # type: ignore[arg-type]
    assert run.planned
    layers.plan_table.withhold([(run.problem, False)], "taken back")
    layers.forget()
    assert torch.equal(net(x)[0], tilewise.restore(copy.deepcopy(net))(x)[0])


@pytest.mark.parametrize("kind", CLASSES)
def test_what_was_changed_is_left_alone(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kind(3, 4)
    known = kind_of(module)
    assert known is not None
    assert not known.obstacle(module)
    derived = type("Derived", (kind,), {})(3, 4)
    assert "Derived" in known.obstacle(derived)
    module.forward = lambda x: x
    assert "forward set on the instance" in known.obstacle(module)
    del module.forward
    twin, table = forced(module)
    monkeypatch.setattr(kind, "forward", lambda self, input, hx=None: "changed")
    assert "not torch's own" in known.obstacle(module)
    assert twin(torch.ones(2, 1, 3)) == "changed"
    assert not table.asked
    swap_back(twin)


def test_calls_of_reasons_are_reported(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.rnn(x.double())[0]
            return y

    net = Wide()
    optimized(net, torch.randn(5, 2, 3), tmp_path)
    assert "computes in torch.float64" in tilewise.nn.report(net).layers[0].reason


def test_hooks_see_the_planned_result(tmp_path: Path) -> None:
    net, x, seen = nn.GRU(6, 8), torch.randn(4, 3, 6), []
    optimized(net, x, tmp_path)
    net.register_forward_hook(lambda module, args, result: seen.append(result[0].shape))
    net(x)
    assert seen == [(4, 3, 8)]
