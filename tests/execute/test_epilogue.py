"""Residual and activation of a convolution in plans of leaves and splits, against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests import toys

from tilewise import execute, solvers
from tilewise.plan import Config, Plan
from tilewise.problems.activations import activated
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import Split, get

P = replace(toys.small(batch=5, channels=16, size=9), bias=True, residual=True, activation="relu")
LEAVES = ("aten", "onednn_fused")


def leaf(p: ConvProblem, name: str) -> Plan:
    """The plan of one solver with its first config."""
    return Plan(p.key, name, get(name).version, next(iter(get(name).configs(p))))


def parts(p: ConvProblem, split: str, sizes: tuple[int, ...], name: str) -> Plan:
    """A split into parts that one solver computes."""
    solver = solvers.get(split)
    assert isinstance(solver, Split)
    made = solver.children(p, Config(sizes=sizes))
    children = tuple(leaf(part.problem, name) for part in made if part.problem is not None)
    return Plan(p.key, split, solver.version, Config(sizes=sizes), children, (1,) * len(children))


def check(plan: Plan, p: ConvProblem) -> None:
    """Compute by ``plan``, into a given result and into a new one, and compare both with float64."""
    (a, b), bias, residual, out = make_operands(p), make_bias(p), make_residual(p), make_result(p)
    want = p.reference(a, b)
    want = want if bias is None else want + bias.double().view(-1, 1, 1)
    want = activated(want if residual is None else want + residual, p.activation)
    bound = execute.bind(plan, p, a, b, out)
    assert bound(a, b, bias, out, residual) is out
    assert toys.distance(out, want) < 2e-6
    assert toys.distance(bound(a, b, bias, residual=residual), want) < 2e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "view"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_or_a_pass_behind_it_finishes(name: str, layout: str) -> None:
    for bias, residual, activation in itertools.product((False, True), (False, True), ("none", "relu", "gelu")):
        p = replace(P, bias=bias, residual=residual, activation=activation, layouts=(layout,) * 3)
        check(leaf(p, name), p)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(("split", "sizes"), [("micro_batch", (3, 2)), ("partition", (3, 2)),
                                              ("output_channels", (8, 8))])  # fmt: skip
def test_parts_are_finished(split: str, sizes: tuple[int, ...], name: str, constant: bool) -> None:
    p = replace(P, constant_weight=constant)
    check(parts(p, split, sizes, name), p)


def test_rows_of_an_image_are_finished() -> None:
    check(parts(P, "space_tile", (5, 4), "fused_lowering"), P)


def test_who_finishes() -> None:
    p = replace(P, activation="none")
    assert execute.finishes(leaf(p, "onednn_fused"), p)
    assert not execute.finishes(leaf(p, "aten"), p)
    assert not execute.finishes(leaf(P, "onednn_fused"), P)
    assert execute.finishes(parts(p, "micro_batch", (3, 2), "onednn_fused"), p)
    assert execute.finishes(parts(p, "partition", (3, 2), "onednn_fused"), p)


@pytest.mark.parametrize("activation", ["relu", "relu6", "hardsigmoid", "clamp:-1.0:1.0", "leaky_relu:0.0", "hardswish"])  # fmt: skip # noqa: E501
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("groups", [1, 16])
def test_no_solver_cuts_off_nan(groups: int, layout: str, activation: str) -> None:
    """A filter with NaN, as of a norm with broken statistics, shows in the result, whoever applies the activation."""
    p = replace(toys.small(batch=1, channels=16, size=9), bias=True, activation=activation, groups=groups,
                constant_weight=True, layouts=(layout,) * 3)  # fmt: skip
    (a, b), bias, out = make_operands(p), make_bias(p), make_result(p)
    b[3] = float("nan")
    tried = set()
    for solver in solvers.solving(p):
        if not isinstance(solver, Split) and not solver.why_not(p) and list(solver.configs(p)):
            execute.bind(leaf(p, solver.name), p, a, b, out)(a, b, bias, out)
            assert out[:, 3].isnan().all(), solver.name
            assert not out[:, 4:].isnan().any(), solver.name
            tried.add(solver.name)
    assert {"aten", "onednn_fused"} <= tried


def test_a_residual_that_does_not_fit_is_refused() -> None:
    (a, b), bias, residual, out = make_operands(P), make_bias(P), make_residual(P), make_result(P)
    assert residual is not None
    bound = execute.bind(leaf(P, "aten"), P, a, b, out)
    for wrong in (None, residual[:1], residual.double(), out):
        with pytest.raises(ValueError, match=r"residual.*would do"):
            bound(a, b, bias, out, wrong)
    plain = replace(P, residual=False)
    with pytest.raises(ValueError, match="none would do"):
        execute.bind(leaf(plain, "aten"), plain, a, b)(a, b, bias, residual=residual)


def test_a_residual_that_lies_otherwise_is_copied() -> None:
    (a, b), bias, residual = make_operands(P), make_bias(P), make_residual(P)
    assert residual is not None
    bound = execute.bind(leaf(P, "onednn_fused"), P, a, b)
    want = bound(a, b, bias, residual=residual)
    turned = residual.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(bound(a, b, bias, residual=turned), want, rtol=0, atol=0)
