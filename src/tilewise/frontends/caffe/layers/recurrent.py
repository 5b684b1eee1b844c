"""Recurrent layers over sequences that begin and end anywhere in a batch of time steps."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["LSTM", "RNN", "Recurrent"]


class Recurrent(Layer):
    """What recurrent layers have in common (Donahue et al. 2014).

    The bottoms are inputs (T, N, ...), and ``cont`` (T, N), which is 0 where a sequence begins and 1 where it goes on.
    A static input (N, ...) may follow, which each step sees, and with ``expose_hidden`` the states to begin with,
    (1, N, num_output) each. Then the tops are the outputs (T, N, num_output) and the last states; without
    ``expose_hidden`` the layer keeps the last states, and begins with them at the next call.
    """

    weight_x: nn.Parameter
    weight_static: nn.Parameter
    weight_h: nn.Parameter
    bias: nn.Parameter

    bottoms: ClassVar = (2, None)
    tops: ClassVar = (1, None)
    states: ClassVar[int] = 1
    gates: ClassVar[int] = 1

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.recurrent_param
        self.num_output, self.exposed = int(p.num_output), bool(p.expose_hidden)
        if self.num_output < 1:
            self.fail(f"num_output = {self.num_output}; at least 1 would do")
        extra = self.states if self.exposed else 0
        if not 2 + extra <= len(shapes) <= 3 + extra or self.top_count != 1 + extra:
            self.fail(
                f"it has {len(shapes)} bottoms and {self.top_count} tops; {2 + extra} bottoms, one more with a static "
                f"input, and {1 + extra} tops would do"
            )
        self.static = len(shapes) == 3 + extra
        if len(shapes[0]) < 2:
            self.fail(f"the inputs have shape {shapes[0]}; (time steps, sequences, ...) would do")
        self.inputs = math.prod(shapes[0][2:])
        rows = self.gates * self.num_output
        self.add_blob("weight_x", (rows, self.inputs), p.weight_filler)
        self.add_blob("bias", (rows,), p.bias_filler)
        if self.static:
            self.static_inputs = math.prod(shapes[2][1:])
            self.add_blob("weight_static", (rows, self.static_inputs), p.weight_filler)
        self.add_blob("weight_h", (rows, self.num_output), p.weight_filler)
        # No buffers: nets of two phases share their buffers, and each has sequences of its own.
        self.kept: tuple[Tensor, ...] | None = None

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        x, cont = shapes[:2]
        if cont != x[:2]:
            self.fail(f"cont has shape {cont}; {x[:2]}, a number for each step of each sequence, would do")
        if math.prod(x[2:]) != self.inputs:
            self.fail(f"the inputs have shape {x}; {self.inputs} values for each step would do")
        if self.static and (shapes[2][:1] != x[1:2] or math.prod(shapes[2][1:]) != self.static_inputs):
            self.fail(f"the static input has shape {shapes[2]}; ({x[1]}, {self.static_inputs}) would do")
        state = (1, x[1], self.num_output)
        for shape in shapes[2 + self.static :]:
            if shape != state:
                self.fail(f"a state has shape {shape}; {state} would do")
        return [(*x[:2], self.num_output), *([state] * self.states if self.exposed else [])]

    def reset(self) -> None:
        """Forget the states: the next call begins with zeros."""
        self.kept = None

    def forward(self, x: Tensor, cont: Tensor, *others: Tensor) -> Tops:
        rows = F.linear(x.flatten(2) if x.dim() > 3 else x.reshape(*x.shape[:2], -1), self.weight_x, self.bias)
        if self.static:
            rows = rows + F.linear(others[0].flatten(1), self.weight_static)
        states = self._first_states(x, others[self.static :])
        outputs = []
        for step, go_on in zip(rows.unbind(0), cont.detach().to(x.dtype).unbind(0), strict=True):
            output, states = self.step(step, states, go_on[:, None])
            outputs.append(output)
        found = torch.stack(outputs)
        if self.exposed:
            return (found, *(state[None] for state in states))
        self.kept = tuple(state.detach() for state in states)
        return found

    def step(self, rows: Tensor, states: tuple[Tensor, ...], go_on: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One time step: output and new states, from what the inputs add and the states (N, num_output)."""
        raise NotImplementedError

    def _first_states(self, x: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.exposed:
            return tuple(state[0] for state in given)
        shape = (x.shape[1], self.num_output)
        kept = self.kept
        if kept and all((s.shape, s.dtype, s.device) == (shape, x.dtype, x.device) for s in kept):
            return kept
        return (x.new_zeros(shape),) * self.states


@register("RNN")
class RNN(Recurrent):
    """h = tanh(W_h h + W_x x + b), and the output tanh(W_o h + b_o).

    The blobs are W_x, b, with a static input its weights, W_h, W_o and b_o.
    """

    weight_o: nn.Parameter
    bias_o: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        super().build(parameter, shapes)
        p = parameter.recurrent_param
        self.add_blob("weight_o", (self.num_output, self.num_output), p.weight_filler)
        self.add_blob("bias_o", (self.num_output,), p.bias_filler)

    def step(self, rows: Tensor, states: tuple[Tensor, ...], go_on: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        state = (rows + F.linear(states[0] * go_on, self.weight_h)).tanh()
        return F.linear(state, self.weight_o, self.bias_o).tanh(), (state,)


@register("LSTM")
class LSTM(Recurrent):
    """c = f c + i g and h = o tanh(c), with gates i, f, o and g in this order, of W_h h + W_x x + b.

    The blobs are W_x, b, with a static input its weights, and W_h (Zaremba & Sutskever 2014). The states are h and c.
    """

    states: ClassVar = 2
    gates: ClassVar = 4

    def step(self, rows: Tensor, states: tuple[Tensor, ...], go_on: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, cell = states
        i, f, o, g = (rows + F.linear(hidden * go_on, self.weight_h)).chunk(4, 1)
        cell = go_on * f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return hidden, (hidden, cell)
