"""Convolutions with their epilogue by plan, in graphs that Inductor has frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tilewise
import tilewise.nn
from tilewise.nn.layers import frozen
from tilewise.nn.layers.inductor import frozen_pass


class Residuals(nn.Module):
    """Norms, a residual that is a convolution, one that is not, and a function that no epilogue here has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.third, self.beside = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.last = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.second(x) + x)
        return torch.erf(self.last(torch.relu(self.third(y) + self.beside(x))))


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "by_plan"), [(1e9, 4), (0.0, 0)])
def test_a_frozen_graph_computes_the_same_by_plan_and_by_onednn(
    margin: float, by_plan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Residuals().eval()
    x = torch.randn(2, 6, 11, 9, dtype=torch.float32, device="cpu")
    want = copy.deepcopy(module).double()(x.double())
    monkeypatch.setattr(frozen_pass, "MARGIN", margin)  # which is faster is a matter of the machine
    monkeypatch.setattr(frozen, "_kept_of", lambda table: frozenset())
    seen: list[object] = []
    with torch.no_grad():
        planned = tilewise.optimize(
            module, x, training=False, frozen=True, rigor="estimate", exclude=("aten",), goal="passes"
        )
        own = {"freezing": True, frozen_pass.SETTING: seen.append}
        with torch._inductor.config.patch(own):
            program = torch.compile(planned)
            got = program(x)
    assert seen, "the user's own pass runs as well"
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert tilewise.nn.report(planned).facts["fused"] == {"matched": 4, "by_plan": by_plan}


@pytest.mark.slow
def test_where_a_filter_leaves_out_a_convolution_the_pass_leaves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Residuals().eval()
    x = torch.randn(2, 6, 11, 9, dtype=torch.float32, device="cpu")
    monkeypatch.setattr(frozen_pass, "MARGIN", 1e9)  # all of them would run by plan
    monkeypatch.setattr(frozen, "_kept_of", lambda table: frozenset())
    with torch.no_grad():
        want = module(x)
        planned = tilewise.optimize(
            module, x, training=False, frozen=True, rigor="estimate", exclude=("aten",), goal="passes",
            filter_fn=lambda name, _: name != "second",
        )  # fmt: skip
        with torch._inductor.config.patch(freezing=True):
            program = torch.compile(planned)
            got = program(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    fused = tilewise.nn.report(planned).facts["fused"]
    assert (fused["matched"], fused["by_plan"]) == (4, 0)
    assert "filter_fn leaves out 'second'" in fused["reason"]


class Activations(nn.Module):
    """A convolution before each activation that Inductor gives to oneDNN, two that are read twice, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        for layer, activation in zip(
            self.layers,
            (
                f.hardswish, f.silu, f.hardsigmoid, f.relu6, lambda y: f.leaky_relu(y, 0.2),
                lambda y: y.clamp(-0.5, 0.75), lambda y: f.hardswish(y) * y, lambda y: f.relu6(y) + y, f.relu,
            ),
            strict=True,
        ):  # fmt: skip
            x = activation(layer(x)) + 0.5
        return x


@pytest.mark.slow
def test_activations_of_several_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Activations().eval()
    x = torch.randn(2, 4, 9, 7, dtype=torch.float32, device="cpu")
    want = copy.deepcopy(module).double()(x.double())
    monkeypatch.setattr(frozen_pass, "MARGIN", 1e9)  # all of them run by plan
    monkeypatch.setattr(frozen, "_kept_of", lambda table: frozenset())
    found: list[str] = []
    timed = frozen_pass._by_onednn

    def noting(match: Any, *tensors: Any) -> Any:
        found.append(match.problem.activation)
        call = timed(match, *tensors)
        call()  # oneDNN knows what it is asked for
        return call

    monkeypatch.setattr(frozen_pass, "_by_onednn", noting)
    with torch.no_grad():
        planned = tilewise.optimize(
            module, x, training=False, frozen=True, rigor="estimate", exclude=("aten",), goal="passes"
        )
        with torch._inductor.config.patch(freezing=True):
            got = torch.compile(planned)(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    expected = {"hardswish", "silu", "hardsigmoid", "relu6", "leaky_relu:0.2", "clamp:-0.5:0.75", "relu"}
    assert set(found) == expected
    assert tilewise.nn.report(planned).facts["fused"] == {"matched": 7, "by_plan": 7}


def test_a_plan_of_another_process_is_an_error_that_says_so() -> None:
    x = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError, match="plan='nothing' is not known in this process"):
        torch.ops.tilewise.fused_conv(x, x, None, None, "nothing")
