"""A recurrent layer in float64, step by step as its equations read, and its gradients by autograd."""

from __future__ import annotations

import itertools

import torch

from tilewise.machine.turns import pause
from tilewise.problems.recurrent.tensors import GATES, Recurrent, operands_of, weights_of

__all__ = ["reference"]

REFERENCE_BYTES = 1 << 30
"""Bytes that autograd may keep, roughly. More sequences than fit are computed in parts of the batch."""


def reference(p: Recurrent, operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """All results of ``p`` in float64, in the order of its roles."""
    named = dict(zip(operands_of(p), operands, strict=True))
    kept = 8 * p.time * p.layers * p.directions * p.hidden * (3 * GATES[p.cell] + 8)
    size = max(1, REFERENCE_BYTES // kept) if p.task == "training" else p.batch
    weights = weights_of(p)
    parts = []
    for start in range(0, p.batch, size):
        length = min(size, p.batch - start)
        part = {role: t if role in weights else t.narrow(1, start, length) for role, t in named.items()}
        parts.append(_part(p, part))
    if len(parts) == 1:
        return parts[0]
    of_items = len(parts[0]) - len(weights)  # the gradients of the weights come last: they are sums over the batch
    columns = list(zip(*parts, strict=True))
    items = (torch.cat(column, 1) for column in columns[:of_items])
    return (*items, *(torch.stack(column).sum(0) for column in columns[of_items:]))


def _part(p: Recurrent, operands: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results for some sequences of the batch."""
    named = {role: t.detach().to(torch.float64, copy=True) for role, t in operands.items()}
    if p.task == "inference":
        return _forward(p, named)
    given = {role: t for role, t in named.items() if role not in ("dy", "dhn", "dcn")}
    with torch.inference_mode(False), torch.enable_grad():
        for t in given.values():
            t.requires_grad_()
        results = _forward(p, given)
        pause()
        gradients = torch.autograd.grad(
            results, list(given.values()), [named[f"d{r}"] for r in ("y", "hn", "cn")[: len(results)]]
        )
    return (*(t.detach() for t in results), *gradients)


def _forward(p: Recurrent, named: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output and last states of all layers."""
    x, last_h, last_c = named["x"], [], []
    for layer, direction in itertools.product(range(p.layers), range(p.directions)):
        if direction == 0:
            layer_input, halves = x, []
        index, end = layer * p.directions + direction, f"_l{layer}" + "_reverse" * direction
        h, c = named["h0"][index], named["c0"][index] if p.cell == "lstm" else None
        steps: list[torch.Tensor] = [h] * p.time
        order = range(p.time) if direction == 0 else range(p.time - 1, -1, -1)
        for t in order:
            if t % 64 == 0:
                pause()
            h, c = _step(p, named, end, layer_input[t], h, c)
            steps[t] = h
        halves.append(torch.stack(steps))
        last_h.append(h)
        if c is not None:
            last_c.append(c)
        x = torch.cat(halves, 2)
    return (x, torch.stack(last_h), *([torch.stack(last_c)] if last_c else []))


def _step(
    p: Recurrent, named: dict[str, torch.Tensor], end: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states after one step, by the equations of torch's manual for ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``."""
    from_x, from_h = x @ named[f"w_ih{end}"].T, h @ named[f"w_hh{end}"].T
    if p.biases:
        from_x, from_h = from_x + named[f"b_ih{end}"], from_h + named[f"b_hh{end}"]
    if p.cell == "rnn_tanh":
        return torch.tanh(from_x + from_h), None
    if p.cell == "rnn_relu":
        return torch.relu(from_x + from_h), None
    if p.cell == "gru":
        (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3, 1), from_h.chunk(3, 1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return (1 - z) * n + z * h, None
    assert c is not None
    i, f, g, o = (from_x + from_h).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
