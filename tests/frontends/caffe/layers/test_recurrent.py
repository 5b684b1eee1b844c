"""RNN and LSTM against loops over steps and sequences, where sequences begin anew in the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.frontends.caffe.layers.nets import layer, numbers, tops

from tilewise.frontends.caffe import CaffeError
from tilewise.frontends.caffe.layers import Layer

TIME, BATCH, INPUTS, OUTPUTS, STATIC = 4, 3, 5, 2, 3
PARAMETERS = f"recurrent_param {{ num_output: {OUTPUTS} }}"
EXPOSED = f"recurrent_param {{ num_output: {OUTPUTS} expose_hidden: true }}"
CONT = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]]).double()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(blobs: list[np.ndarray], x: np.ndarray, static: np.ndarray, h: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """All outputs, and the last h and c, sequence by sequence and gate by gate."""
    w_x, b, w_s, w_h = blobs
    found = np.zeros((TIME, BATCH, OUTPUTS))
    last = [np.zeros((1, BATCH, OUTPUTS)), np.zeros((1, BATCH, OUTPUTS))]
    for n in range(BATCH):
        hidden, cell = h[0, n], c[0, n]
        for t in range(TIME):
            goes_on = float(CONT[t, n])
            gates = w_x @ x[t, n] + b + w_s @ static[n] + w_h @ (hidden * goes_on)
            i, f, o, g = (gates[k * OUTPUTS : (k + 1) * OUTPUTS] for k in range(4))
            cell = sigmoid(f) * (cell * goes_on) + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(cell)
            found[t, n] = hidden
        last[0][0, n], last[1][0, n] = hidden, cell
    return [found, *last]


def blobs_of(made: Layer) -> list[np.ndarray]:
    return [blob.detach().numpy() for blob in made.blobs]


def test_lstm_is_that_of_its_equations() -> None:
    state = (1, BATCH, OUTPUTS)
    shapes = ((TIME, BATCH, INPUTS), (TIME, BATCH), (BATCH, STATIC), state, state)
    made = layer("LSTM", EXPOSED, *shapes, tops=3)
    x, static, h, c = numbers(TIME, BATCH, INPUTS), numbers(BATCH, STATIC), numbers(*state), numbers(*state)
    found = tops(made, x, CONT, static, h, c)
    wanted = lstm(blobs_of(made), *(t.detach().numpy() for t in (x, static, h, c)))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, s, h, c: made(x, CONT, s, h, c), (x, static, h, c))


def test_rnn_is_that_of_its_equations() -> None:
    made = layer("RNN", PARAMETERS, (TIME, BATCH, INPUTS), (TIME, BATCH))
    w_x, b, w_h, w_o, b_o = blobs_of(made)
    x = numbers(TIME, BATCH, INPUTS)
    (y,) = tops(made, x, CONT)
    for n in range(BATCH):
        hidden = np.zeros(OUTPUTS)
        for t in range(TIME):
            hidden = np.tanh(w_x @ x[t, n].detach().numpy() + b + w_h @ (hidden * float(CONT[t, n])))
            np.testing.assert_allclose(y[t, n].detach().numpy(), np.tanh(w_o @ hidden + b_o), atol=1e-12)


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_states_are_kept_for_the_next_call(kind: str) -> None:
    x = numbers(TIME, BATCH, INPUTS)
    cont = torch.ones_like(CONT)
    whole = layer(kind, PARAMETERS, (TIME, BATCH, INPUTS), (TIME, BATCH))
    parts = layer(kind, PARAMETERS, (TIME // 2, BATCH, INPUTS), (TIME // 2, BATCH))
    parts.load_state_dict(whole.state_dict())
    (want,) = tops(whole, x, cont)
    got = torch.cat([tops(parts, x[i : i + 2], cont[i : i + 2])[0] for i in (0, 2)])
    torch.testing.assert_close(got, want)
    parts.reset()
    torch.testing.assert_close(tops(parts, x[:2], cont[:2])[0], want[:2])


@pytest.mark.parametrize(
    ("fields", "shapes", "says"),
    [
        ("", [(4, 3, 5), (4, 3)], "num_output = 0"),
        (PARAMETERS, [(4, 3, 5), (4, 2)], r"cont has shape \(4, 2\); \(4, 3\)"),
        (PARAMETERS, [(4, 3, 5), (4, 3), (2, 6)], r"static input has shape \(2, 6\); \(3, 6\) would do"),
        (EXPOSED, [(4, 3, 5), (4, 3)], "2 bottoms and 1 tops; 4 bottoms"),
        (PARAMETERS, [(4,), (4,)], r"\(time steps, sequences, ...\) would do"),
    ],
)
def test_what_does_not_fit_is_named(fields: str, shapes: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(CaffeError, match=says):
        layer("LSTM", fields, *shapes).output_shapes(shapes)
