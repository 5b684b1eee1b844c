"""What a time step takes in training, against what whole training steps of other sizes take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilewise
from tilewise.planner.measuring.times import counted_bytes
from tilewise.rnn import step_bytes

DENSE = {"dtype": torch.float32, "device": "cpu"}
LAYERS = {
    "gru": lambda: nn.GRU(12, 20, **DENSE),
    "lstm, two directions": lambda: nn.LSTM(12, 20, bidirectional=True, batch_first=True, **DENSE),
    "rnn, three layers": lambda: nn.RNN(12, 20, num_layers=3, dropout=0.5, **DENSE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_predicts_a_training_step_of_other_sizes(name: str) -> None:
    module = LAYERS[name]()

    def step() -> None:
        x = torch.zeros(*((3, 30) if module.batch_first else (30, 3)), 12, requires_grad=True, **DENSE)
        y = module(x)[0]
        torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))

    step()
    assert step_bytes(module) * 90 == pytest.approx(counted_bytes(step), rel=0.25)


@pytest.mark.parametrize(
    ("cell", "projection"), [("rnn_tanh", 0), ("rnn_relu", 0), ("gru", 0), ("lstm", 0), ("lstm", 4)]
)
def test_a_problem_takes_what_its_module_takes(cell: str, projection: int) -> None:
    options = {"num_layers": 2, "bidirectional": True, **({"proj_size": projection} if projection else {}), **DENSE}
    module = {"gru": nn.GRU, "lstm": nn.LSTM}.get(cell, nn.RNN)(6, 10, **options)
    sizes = {"layers": 2, "directions": 2, "projection": projection}
    problem = tilewise.RecurrentProblem(cell, 7, 5, 6, 10, **sizes, task="training")
    assert step_bytes(problem) == step_bytes(module)


def test_the_module_stays_as_it_was() -> None:
    module = nn.LSTM(6, 10, num_layers=2, dropout=0.5, **DENSE).eval()
    weights = [weight.clone() for weight in module.parameters()]
    module.weight_hh_l0.grad = torch.ones_like(module.weight_hh_l0)
    random = torch.get_rng_state()
    assert step_bytes(module) > 0
    assert not module.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert torch.equal(module.weight_hh_l0.grad, torch.ones_like(module.weight_hh_l0))
    assert module.weight_ih_l0.grad is None


def test_another_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer=GRUCell.*an nn.RNN, nn.GRU or nn.LSTM"):
        step_bytes(nn.GRUCell(2, 3, **DENSE))  # type: ignore[arg-type]
