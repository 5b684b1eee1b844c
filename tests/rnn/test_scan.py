"""Cells of one's own over all steps: compiled ones against float64 step by step, and what is not compiled."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import some
from torch import Tensor, nn

from tilewise.kernels.cpu.recurrent.expressions import Cell, Expressions
from tilewise.rnn import scan
from tilewise.rnn.tracing import NotTraceable, trace

compiles = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

CellFunction = Callable[..., Any]


def peephole(x: Tensor, h: Tensor, state: tuple[Tensor, Tensor], looks: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f + looks * state[1]) * state[1] + i.sigmoid() * torch.tanh(g)
    return o.sigmoid() * c.tanh(), c


def minimal(x: Tensor, h: Tensor, state: Tensor, bias: Tensor) -> Tensor:
    """A minimal gated unit, with two parts of a bias and an input part of its own that masks."""
    f, n, mask = x.chunk(3, dim=-1)
    of_f, of_n = torch.chunk(h, 2, -1)
    b_f, b_n = bias.chunk(2)
    gate = torch.sigmoid(f + of_f + b_f)
    return torch.lerp(state, torch.nn.functional.silu(n + gate * of_n - b_n), mask.clamp(0, 1) * gate)


def three(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    h0, slow, fast = state
    new = torch.relu(x + h * 0.5) - (-fast).square()
    return new / (2.0 + new.square()), torch.addcmul(slow, new, h0, value=0.25), 1 - torch.sub(fast, h0, alpha=0.5)


def normalized(
    x: Tensor, h: Tensor, state: tuple[Tensor, Tensor], gain: Tensor, bias: Tensor, gain_c: Tensor
) -> tuple[Tensor, Tensor]:
    """An LSTM with layer normalization of what the state gives, and of c (Ba et al. 2016, equations 20 to 22)."""
    h = torch.nn.functional.layer_norm(h, gain.shape, gain, bias, eps=0.1)
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * torch.nn.functional.layer_norm(c, gain_c.shape, gain_c, None, 0.1).tanh(), c


def means(x: Tensor, h: Tensor, state: Tensor, p: Tensor) -> Tensor:
    """Means of means, variances and root mean squares, and a mean as a factor of its own."""
    of_gate, of_new = h.chunk(2, -1)
    new = torch.nn.functional.rms_norm(of_new + x, p.shape, p, 0.1)
    spread = (new.var(-1, False, True) + 0.5).rsqrt()
    level = torch.mean(torch.sigmoid(of_gate - new.mean(-1, keepdim=True)) * spread, dim=-1, keepdim=True)
    return torch.tanh(state * level + new * torch.sqrt(level + 1.0) - torch.mean(level, -1, keepdim=True))


def zoneout(x: Tensor, h: Tensor, state: tuple[Tensor, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM that keeps some numbers of its states (Krueger et al. 2017), and drops some of its candidates."""
    keep_h, keep_c, drop, more, last = noise.chunk(5, -1)
    i, f, g, o = (x + h).chunk(4, -1)
    g = g.tanh() * (drop >= 0.25).to(g.dtype) / 0.75
    c = torch.where(keep_c < 0.1, state[1], f.sigmoid() * state[1] + i.sigmoid() * g)
    new = torch.where(keep_h < 0.2, state[0], o.sigmoid() * c.tanh())
    return new + more * 0.01, c - torch.where(last <= 0.5, last, 0.5 * c)


def noisy_means(x: Tensor, h: Tensor, state: Tensor, noise: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm((x + h) * (noise < 0.5), noise.shape[-1:], eps=0.1).tanh()


CELLS: dict[str, tuple[CellFunction, int, int, int, list[int]]] = {
    "peephole": (peephole, 4, 4, 2, [1]), "minimal": (minimal, 3, 2, 1, [2]), "three": (three, 1, 1, 3, []),
    "normalized": (normalized, 4, 4, 2, [4, 4, 1]), "means": (means, 1, 2, 1, [1]),
    "zoneout": (zoneout, 4, 4, 2, []), "noisy_means": (noisy_means, 1, 1, 1, []),
}  # fmt: skip
NOISE = {"zoneout": 5, "noisy_means": 1}
SEED = 2**40 + 3


def tensors_of(
    name: str, time: int, batch: int, hidden: int, seed: int
) -> tuple[CellFunction, Tensor, tuple[Tensor, ...], Tensor, list[Tensor]]:
    cell, from_x, from_h, states, parameters = CELLS[name]
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=generator)

    x = drawn(time, batch, 2 * from_x * hidden)[..., ::2]  # not contiguous
    state = tuple(drawn(batch, hidden) for _ in range(states))
    u = drawn(hidden, from_h * hidden).T / (2 * math.sqrt(hidden))
    return cell, x, state, u, [drawn(parts * hidden) for parts in parameters]


