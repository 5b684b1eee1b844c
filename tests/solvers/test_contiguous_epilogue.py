"""Bias, residual and activation in the CPU solvers of contiguous images, which finish results as they write them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.solvers.cpu_runs import at_once, check_followed
from tests.solvers.test_solvers import check, named

from tilewise import execute
from tilewise.plan import Config, Plan
from tilewise.problems.activations import CONV_ACTIVATIONS, activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import Solver, get
from tilewise.solvers.common.cpu_run import WIDEST

pytest.importorskip("numba")
NAMES = ("winograd", "fused_lowering")
LANES = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
BOUND = 1e-5
FORMS = ("contiguous", "channels_last", "channels", "space", "steps")
FEW = ("none", "relu", "hardswish", "clamp:-0.25:inf", "gelu")
"""Activations that are tried with everything else; all are tried once."""


def layer(batch: int, into: int, outof: int, *axes: Axis, groups: int = 1) -> ConvProblem:
    return ConvProblem(Pass.FPROP, batch, into, outof, axes, groups)


LINE = layer(3, 5, 19, Axis(53, 3, 1, 1, 1, 0))
PLANE = layer(2, 20, 35, Axis(13, 3, 1, 1, 1, 1), Axis(37, 3, 1, 1, -1, 2))
GROUPS = layer(1, 36, 46, Axis(9, 3, 1, 1, 1, 1), Axis(11, 5, 1, 1, 0, 3), groups=2)
VOLUME = layer(2, 6, 18, Axis(5, 3, 1, 1, 1, 1), Axis(6, 3, 1, 1), Axis(9, 3, 1, 1, 1, 0))
STRIDES = layer(2, 3, 17, Axis(45, 7, 2, 1, 3, 3), Axis(52, 5, 3, 2, 3, 2))
LAYERS = (LINE, PLANE, GROUPS, VOLUME)
"""One to three axes, tiles, vectors and blocks that are not full, padding of one side, cropping, groups."""
CASES = [*itertools.product(NAMES, LAYERS), ("fused_lowering", STRIDES)]


def case(value: object) -> str | None:
    return "x".join(str(axis.size) for axis in value.axes) if isinstance(value, ConvProblem) else None


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


def config(solver: Solver, p: ConvProblem) -> Config:
    """One whose blocks are small, so that some are not full; sums of lowered windows are of several parts."""
    c = next(iter(solver.configs(p)))
    return changed(c, channels=3, block=(2, 3, 10)) if solver.name == "fused_lowering" else changed(c, block=(2, 3))


def finished(p: ConvProblem, activation: str = "relu") -> ConvProblem:
    return replace(p, bias=True, residual=True, activation=activation)


def computed(solver: Solver, p: ConvProblem, c: Config, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The result, its place and the workspace full of NaN before; ``tensors`` are operands, result and what is added.

    They are laid out as is, and what is kept of a constant filter outlives the workspace.
    """
    a, b, out, *added = tensors
    space = torch.full((solver.workspace(p, c),), 0xFF, dtype=torch.uint8)
    run = solver.bind(p, c, a, b, out)
    if p.constant_weight:
        kept = torch.full((solver.constant(p, c),), 0xFF, dtype=torch.uint8)
        solver.prepare(p, c, b)(b, kept, space)
        b, space = kept, space.fill_(0xFF)
    return run(a, b, out.fill_(math.nan), space, *added)


def tensors_of(p: ConvProblem) -> list[torch.Tensor]:
    """Operands, result and what is added."""
    added = [tensor for tensor in (make_bias(p, 5), make_residual(p, 5)) if tensor is not None]
    return [*make_operands(p, 3), make_result(p), *added]


@pytest.mark.parametrize("constant", [False, True], ids=["filter", "constant"])
@pytest.mark.parametrize(("name", "p"), CASES, ids=case)
def test_all_that_may_follow(name: str, p: ConvProblem, constant: bool) -> None:
    """Any of bias, residual and activation, in any memory; nothing beside the results is written."""
    solver = get(name)
    p = replace(p, constant_weight=constant)
    forms = itertools.cycle(FORMS)
    for bias, residual, activation in itertools.product((False, True), (False, True), FEW[:3]):
        here = replace(p, bias=bias, residual=residual, activation=activation)
        c = config(solver, here)
        assert solver.does_activate(here, c) or activation == "none"
        assert solver.does_add_residual(here, c)
        check(solver, here, c, (("contiguous", 0), ("contiguous", 0), (next(forms), 3)), accumulate=False)


@pytest.mark.parametrize("activation", [*named(CONV_ACTIVATIONS), "clamp:-0.25:inf"])
@pytest.mark.parametrize("name", NAMES)
def test_every_activation(name: str, activation: str) -> None:
    solver, p = get(name), finished(PLANE, activation)
    for c in (next(iter(solver.configs(p))), config(solver, p)):
        check_followed(solver, p, c, BOUND)


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize(("name", "p"), CASES, ids=case)
def test_the_bits_are_those_of_a_pass_behind(name: str, p: ConvProblem, activation: str) -> None:
    solver, p = get(name), finished(p, activation)
    plain = replace(p, residual=False, activation="none")
    c, tensors = config(solver, p), tensors_of(p)
    before = computed(solver, plain, c, tensors[:-1]).clone()
    got = computed(solver, p, c, tensors)
    assert torch.equal(got, activated(before + tensors[-1], activation))


