"""Replays compute what the model computes, and capturing leaves no trace. The recorder is one on a CPU."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.nn.graphs.models import assert_alike, assert_same_steps, bits, images, network, step, twins
from tests.nn.graphs.tape import TapeRecorder
from torch import nn

from tilewise.nn import graph_report
from tilewise.nn.graphs.graphed import captured


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A captured model and its twin that is not."""
    model, twin = twins(network(**options))
    captured(model, [images()], TapeRecorder)
    return model, twin


def replayed(model: nn.Module) -> int:
    return graph_report(model).replayed


def without(model: nn.Module) -> str:
    """Why the last call ran without a graph."""
    return graph_report(model).reason


def test_steps_and_their_sum_of_gradients_are_the_models() -> None:
    model, twin = pair()
    assert_same_steps(model, twin, [images() for _ in range(3)])  # gradients add up over the three
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
    assert_same_steps(model, twin, [images()])
    for each in (model, twin):
        each.zero_grad(set_to_none=False)
    assert_same_steps(model, twin, [images()])
    assert replayed(model) == 5


def test_an_optimizer_trains_it_alike() -> None:
    model, twin = pair()
    inputs = [images() for _ in range(4)]
    for each in (model, twin):
        optimizer = torch.optim.Adam(each.parameters(), 1e-2)
        for x in inputs:
            step(each, x)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)  # writes into gradients
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(bits(model), bits(twin), 1e-4)
    assert replayed(model) == 4


def test_dropout_draws_new_numbers_from_the_programs_generator() -> None:
    model, twin = pair(dropout=0.5)
    assert_same_steps(model, twin, [images() for _ in range(3)])
    x = images()
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
    assert without(model) == ""


def test_gradients_of_arguments() -> None:
    model, twin = twins(network())
    captured(model, [images().requires_grad_()], TapeRecorder)
    value = images()
    results = []
    for each in (model, twin):
        x = value.clone().requires_grad_()
        results.append([*step(each, x), x.grad])
    assert_alike(*results)
    assert replayed(model) == 1


def test_what_a_call_returned_stays() -> None:
    model, twin = pair()
    x, z = images(), images()
    y = model(x).detach()
    grads = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    before = [y.clone(), *[g.clone() for g in grads]]
    step(model, z)
    step(model, z)
    assert_alike([y, *grads], before, 0.0)
    assert_alike([y], [twin(x).detach()])


def test_gradients_that_the_program_holds_are_not_shared() -> None:
    model, _ = pair()
    step(model, images())
    storages = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert len({*storages}) == len(storages) == len([*model.parameters()])


def test_gradients_that_nobody_holds_are_not_copied() -> None:
    model, _ = pair()
    places = []
    for _ in range(3):
        model.zero_grad()
        step(model, images())
        places.append(model[6].weight.grad.data_ptr())
    assert places[0] == places[1] == places[2]


def test_capturing_leaves_everything_as_it_was() -> None:
    model = network(dropout=0.5)
    step(model, images())
    model[4].eval()
    gradients = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in gradients if g is not None]
    before = bits(model)
    x = images()
    value = x.clone()
    states = (random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state())
    recorder = TapeRecorder()
    captured(model, [x], lambda: recorder)
    assert recorder.log.count("record") == 2
    assert states[:2] == (random.getstate(), repr(np.random.get_state(legacy=False)))
    assert torch.equal(states[2], torch.get_rng_state())
    assert torch.equal(x, value)
    assert x.grad is None
    assert [*map(torch.equal, bits(model), before)] == [True] * len(before)
    assert [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)] == [True] * len(gradients)
    assert [*map(torch.equal, (g for g in gradients if g is not None), copies)] == [True] * len(copies)
    assert [m.training for m in model] == [True, True, True, True, False, True, True]


class Structured(nn.Module):
    """Takes and returns more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float32, device="cpu")

    def forward(self, given: dict[str, Any], *, twice: bool = False, none: None = None) -> dict[str, Any]:
        y = self.linear(given["x"]) * (2 if twice else 1)
        return {"y": y, "many": (y.argmax(1), None, "text", given["x"]), "weight": self.linear.weight}


def test_structures_and_constants() -> None:
    model, twin = twins(Structured())
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    captured(model, [{"given": {"x": x}, "twice": True}], TapeRecorder)
    got, want = model(given={"x": x}, twice=True), twin({"x": x}, twice=True)
    assert replayed(model) == 1
    assert got.keys() == want.keys()
    assert_alike([got["y"], got["many"][0], got["many"][3]], [want["y"], want["many"][0], x])
    assert got["many"][1:3] == (None, "text")
    assert [t.requires_grad for t in (got["y"], got["many"][0], got["many"][3], got["weight"])] == [
        True,
        False,
        False,
        True,
    ]
    (got["y"].sum() + got["weight"].sum()).backward()
    (want["y"].sum() + want["weight"].sum()).backward()
    assert_alike([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])  # type: ignore[misc]
    assert_alike([model({"x": x})["y"]], [twin({"x": x})["y"]])
    assert "unlike any example" in without(model)
    for value, why in ((object(), "a object"), (torch.float32, "unlike")):
        with pytest.raises(TypeError, match="twic"):
            model({"x": x}, twic=value)
        assert why in without(model)


def test_recurrent_layers_keep_their_gradients() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, dtype=torch.float32, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.lstm(x)[0]
            return y

    model, twin = twins(Recurrent())
    x = torch.randn(5, 2, 3, dtype=torch.float32, device="cpu")
    with torch.backends.mkldnn.flags(enabled=False):  # its layers keep what they need out of a tape's sight
        captured(model, [x], TapeRecorder)
        assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
        assert_same_steps(model, twin, [x, x + 1])
    assert replayed(model) == 2
    assert all(p.grad is not None for p in model.parameters())


def test_tied_and_unused_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
            self.second = copy.deepcopy(self.first)
            self.second.weight = self.first.weight
            self.unused = nn.Linear(3, 3, dtype=torch.float32, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.second(self.first(x).relu())
            return y

    model, twin = twins(Tied())
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    captured(model, [x], TapeRecorder)
    assert_same_steps(model, twin, [x, x + 1])
    assert model.unused.weight.grad is None
    assert model.second.weight is model.first.weight
    assert replayed(model) == 2


def test_versions_of_buffers_count_replays() -> None:
    model, _ = pair()
    count = model[1].num_batches_tracked
    before = count._version
    step(model, images())
    assert count._version > before