def with_gradients(
    cell: CellFunction, x: Tensor, state: tuple[Tensor, ...], u: Tensor, parameters: list[Tensor], **options: Any
) -> list[Tensor]:
    """y, last states, and the gradients of everything by sums with fixed factors."""
    leaves = [t.detach().requires_grad_() for t in (x, *state, u, *parameters)]
    x, *rest = leaves
    given, u, parameters = rest[: len(state)], rest[len(state)], rest[len(state) + 1 :]
    y, last = scan(cell, x, tuple(given) if len(given) > 1 else given[0], u, *parameters, **options)
    results = [y, *(last if isinstance(last, tuple) else (last,))]
    factors = [torch.arange(r.numel(), dtype=torch.float64, device="cpu").view_as(r).sin().to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, leaves, factors, allow_unused=True)
    return [*results, *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True))]


@compiles
@settings(max_examples=some(20), deadline=None)
@given(
    name=st.sampled_from(tuple(CELLS)), time=st.integers(1, 7), batch=st.integers(1, 9),
    hidden=st.sampled_from((1, 7, 16, 33)), seed=st.integers(0, 99), resets=st.booleans(), reverse=st.booleans(),
)  # fmt: skip
def test_a_compiled_cell_is_that_of_float64(
    name: str, time: int, batch: int, hidden: int, seed: int, resets: bool, reverse: bool
) -> None:
    cell, x, state, u, parameters = tensors_of(name, time, batch, hidden, seed)
    generator = torch.Generator().manual_seed(seed)
    anew = torch.rand(time, batch, dtype=torch.float32, device="cpu", generator=generator) < 0.3 if resets else None
    options: dict[str, Any] = {"resets": anew, "reverse": reverse, "noise": NOISE.get(name, 0), "seed": SEED + seed}
    got = with_gradients(cell, x, state, u, parameters, **options, compiled=True)
    wide = [t.double() for t in parameters]
    want = with_gradients(cell, x.double(), tuple(s.double() for s in state), u.double(), wide, **options)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4, msg=lambda text, p=place: f"{p}: {text}")
    with torch.no_grad():
        y, _ = scan(cell, x, state if len(state) > 1 else state[0], u, *parameters, **options)
    assert torch.equal(y, got[0])


OPERATIONS = ("add", "sub", "mul", "neg", "tanh", "sigmoid", "relu", "square", "clamp", "lerp", "silu")