@pytest.mark.parametrize("p", [PLANE, VOLUME], ids=case)
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_any_order(name: str, p: ConvProblem) -> None:
    """Rows, columns or channels innermost, and none of them; the residual lies as the result does."""
    solver, p = get(name), finished(p)
    a, b, out, bias, residual = tensors_of(p)
    c = config(solver, p)
    want = computed(solver, p, c, [a, b, out, bias, residual]).clone()
    for order in itertools.permutations(range(p.dims + 2)):
        back = np.argsort(order).tolist()
        there, added = (t.permute(order).contiguous().permute(back) for t in (out, residual))
        assert torch.equal(computed(solver, p, c, [a, b, there, bias, added]), want), order
    there, added = (torch.zeros(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t) for t in (out, residual))
    assert torch.equal(computed(solver, p, c, [a, b, there, bias, added]), want)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize(("name", "p"), CASES, ids=case)
def test_vectors_of_other_machines(name: str, p: ConvProblem, lanes: int) -> None:
    solver = get(name)
    for activation in FEW:
        here = finished(p, activation)
        c = changed(config(solver, here), lanes=lanes)
        if name == "fused_lowering":
            c = changed(c, tile=(2, 6))
        check_followed(solver, here, c, BOUND)


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", named(CONV_ACTIVATIONS))
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays(name: str, activation: str, form: str) -> None:
    """In a filter, a bias or a residual it shows in what it belongs to, and nowhere else."""
    solver, p = get(name), replace(finished(PLANE, activation), layouts=("contiguous", "contiguous", form))
    a, b, out, bias, residual = tensors_of(p)
    b[2, 4, 1, 1] = bias[3] = residual[1, 34, 12, 35] = residual[0, 7, 0, 0] = math.nan
    want = torch.zeros(p.shape("y"), dtype=torch.bool)
    want[:, 2] = want[:, 3] = want[1, 34, 12, 35] = want[0, 7, 0, 0] = True
    assert torch.equal(computed(solver, p, config(solver, p), [a, b, out, bias, residual]).isnan(), want)


@pytest.mark.parametrize("name", NAMES)
def test_infinities_are_those_of_torch(name: str) -> None:
    solver = get(name)
    for activation in ("relu", "clamp:-0.25:inf", "leaky_relu:0.1", "relu6"):
        p = finished(PLANE, activation)
        a, b, out, bias, residual = tensors_of(p)
        residual[0, 1, 2, 3], residual[1, 2, 3, 4] = math.inf, -math.inf
        got = computed(solver, p, config(solver, p), [a, b, out, bias, residual])
        want = activated(residual[[0, 1], [1, 2], [2, 3], [3, 4]], activation)
        assert torch.equal(got[[0, 1], [1, 2], [2, 3], [3, 4]], want)


@pytest.mark.parametrize("constant", [False, True], ids=["filter", "constant"])
@pytest.mark.parametrize(("name", "p"), CASES, ids=case)
def test_it_takes_no_further_memory(name: str, p: ConvProblem, constant: bool) -> None:
    solver, p = get(name), replace(p, constant_weight=constant)
    followed = finished(p)
    for c in solver.configs(p):
        assert solver.workspace(followed, c) == solver.workspace(p, c)
        assert solver.constant(followed, c) == solver.constant(p, c)
    assert list(solver.configs(followed)) == list(solver.configs(p))


@pytest.mark.parametrize("constant", [False, True], ids=["filter", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_needs_no_pass_behind_it(name: str, constant: bool) -> None:
    """Also where the weight changes between calls."""
    solver, p = get(name), replace(finished(PLANE), constant_weight=constant)
    plan = Plan(p.key, name, solver.version, config(solver, p))
    assert execute.finishes(plan, p)
    a, b, _, bias, residual = tensors_of(p)
    bound = execute.bind(plan, p, a, b)
    for _ in range(2):
        want = activated(p.reference(a, b) + bias.double().view(-1, 1, 1) + residual.double(), p.activation)
        got = bound(a, b, bias, residual=residual)
        assert float((got.double() - want).norm() / want.norm()) <= BOUND
        b.mul_(-2)


@pytest.mark.parametrize("name", NAMES)
def test_several_callers_at_once(name: str) -> None:
    """Each with a residual of its own."""
    solver, p = get(name), finished(PLANE)
    c, (a, b, out, bias, residual) = config(solver, p), tensors_of(p)
    run = solver.bind(p, c, a, b, out)
    want = computed(solver, p, c, [a, b, out, bias, residual]).clone()

    def call() -> torch.Tensor:
        space = torch.empty(solver.workspace(p, c), dtype=torch.uint8)
        return run(a, b, make_result(p), space, bias, residual.clone())

    assert all(torch.equal(got, want) for got in at_once(call, 4, 5))
