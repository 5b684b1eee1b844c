"""The six solvers and all learning-rate policies, against their published formulas in plain float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.schema import SolverParameter
from tilewise.frontends.caffe.training.rates import POLICIES, rate, step_reached
from tilewise.frontends.caffe.training.rules import RULES
from tilewise.frontends.caffe.training.update import Update
from tilewise.frontends.caffe.weights import Learnable


def reference_update(
    kind: str, solver: Any, g: np.ndarray, kept: list[np.ndarray], rate: float, t: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Update and new history of one parameter in float64, written from the rules as they are published."""
    momentum, delta = solver.momentum, solver.delta
    if kind == "SGD":
        v = momentum * kept[0] + rate * g
        return v, [v]
    if kind == "Nesterov":
        v = momentum * kept[0] + rate * g
        return (1 + momentum) * v - momentum * kept[0], [v]
    if kind == "AdaGrad":
        h = kept[0] + g**2
        return rate * g / (np.sqrt(h) + delta), [h]
    if kind == "RMSProp":
        h = solver.rms_decay * kept[0] + (1 - solver.rms_decay) * g**2
        return rate * g / (np.sqrt(h) + delta), [h]
    if kind == "AdaDelta":
        h = momentum * kept[0] + (1 - momentum) * g**2
        step = np.sqrt(kept[1] + delta) / np.sqrt(h + delta) * g
        return rate * step, [h, momentum * kept[1] + (1 - momentum) * step**2]
    assert kind == "Adam"
    m = momentum * kept[0] + (1 - momentum) * g
    v = solver.momentum2 * kept[1] + (1 - solver.momentum2) * g**2
    # Bias is taken out of the step, and delta is not scaled, as in the second form of the paper's section 2.
    corrected = rate * math.sqrt(1 - solver.momentum2 ** (t + 1)) / (1 - momentum ** (t + 1))
    return corrected * m / (np.sqrt(v) + delta), [m, v]


def reference(kind: str, solver: Any, given: list[Any], gradients: list[list[np.ndarray]]) -> Any:
    """Parameters and histories after all iterations, one parameter at a time."""
    values = [np.array(each.parameter.detach().numpy(), np.float64) for each in given]
    kept = [[np.zeros_like(value) for _ in range(RULES[kind].kept)] for value in values]
    for t, of_iteration in enumerate(gradients):
        g = [np.array(each, np.float64) for each in of_iteration]
        norm = math.sqrt(sum((each**2).sum() for each, p in zip(g, given, strict=True) if p.lr_mult))
        if 0 <= solver.clip_gradients < norm:
            g = [each * (solver.clip_gradients / norm) for each in g]
        for i, each in enumerate(given):
            if not each.lr_mult:
                continue
            decay = solver.weight_decay * each.decay_mult
            pull = values[i] if solver.regularization_type == "L2" else np.sign(values[i])
            gradient = g[i] / solver.iter_size + decay * pull
            step, kept[i] = reference_update(kind, solver, gradient, kept[i], rate(solver, t) * each.lr_mult, t)
            values[i] = values[i] - step
    return values, kept


def solver_of(kind: str, **fields: Any) -> Any:
    made = SolverParameter(type=kind, base_lr=0.1, lr_policy="step", gamma=0.5, stepsize=2, **fields)
    if "momentum" not in fields:
        made.momentum = 0.9 if RULES[kind].takes_momentum else 0.0
    return made


