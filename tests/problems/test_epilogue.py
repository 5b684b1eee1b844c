"""What follows a convolution as parts of its problem: activations by name, keys, notation, cuts and checks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import toys

from tilewise.problems.activations import (
    CONV_ACTIVATIONS,
    PARAMETERS,
    activate,
    activated,
    activation_kind,
    activation_name,
    activation_parameters,
    require_activation,
)
from tilewise.problems.base import Compute
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.checks import errors_of
from tilewise.problems.conv.notation import format_layer, layer_name, parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass

NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)
P = ConvProblem(Pass.FPROP, 2, 4, 6, (Axis(9, 3), Axis(9, 3)), 2)


@st.composite
def names(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(CONV_ACTIVATIONS))
    if kind == "clamp":
        return activation_name(kind, *sorted((draw(NUMBERS), draw(NUMBERS | st.just(math.inf)))))
    return activation_name(kind, *(draw(NUMBERS) for _ in PARAMETERS.get(kind, ())))


@given(name=names())
def test_a_name_says_the_function_and_its_parameters(name: str) -> None:
    require_activation(name)
    assert activation_name(activation_kind(name), *activation_parameters(name)) == name


def by_hand(x: float, name: str) -> float:
    """The activation of one number, from its definition."""
    values = activation_parameters(name)
    sigmoid = 1 / (1 + math.exp(-x))
    return {
        "none": lambda: x,
        "relu": lambda: max(x, 0.0),
        "relu6": lambda: min(max(x, 0.0), 6.0),
        "gelu": lambda: x / 2 * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda: x * sigmoid,
        "tanh": lambda: math.tanh(x),
        "sigmoid": lambda: sigmoid,
        "hardsigmoid": lambda: min(max(x + 3, 0.0), 6.0) / 6,
        "hardswish": lambda: x * min(max(x + 3, 0.0), 6.0) / 6,
        "leaky_relu": lambda: x if x > 0 else values[0] * x,
        "clamp": lambda: min(max(x, values[0]), values[1]),
    }[activation_kind(name)]()


EXAMPLES = (*(n for n in CONV_ACTIVATIONS if n not in PARAMETERS), "leaky_relu:0.2", "clamp:-1.5:2.5", "clamp:0.5:inf")


@pytest.mark.parametrize("name", EXAMPLES)
def test_activations_are_what_their_definitions_say(name: str) -> None:
    x = torch.linspace(-7, 7, 113, dtype=torch.float64)
    want = torch.tensor([by_hand(float(v), name) for v in x], dtype=torch.float64)
    torch.testing.assert_close(activated(x, name), want, rtol=1e-12, atol=1e-12)
    assert activate(x, name) is x
    torch.testing.assert_close(x, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Relu", "relu:1.0", "leaky_relu", "leaky_relu:.1", "leaky_relu:nan", "clamp:0:6",
                                  "clamp:6.0:0.0", "clamp:0.0", "clamp:a:b", "softmax", "", "relu\n"])  # fmt: skip
def test_other_names_are_refused_with_what_would_do(name: str) -> None:
    with pytest.raises(ValueError, match="would do"):
        replace(P, activation=name)


@pytest.mark.parametrize("changes", [{"activation": "relu"}, {"residual": True}])
def test_only_a_forward_that_sets_its_result_goes_on(changes: dict[str, object]) -> None:
    for pass_ in (Pass.DGRAD, Pass.WGRAD):
        with pytest.raises(ValueError, match="only fprop"):
            replace(P, pass_=pass_, **changes)
    with pytest.raises(ValueError, match="accumulates"):
        replace(P, accumulate=True, **changes)


@given(name=names(), residual=st.booleans(), bias=st.booleans(), constant=st.booleans())
def test_keys_and_texts_are_read_back(name: str, residual: bool, bias: bool, constant: bool) -> None:
    p = replace(P, activation=name, residual=residual, bias=bias, constant_weight=constant)
    assert ConvProblem.from_key(p.key) == p
    assert parse_layer(format_layer(p, "a"), bias=bias) == replace(p, constant_weight=False)
    assert layer_name(format_layer(p, "a")) == "a"


def test_a_problem_without_an_epilogue_keeps_its_key() -> None:
    assert replace(P, bias=True).key == (
        "conv fprop fp32 ieee g2mb2ic4oc6ih9kh3sh1dh0ph0,0iw9kw3sw1dw0pw0,0 x:co16w:co16y:co16 bias cpu"
    )
    full = replace(P, bias=True, residual=True, activation="clamp:0.0:6.0", constant_weight=True)
    assert full.key.endswith("y:co16 bias residual clamp:0.0:6.0 constant_weight cpu")


def test_words_behind_a_layer_are_of_its_forward() -> None:
    text = 'mb1ic64ih56oc64kh3ph1+bias+res_+clamp:0:6_n"block"'
    p = parse_layer(text)
    assert (p.bias, p.residual, p.activation, layer_name(text)) == (True, True, "clamp:0.0:6.0", "block")
    for pass_ in (Pass.DGRAD, Pass.WGRAD):
        q = parse_layer(text, pass_=pass_)
        assert (q.bias, q.residual, q.activation) == (False, False, "none")


@pytest.mark.parametrize("words", ["+", "+relux", "+relu+tanh", "+res:1", "+leaky_relu", "+clamp:6:0", "+relu ih3"])
def test_words_that_are_none_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"would do|behind all entries"):
        parse_layer("ic4ih9oc4kh3" + words)


def test_parts_leave_it_to_who_joins_them() -> None:
    p = replace(P, groups=1, bias=True, residual=True, activation="silu")
    for axis in p.cut_axes[:1] + p.cut_axes[2:]:
        whole = p.extent(axis)
        for part in p.split(axis, (1, whole - 1)):
            assert part.problem is not None
            assert (part.problem.bias, part.problem.residual, part.problem.activation) == (False, False, "none")


def test_a_residual_is_read_once() -> None:
    assert replace(P, residual=True).bytes == P.bytes + P.nbytes("y")
    assert replace(P, residual=True, activation="relu").flops == P.flops


def right(problem: ConvProblem, *, residual_by: float = 1.0, first: bool = False, name: str = "") -> Compute:
    """Computes ``problem``; the residual times a factor, or with ``first`` the activation before it is added."""

    def compute(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        value = problem.reference(a, b)
        if bias is not None:
            value += bias.double().view(-1, *[1] * problem.dims)
        if first:
            value = activated(value, problem.activation)
        if residual is not None:
            value += residual.double() * residual_by
        return out.copy_(value if first else activated(value, name or problem.activation))

    return compute


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
def test_a_check_sees_what_is_wrong_behind_the_sums(name: str, layout: str) -> None:
    p = replace(toys.small(batch=2), bias=True, residual=True, activation=name, layouts=(layout,) * 3)
    error = errors_of(p, right(p))
    assert error.l2 < 1e-6
    assert error.spread < 1e-5
    assert errors_of(p, right(p, residual_by=0.9)).l2 > 1e-4
    if name != "none":
        assert errors_of(p, right(p, name="none")).l2 > 1e-3
        assert errors_of(p, right(p, first=True)).l2 > 1e-4


@pytest.mark.parametrize("name", ["clamp:0.1:6.0", "hardsigmoid", "sigmoid"])
def test_an_activation_of_nothing_may_round(name: str) -> None:
    p = ConvProblem(Pass.FPROP, 2, 3, 3, (Axis(3, 1, before=2, after=2),) * 2, activation=name)
    assert errors_of(p, right(p)).spread < 1e-6
