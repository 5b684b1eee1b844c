"""Norms that no layer takes become one pass with what is before and behind them; others stay as they are."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.nn.regions.kept import First, keep
from torch import Tensor, fx, nn
from torch.nn import functional

import tilewise
from tilewise.nn import ExportError
from tilewise.nn.regions import fused
from tilewise.nn.regions.forward import regional_of
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import trace

X = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


class Net(nn.Module):
    """A norm before a convolution with padding, in one of several surroundings."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.norm = nn.BatchNorm2d(6 if what in ("alone", "other axis") else 12)
        self.last = nn.Conv2d(self.norm.num_features, 3, 3, padding=1)
        self.own = nn.Parameter(torch.linspace(-1, 1, 2 * 6 * 5 * 7).view(2, 6, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "alone":
            return self.last(functional.relu(self.norm(x)))
        if self.what == "other axis":
            return self.last(functional.relu(self.norm(torch.cat([x, x + 1], 2))))
        y = torch.cat([x, self.own if self.what == "a parameter" else x.sin()], 1)
        z = self.norm(y)
        if self.what == "no activation":
            return self.last(z)
        result = self.last(functional.leaky_relu(z, 0.2))
        if self.what == "read twice":
            return result + y.mean()
        if self.what == "norm read twice":
            return result + z.mean()
        return result


def made(what: str) -> nn.Module:
    torch.manual_seed(2)
    net = Net(what)
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(net.norm.weight)
    return net.eval()


def joined_in(graph: fx.Graph) -> list[tuple[int, str]]:
    """The number of parts and the activation of each call."""
    return [(len(node.args[0]), node.args[3]) for node in graph.nodes if node.target is fused.joined]


@pytest.mark.parametrize(
    ("what", "joined"),
    [
        ("alone", (1, "relu")), ("concatenated", (2, "leaky_relu:0.2")), ("no activation", (2, "none")),
        ("read twice", (1, "leaky_relu:0.2")), ("norm read twice", (2, "none")), ("other axis", (1, "relu")),
        ("a parameter", (1, "leaky_relu:0.2")),
    ],
)  # fmt: skip
def test_a_norm_takes_its_neighbours(what: str, joined: tuple[int, str]) -> None:
    net = made(what)
    traced = trace(net, (X,), {})
    rewrite(traced.graph)
    assert joined_in(traced.graph) == [joined]
    traced.module.recompile()
    with torch.no_grad():
        found = traced.returned(traced.module(X))
        wanted = copy.deepcopy(net).double()(X.double())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-6


def test_norms_of_other_tensors_stay() -> None:
    volume = nn.Sequential(nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 3, padding=1)).eval()
    double = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1)).eval().double()
    for net, x in ((volume, torch.randn(1, 3, 4, 4, 4)), (double, X.double())):
        traced = trace(net, (x,), {})
        rewrite(traced.graph)
        assert not joined_in(traced.graph)


def test_a_region_follows_statistics_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    net = keep(monkeypatch, made("concatenated"), X, frozen=False)
    with torch.no_grad():
        for change in (0.0, 1.0):
            net.norm.running_mean += change
            wanted = tilewise.restore(copy.deepcopy(net)).double()(X.double())
            assert float((net(X).double() - wanted).norm() / wanted.norm()) < 1e-5
        net.norm.running_var[3] = float("nan")
        assert net(X).isnan().all()
    regional = regional_of(net)
    assert regional is not None
    assert not regional.without


def test_an_exported_norm_with_its_neighbours(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    net, path = made("concatenated"), tmp_path / "model"
    x = X.contiguous(memory_format=torch.channels_last)
    tilewise.export(net, x, path, planner=First())
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["tilewise"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (step,) = [s for program in document["programs"] for s in program["program"]["steps"] if "joined" in s]
    with torch.no_grad():
        wanted = net.double()(x.double())
    found = tilewise.load_exported(path)(x)
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5
    before = copy.deepcopy(step["joined"])
    for change in ({"channels": [6, 5]}, {"channels": []}, {"activation": "relu:1"}, {"images": 0}, {"height": 2**40}):
        step["joined"] = {**before, **change}
        save_file(tensors, path, metadata={"tilewise": json.dumps(document)})
        with pytest.raises(ExportError, match="would do"):
            tilewise.load_exported(path)