def learnables(generator: torch.Generator) -> list[Learnable]:
    shapes = {"conv.weight": (3, 2, 3, 3), "conv.bias": (3,), "fc.weight": (5, 7), "fc.bias": (5,), "fixed": (4,)}
    factors = {"conv.weight": (1, 1), "conv.bias": (2, 0), "fc.weight": (1, 1), "fc.bias": (2, 0.5), "fixed": (0, 0)}
    return [
        Learnable(name, nn.Parameter(torch.randn(shape, generator=generator)), *factors[name])
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight_decay": 0.05},
        {"weight_decay": 0.05, "regularization_type": "L1"},
        {"iter_size": 4, "weight_decay": 0.05},
        {"clip_gradients": 1.5, "iter_size": 2, "weight_decay": 0.05},
        {"clip_gradients": 1e6},
        {"delta": 1e-3, "momentum2": 0.95, "rms_decay": 0.8},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_five_steps_equal_the_published_rule_in_float64(kind: str, fields: dict[str, Any]) -> None:
    solver = solver_of(kind, **fields)
    generator = torch.Generator(device="cpu").manual_seed(7)
    given = learnables(generator)
    gradients = [[torch.randn(p.parameter.shape, generator=generator) for p in given] for _ in range(5)]
    wanted, histories = reference(kind, solver, given, [[g.numpy() for g in each] for each in gradients])
    update = Update(solver, given)
    for t, of_iteration in enumerate(gradients):
        update.clear()
        for each, gradient in zip(given, of_iteration, strict=True):
            each.parameter.grad = gradient.clone()
        update.step(rate(solver, t), t)
    for each, value in zip(given, wanted, strict=True):
        # AdaDelta's first steps are quotients of nearly equal small numbers.
        np.testing.assert_allclose(each.parameter.detach().numpy(), value, rtol=2e-5, atol=2e-5, err_msg=each.name)
    order = [kept[k] for k in range(RULES[kind].kept) for kept in histories]
    for history, value in zip(update.histories, order, strict=True):
        np.testing.assert_allclose(history.numpy(), value, rtol=1e-4, atol=1e-6)


def test_the_rate_is_inside_the_momentum() -> None:
    # Once the rate falls to 0, what was gathered at the old rate still moves the parameter.
    given = [Learnable("p", nn.Parameter(torch.zeros(1)), 1.0, 1.0)]
    update = Update(solver_of("SGD", momentum=0.5), given)
    given[0].parameter.grad = torch.ones(1)
    update.step(0.1, 0)
    update.clear()
    update.step(0.0, 1)
    assert given[0].parameter.item() == pytest.approx(-0.1 - 0.05)


def test_gradients_are_clipped_before_they_are_divided_by_iter_size() -> None:
    given = [Learnable("p", nn.Parameter(torch.zeros(2)), 1.0, 1.0)]
    update = Update(solver_of("SGD", momentum=0.0, clip_gradients=1.0, iter_size=2), given)
    given[0].parameter.grad = torch.tensor([3.0, 4.0])
    clipped = update.step(1.0, 0)
    assert clipped is not None
    assert (clipped.norm, clipped.factor) == (pytest.approx(5.0), pytest.approx(0.2))
    np.testing.assert_allclose(given[0].parameter.detach().numpy(), [-0.3, -0.4], rtol=1e-6)


def test_a_parameter_that_no_gradient_reached_still_decays() -> None:
    given = [
        Learnable("p", nn.Parameter(torch.ones(2)), 1.0, 1.0),
        Learnable("off", nn.Parameter(torch.ones(2)), 0.0, 1.0),
    ]
    Update(solver_of("SGD", weight_decay=0.5), given).step(1.0, 0)
    assert given[0].parameter.tolist() == [0.5, 0.5]
    assert given[1].parameter.tolist() == [1.0, 1.0]


@given(
    iteration=st.integers(0, 2000),
    base=st.floats(0.0009765625, 1.0, width=32),
    gamma=st.floats(0.0009765625, 0.99951171875, width=32),
    power=st.floats(0.25, 3.0, width=32),
    stepsize=st.integers(1, 500),
    values=st.lists(st.integers(1, 2000), max_size=4, unique=True).map(sorted),
    longest=st.integers(2000, 5000),
)
def test_every_policy_is_its_formula(
    iteration: int, base: float, gamma: float, power: float, stepsize: int, values: list[int], longest: int
) -> None:
    formulas: dict[str, Callable[[int], float]] = {
        "fixed": lambda i: base,
        "step": lambda i: base * gamma ** math.floor(i / stepsize),
        "exp": lambda i: base * gamma**i,
        "inv": lambda i: base / (1 + gamma * i) ** power,
        "multistep": lambda i: base * gamma ** sum(value <= i for value in values),
        "poly": lambda i: base * (1 - i / longest) ** power,
        "sigmoid": lambda i: base / 2 * (1 + math.tanh(gamma * (i - stepsize) / 2)),
    }
    assert formulas.keys() == POLICIES.keys()
    for policy, formula in formulas.items():
        solver = SolverParameter(base_lr=base, lr_policy=policy, gamma=gamma, power=power, max_iter=longest)
        solver.stepsize = stepsize
        solver.stepvalue.extend(values)
        step = 0
        for i in range(iteration + 1) if policy == "multistep" else ():
            step = step_reached(solver, i, step)
        assert rate(solver, iteration, step) == pytest.approx(formula(iteration), rel=1e-9, abs=1e-15), policy


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"lr_policy": "cosine"}, "cosine"),
        ({"lr_policy": "step", "stepsize": 0}, "stepsize"),
        ({"lr_policy": "poly"}, "max_iter"),
        ({"lr_policy": "multistep", "stepvalue": [5, 3]}, "stepvalue"),
    ],
)
def test_a_policy_that_makes_no_sense_is_named(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(CaffeError, match=word):
        rate(SolverParameter(base_lr=0.1, gamma=0.5, **fields), 3)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"type": "LBFGS"}, "LBFGS"),
        ({"type": "AdaGrad", "momentum": 0.9}, "momentum"),
        ({"type": "RMSProp", "rms_decay": 1.5}, "rms_decay"),
        ({"type": "Adam", "momentum": 0.9, "momentum2": 1.0}, "momentum2"),
        ({"regularization_type": "L3"}, "L3"),
        ({"iter_size": 0}, "iter_size"),
    ],
)
def test_a_solver_that_makes_no_sense_is_named(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(CaffeError, match=word):
        Update(SolverParameter(**fields), [])