@compiles
@settings(max_examples=some(12), deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), max_size=8),
    seed=st.integers(0, 9),
)
def test_any_expression_and_its_gradient(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Of values that are far from where a derivative jumps."""

    def cell(x: Tensor, h: Tensor, state: tuple[Tensor, Tensor], p: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        values: list[Any] = [a, b, h, *state, p, 0.5]
        for name, i, j in steps:
            first, second = values[i % len(values)], values[j % len(values)]
            if name in ("add", "sub", "mul"):
                if isinstance(first, float) and isinstance(second, float):
                    continue
                values.append(getattr(torch, name)(second, first) if isinstance(first, float) else first + second
                              if name == "add" else first - second if name == "sub" else first * second)  # fmt: skip
            elif isinstance(first, float) or (name == "lerp" and isinstance(second, float)):
                continue
            elif name == "clamp":
                values.append(first.clamp(min=-0.7, max=1.3))
            elif name == "lerp":
                values.append(torch.lerp(first, second, 0.25))
            elif name == "silu":
                values.append(torch.nn.functional.silu(first))
            else:
                values.append(getattr(torch, name)(first))
        tensors = [value for value in values if not isinstance(value, float)]
        return torch.tanh(tensors[-1] + tensors[0]), torch.sigmoid(tensors[len(tensors) // 2])

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=generator)

    x, state, u, p = drawn(3, 2, 10), (drawn(2, 5), drawn(2, 5)), drawn(5, 5) / 3, [drawn(5)]
    got = with_gradients(cell, x, state, u, p, compiled=True)
    wide = (state[0].double(), state[1].double())
    want = with_gradients(cell, x.double(), wide, u.double(), [p[0].double()])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@compiles
def test_a_cell_of_torch_is_torchs_layer() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(5, 12)
    inputs = torch.randn(6, 3, 5)
    x = torch.nn.functional.linear(inputs, layer.weight_ih_l0, layer.bias_ih_l0 + layer.bias_hh_l0)
    zeros = torch.zeros(3, 12)
    y, (h, c) = scan(peephole, x, (zeros, zeros), layer.weight_hh_l0, torch.zeros(12), compiled=True)
    want, (hn, cn) = layer(inputs)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(h, hn[0])
    torch.testing.assert_close(c, cn[0])
    y.mul_(2)  # may be changed in place, as torch's
    wanted = torch.autograd.grad((2 * want).square().sum(), list(layer.parameters()))
    for a, b in zip(torch.autograd.grad(y.square().sum(), list(layer.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b)


@compiles
def test_gradients_of_gradients() -> None:
    cell, x, state, u, parameters = tensors_of("peephole", 3, 2, 4, 1)
    found = []
    for compiled in (True, False):
        leaves = [t.detach().requires_grad_() for t in (x, *state, u, *parameters)]
        y, _ = scan(cell, leaves[0], (leaves[1], leaves[2]), leaves[3], leaves[4], compiled=compiled)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@compiles
def test_numbers_of_a_cell_are_those_of_the_call() -> None:
    """A function may use numbers that change; they are read anew in each call."""
    factor = 1.0

    def cell(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(x + factor * h)

    x, h0, u = torch.ones(2, 1, 3), torch.ones(1, 3), torch.eye(3)
    first, _ = scan(cell, x, h0, u, compiled=True)
    factor = 3.0
    second, _ = scan(cell, x, h0, u, compiled=True)
    torch.testing.assert_close(second, scan(cell, x, h0, u, compiled=False)[0])
    assert not torch.equal(first, second)


def test_other_types_run_step_by_step() -> None:
    cell, x, state, u, parameters = tensors_of("peephole", 3, 2, 4, 1)
    want, _ = scan(cell, x.double(), (state[0].double(), state[1].double()), u.double(), parameters[0].double())
    narrow = [t.bfloat16() for t in (x, *state, u, *parameters)]
    y, (h, c) = scan(cell, narrow[0], (narrow[1], narrow[2]), *narrow[3:])
    assert y.dtype is h.dtype is c.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), want, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="compiled=True: the cell is not compiled: kernels for cells are for fp32"):
        scan(cell, narrow[0], (narrow[1], narrow[2]), *narrow[3:], compiled=True)


OUTER = torch.ones(4)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (lambda x, h, s: torch.softmax(x + h, -1), "calls softmax; arithmetic and add, addcmul, chunk"),
        (lambda x, h, s: (x + h).sum(), "uses 'sum' of a tensor"),
        (lambda x, h, s: x + h.mean(), r"means of another kind; over dim=-1 with keepdim=True"),
        (lambda x, h, s: x + h.mean(0, keepdim=True), r"means of another kind; over dim=-1 with keepdim=True"),
        (lambda x, h, s: torch.nn.functional.layer_norm(x, (2, 4)), r"normalizes over \(2, 4\); 4 numbers would do"),
        (lambda x, h, s: x + h.mean(-1, True).var(-1, keepdim=True), "a variance of 1 numbers with correction 1"),
        (lambda x, h, s: h.mean(-1, True), "returns a state 0"),
        (lambda x, h, s: x + OUTER, "uses a tensor that is no argument of it; one given as a parameter would do"),
        (lambda x, h, s: x if x else h, "decides by a tensor's value"),
        (lambda x, h, s: (x, h), "that is no tensor|does not return 1 states|returns a state 0"),
        (lambda x, h, s: 1.0, "returns a state 0 that is no tensor"),
        (lambda x, h, s: x + "a", "uses str that is no argument"),
        (lambda x, h, s: x.chunk(2, 0)[0], "divides along dimension 0"),
        (lambda x, h, s: x.chunk(2, -1)[0], "into 2 equal parts"),
        (lambda x, h, s: x.clamp(h, s), "clamps between tensors"),
        (lambda x, h, s: torch.add(x, h, out=s), "calls add with other arguments"),
        (lambda x, h, s: x + undefined, "raised NameError for placeholders"),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_what_is_not_compiled_says_why(cell: CellFunction, says: str) -> None:
    with pytest.raises(NotTraceable, match=says):
        trace(cell, 1, 1, 1, [], (2, 4))


def test_a_cell_that_is_not_compiled_runs_by_torch() -> None:
    def cell(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
        return torch.softmax(x + h, -1)

    x, h0, u = torch.randn(3, 2, 4), torch.zeros(2, 4), torch.eye(4)
    y, last = scan(cell, x, h0, u)
    h = h0
    for t in range(3):
        h = torch.softmax(x[t] + h, -1)
        torch.testing.assert_close(y[t], h)
    assert torch.equal(last, y[-1])
    with pytest.raises(ValueError, match=r"compiled=True: the cell is not compiled: .*(softmax|numba)"):
        scan(cell, x, h0, u, compiled=True)


@compiles
def test_a_cell_of_too_many_means_runs_by_torch() -> None:
    def cell(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
        for factor in range(70):
            x = x + torch.tanh(factor * h).mean(-1, keepdim=True)
        return x

    x, h0, u = torch.randn(3, 2, 4), torch.zeros(2, 4), torch.eye(4)
    with pytest.raises(ValueError, match=r"it has \d+ means with those of its gradient; at most 64 would do"):
        scan(cell, x, h0, u, compiled=True)
    torch.testing.assert_close(scan(cell, x, h0, u)[0][0], cell(x[0], h0 @ u.T, h0))


@compiles
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_that_divide_sequences_sum_gradients_of_parameters(threads: int) -> None:
    """With fewer and more sequences than threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for batch in (1, 8):
            cell, x, state, u, parameters = tensors_of("means", 4, batch, 40, 3)
            got = with_gradients(cell, x, state, u, parameters, compiled=True)
            want = with_gradients(cell, x.double(), (state[0].double(),), u.double(), [parameters[0].double()])
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.ones(3, 2, 5)}, r"x: shape \(3, 2, 5\); \(steps, 2, a multiple of 4\)"),
        ({"x": torch.ones(0, 2, 4)}, "at least one step would do"),
        ({"state": torch.ones(2, 4, 1)}, r"\(batch, hidden\) for each would do"),
        ({"state": (torch.ones(2, 4), torch.ones(2, 5))}, r"\(batch, hidden\) for each would do"),
        ({"u": torch.ones(4, 5)}, r"u: shape \(4, 5\); \(a multiple of 4, 4\) would do"),
        ({"resets": torch.ones(3, 2)}, r"resets: torch.float32 \(3, 2\); torch.bool \(3, 2\) would do"),
        ({"resets": torch.ones(2, 3, dtype=torch.bool)}, r"torch.bool \(3, 2\) would do"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    fine: dict[str, Any] = {"x": torch.ones(3, 2, 4), "state": torch.ones(2, 4), "u": torch.ones(4, 4)}
    with pytest.raises(ValueError, match=says):
        scan(lambda x, h, s: x + h, **{**fine, **change})
    with pytest.raises(ValueError, match=r"parameters\[0\]: shape \(3,\); a multiple of 4 would do"):
        scan(lambda x, h, s, p: x + h, *fine.values(), torch.ones(3))


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiles), False])
def test_states_of_parameters_alone_are_those_of_every_sequence(compiled: bool) -> None:
    x, h0, u, p = torch.ones(3, 2, 4), torch.zeros(2, 4), torch.eye(4), torch.arange(4.0).requires_grad_()
    y, last = scan(lambda x, h, s, p: p * 2.0, x, h0, u, p, compiled=compiled)
    assert torch.equal(y, (2 * p).expand(3, 2, 4))
    assert torch.equal(last, y[-1])
    (gradient,) = torch.autograd.grad(y.sum() + last.sum(), p)
    assert torch.equal(gradient, torch.full((4,), 16.0))


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cell: returns a state of shape \(2, 1, 4\); \(2, 4\) would do"):
        scan(lambda x, h, s: s[:, None], torch.ones(3, 2, 4), torch.zeros(2, 4), torch.eye(4))


def test_means_are_computed_level_by_level() -> None:
    made = Expressions()
    x, h = made.input("x", 0), made.input("h", 0)
    mean = made.apply("mean", x)
    assert made.apply("mean", mean) == mean
    assert made.apply("mean", made.apply("sqrt", made.apply("add", mean, made.constant(1.0)))) != mean
    less = made.apply("sub", x, mean)
    other, square = made.apply("mean", h), made.apply("mean", made.apply("mul", less, less))
    assert made.apply("mean", made.apply("sqrt", square)) == made.apply("sqrt", square)
    cell = Cell(1, 1, 1, 0, tuple(made.nodes), (square,))
    assert cell.means == ((mean, other), (square,))
    assert cell.needed([less], [mean]) == {less, x, mean}
    assert cell.needed([square], []) == {square, made.apply("mul", less, less), less, x, mean}


def test_equal_expressions_are_one_node_and_numbers_are_folded() -> None:
    made = Expressions()
    x, two = made.input("x", 0), made.constant(2.0)
    assert made.apply("mul", two, made.constant(3.0)) == made.constant(6.0)
    assert made.apply("add", x, made.constant(0.0)) == x == made.apply("mul", x, made.constant(1.0))
    assert made.apply("tanh", x) == made.apply("tanh", x)
    assert made.apply("div", two, made.constant(0.0)) != two
