"""Every solver against float64, generated from what it declares: a new solver file is covered with no edit here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from tests.reference import convolve
from tests.strategies import allocate, described, fill, problems, with_memory

from tilewise.machine.device import device_name
from tilewise.machine.torch_state import fp32_precision
from tilewise.plan import Config
from tilewise.problems.activations import activated, activation_name
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers import Solver, SolverUnavailable, Split, solving

LEAVES = [solver for solver in solving(ConvProblem) if not isinstance(solver, Split)]
PLAIN, FULL = 3, 2
"""Problems of a case that only set their result, and those that do all at once that the solver can."""
CONFIGS = 3
GUARD = 512
TYPES = ("fp32", "fp16", "bf16")
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SELDOM = {("winograd_last", 1)}
"""Solvers and dimensions that take so few of the problems drawn here that at times none is found.

Tests of their own draw what they take."""
Memory = tuple[tuple[str, int], ...]


def cases(solvers: Iterable[Solver] = ()) -> list[object]:
    """Every device, pass, dimension, type and precision of every solver; of several types the most exact first."""
    found = []
    for solver in solvers or solving(ConvProblem):
        if isinstance(solver, Split):
            continue
        each = itertools.product(
            sorted(solver.devices), sorted(solver.passes, key=lambda x: x.value), sorted(solver.dims),
            sorted(solver.dtypes, key=TYPES.index),
        )  # fmt: skip
        for device, pass_, dims, dtype in each:
            if solver.baseline and dtype != "fp32":
                continue  # torch's own 16-bit arithmetic is not ours to vouch for: oneDNN errs in rare shapes
            marks = [pytest.mark.gpu] if device == "cuda" else []
            if device == "cpu" and (reason := lacking(solver, pass_, dtype)):
                marks.append(pytest.mark.skip(reason=reason))
            precisions = ("ieee", "tf32") if device == "cuda" and dtype == "fp32" else ("ieee",)
            for precision in precisions:
                if lacks(solver, pass_, dims, dtype, precision, device) or (solver.name, dims) in SELDOM:
                    continue
                name = f"{solver.name}-{pass_.value}-{dims}d-{dtype}-{precision}-{device}"
                found.append(pytest.param(solver, pass_, dims, dtype, precision, device, id=name, marks=marks))
    return found


def lacking(solver: Solver, pass_: Pass, dtype: str = "fp32") -> str:
    """What this machine's processor lacks for every problem of ``solver`` in a type; empty where it lacks nothing."""
    p = ConvProblem(pass_, 2, 32, 32, (Axis(8, 1), Axis(8, 1)), dtype=dtype)
    return next((reason for reason in solver.why_not(p) if "this processor" in reason), "")


def lacks(solver: Solver, pass_: Pass, dims: int, dtype: str, precision: str, device: str) -> bool:
    """Whether it refuses a product of matrices for its precision alone: then there is nothing to draw."""
    p = ConvProblem(pass_, 2, 8, 8, (Axis(4, 1),) * dims, dtype=dtype, device=f"{device}:any", precision=precision)
    return any(f"not with precision {precision}" in reason for reason in solver.why_not(p))


def error_bound(solver: Solver, p: ConvProblem) -> float:
    return solver.error_bound[p.precision] if p.dtype == "fp32" else 4 * ROUNDING[p.dtype]


def poisoned(size: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A workspace of exactly ``size`` bytes in which every number is NaN, and the buffer that holds it and a guard."""
    buffer = torch.full((size + GUARD + 256,), 0xFF, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % 256
    buffer = buffer[start : start + size + GUARD]
    return (buffer[:size] if size else None), buffer


def biases(p: ConvProblem) -> list[torch.Tensor]:
    """The bias of a problem that has one, behind elements that are none of it."""
    if not p.bias:
        return []
    whole = torch.empty(p.shape(p.result)[1] + 3, dtype=p.torch_dtype(p.result), device=p.device_type)
    fill(whole, 4)
    return [whole[3:]]


def plus_bias(p: ConvProblem, result: torch.Tensor) -> torch.Tensor:
    """``result`` and the bias of a problem that has one."""
    for bias in biases(p):
        result = result + bias.to(result.device, result.dtype).view(-1, *[1] * p.dims)
    return result


def named(kinds: Iterable[str]) -> list[str]:
    """The names of activations of these kinds, with some parameters, and that of none."""
    parameters = {"leaky_relu": (0.2,), "clamp": (-0.5, 0.75)}
    return ["none", *(activation_name(kind, *parameters.get(kind, ())) for kind in sorted({*kinds} - {"none"}))]


def compute(
    solver: Solver,
    p: ConvProblem,
    c: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    residuals: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """What the executor does for a leaf, in its plainest form."""
    dense = "channels_last" if p.layout(p.result) == "channels_last" else "contiguous"
    target: torch.Tensor | None = out
    if solver.own_output:
        target = None
    elif p.layout(p.result) == "view" and not solver.writes_views:
        strides = dense_strides(p.shape(p.result), dense)
        target = torch.full_like(out, math.nan).as_strided(out.shape, strides)
    example = None if target is None else torch.empty_strided(target.shape, target.stride(), dtype=target.dtype,
                                                              device="meta")  # fmt: skip
    run = solver.bind(p, c, a, b, example)
    workspace, buffer = poisoned(solver.workspace(p, c), a.device)
    constant = solver.constant(p, c) if p.constant_weight else 0
    kept, kept_buffer = poisoned(constant, a.device)
    if kept is not None and (pack := solver.pack(p, c, b)) is not None:
        b = pack(b)
    elif kept is not None:
        solver.prepare(p, c, b)(b, kept, workspace)
        buffer.fill_(0xFF)  # what is in the workspace is not kept
        b = kept
    result = run(a, b, target, workspace, *biases(p), *residuals)
    assert bool((buffer[-GUARD:] == 0xFF).all()), "wrote past its workspace"
    assert bool((kept_buffer[-GUARD:] == 0xFF).all()), "wrote past what it keeps"
    if target is out:
        assert result.data_ptr() == out.data_ptr()
    else:
        out.copy_(result)
    return out


def check(solver: Solver, p: ConvProblem, c: Config, forms: Memory, accumulate: bool) -> bool:
    """Whether the config can be bound: on a CPU every one, on a GPU a library or a compiler may refuse some."""
    device = torch.device(p.device_type)
    roles = dict(zip(ROLES, forms, strict=True))
    a, b = (allocate(p.shape(r), p.torch_dtype(r), device, *roles[r])[0] for r in p.operands)
    out, base = allocate(p.shape(p.result), p.torch_dtype(p.result), device, *roles[p.result])
    fill(a, 1)
    fill(b, 2)
    want = convolve(p, a.cpu(), b.cpu())
    scale = convolve(p, a.cpu().double() ** 2, b.cpu().double() ** 2).sqrt()
    if accumulate:
        fill(out, 3)
        want += out.cpu().double()
        scale += out.cpu().double().abs()
    want = plus_bias(p, want)
    for bias in biases(p):
        scale += bias.cpu().double().abs().view(-1, *[1] * p.dims)
    residuals = [allocate(p.shape(p.result), out.dtype, device, *roles[p.result])[0]] if p.residual else []
    for residual in residuals:
        fill(residual, 5)
        want += residual.cpu().double()
        scale += residual.cpu().double().abs()
    want = activated(want, p.activation)
    scale += float(activated(torch.zeros(1, dtype=torch.float64, device="cpu"), p.activation).abs())
    written = torch.zeros_like(base, dtype=torch.bool)
    written.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    try:
        got = compute(solver, p, c, a, b, out, residuals)
    except SolverUnavailable:
        if p.device_type == "cpu":
            raise
        return False
    assert bool(base[~written].isnan().all()), "wrote outside its result"
    assert bool(got.isfinite().all()), f"{c}: left NaN in {int((~got.isfinite()).sum())} of {got.numel()} elements"
    error = float((got.cpu().double() - want).norm())
    assert error <= error_bound(solver, p) * float(scale.norm()), f"{c}: error {error / float(scale.norm()):.1e}"
    return True


@pytest.mark.sampled(0, each=("solver", "device", "pass_", "dims"))
@pytest.mark.parametrize(("solver", "pass_", "dims", "dtype", "precision", "device"), cases())
def test_a_solver_computes_what_it_supports(
    solver: Solver, pass_: Pass, dims: int, dtype: str, precision: str, device: str
) -> None:
    exercise(solver, pass_, dims, dtype, precision, device)


def exercise(
    solver: Solver,
    pass_: Pass,
    dims: int,
    dtype: str,
    precision: str,
    device: str,
    phases: tuple[Phase, ...] = tuple(Phase),
) -> None:
    """Problems that it supports, on memory of every form; those of a case that set their result, then the others.

    What a solver can do beside that is never left to chance: in each case it adds into a result, adds a bias, takes a
    weight as constant and has several groups, as far as it can.
    """
    name = device_name(device)
    bound: list[bool] = []
    with fp32_precision(device, "conv", precision):  # what torch's own solver heeds
        for full, count in ((False, PLAIN), (True, FULL)):
            limits = settings(
                max_examples=count,
                suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
                phases=phases,
            )
            try:
                limits(_drawn(solver, problems(pass_, dims, dtype, name, precision, grouped=full), full, bound))()
            except Unsatisfiable:
                # It takes one group alone; or its memory is rare among what is drawn for each tensor by itself.
                limits(_drawn(solver, problems(pass_, dims, dtype, name, precision), full, bound, alike=not full))()
        for p, forms in _telling(solver, pass_, dims, dtype, precision, name):
            c = next(iter(solver.configs(p)))
            bound.append(check(solver, p, c, forms, accumulate=False))
    assert any(bound), f"{solver.name} could bind no config of {len(bound)}"


TELLING: tuple[tuple[tuple[Axis, ...], str], ...] = (
    ((Axis(8, 2, 1, 2, 1, 1), Axis(8, 3, 1, 2, 2, 2), Axis(8, 3, 2, 2, 1, 1)), "contiguous"),
    ((Axis(7, 7, 1, 1, 3, 3), Axis(7, 7, 2, 1, 3, 3)), "contiguous"),
    ((Axis(8, 4, 1, 1, 1, 1), Axis(8, 2, 1, 1), Axis(8, 2, 2, 1)), "contiguous"),
    ((Axis(6, 3, 1, 1, 1, 1), Axis(6, 1), Axis(6, 3, 2, 1, 1, 1)), "channels_last"),
    ((Axis(9, 3, 2, 1, 1, 1), Axis(9, 4, 3, 1, 1, 1), Axis(9, 1, 2)), "contiguous"),
    ((Axis(8, 3, 1, 1, 0, 2), Axis(8, 3, 2, 1, 0, 1)), "contiguous"),
    ((Axis(7, 3, 1, 1, 1, 1), Axis(7, 1), Axis(7, 3, 2, 1, 1, 1)), "channels"),
)
"""Axes and memory that a few draws may miss: dilated ones, large kernels, even ones on even sizes; channels_last;
strides, uneven padding, and views of larger tensors."""
CHANNELS = ((3, 2, 4, 1), (3, 2, 4, 2), (3, 3, 3, 3))
"""Batch, channels before and after, groups: dense ones, some results of each channel, depthwise."""


def _telling(
    solver: Solver, pass_: Pass, dims: int, dtype: str, precision: str, device: str
) -> Iterator[tuple[ConvProblem, Memory]]:
    """Of each of :data:`TELLING`, with each of :data:`CHANNELS`, the first problem that the solver supports."""
    for (axes, form), (batch, into, outof, groups) in itertools.product(TELLING, CHANNELS):
        forms = ((form, 0),) * 3
        for axis in axes:
            p = ConvProblem(pass_, batch, into, outof, (axis,) * dims, groups, dtype=dtype, device=device,
                            precision=precision)  # fmt: skip
            meta = torch.device("meta")
            p = described(p, {role: allocate(p.shape(role), p.torch_dtype(role), meta, form, 0)[0] for role in ROLES})
            p = _supported(solver, p)
            if not solver.why_not(p):
                yield p, forms
                break


def _supported(solver: Solver, p: ConvProblem) -> ConvProblem:
    """``p``, with a constant filter where the solver takes no other."""
    kept = replace(p, constant_weight=True) if p.pass_ is not Pass.WGRAD else p
    return kept if solver.why_not(p) and not solver.why_not(kept) else p


def _drawn(
    solver: Solver, drawn: st.SearchStrategy[ConvProblem], full: bool, bound: list[bool], alike: bool = False
) -> Callable[[], None]:
    """A test of drawn problems that the solver supports; ``full``: each does all that it can do.

    With ``alike`` all tensors lie in memory alike.
    """

    def chosen(data: st.DataObject, what: str) -> bool:
        return full or data.draw(st.booleans(), what)

    @given(with_memory(drawn, lambda p: not solver.why_not(_supported(solver, p)), alike), st.data())
    def supported_problems(found: tuple[ConvProblem, Memory], data: st.DataObject) -> None:
        p, forms = _supported(solver, found[0]), found[1]
        weighs = p.pass_ is not Pass.WGRAD
        # Drawn first: what a library supports may turn out to be less once it was asked to build it.
        wide = data.draw(st.booleans(), "fp32 result")
        keeping = replace(p, constant_weight=weighs and (chosen(data, "constant weight") or p.constant_weight))
        p = p if solver.why_not(keeping) else keeping
        wider = replace(p, out_dtype="fp32")
        if wide and p.dtype != "fp32" and not solver.why_not(wider):
            p = wider
        p = replace(p, bias=solver.adds_bias and weighs and chosen(data, "bias"))
        adding = replace(p, accumulate=True)
        finishes = p.pass_ is Pass.FPROP and (solver.adds_residual or bool(solver.activations))
        accumulate = full and solver.accumulates and not solver.why_not(adding)
        if accumulate and not (finishes and data.draw(st.booleans(), "residual and activation")):
            p = adding
        elif finishes:
            accumulate = False
            p = replace(
                p,
                residual=solver.adds_residual and chosen(data, "residual"),
                activation=data.draw(st.sampled_from(named(solver.activations)), "activation"),
            )
        configs = list(solver.configs(p))
        assert configs, f"{solver.name} supports {p.key} and offers no config"
        assert len(set(configs)) == len(configs), "a config is offered twice"
        some = st.lists(st.sampled_from(configs), min_size=1, max_size=CONFIGS, unique=True)
        for c in data.draw(some, "configs"):
            here = replace(p, bias=p.bias and solver.does_add_bias(p, c))
            here = replace(here, residual=p.residual and solver.does_add_residual(here, c))
            here = here if solver.does_activate(here, c) else replace(here, activation="none")
            bound.append(check(solver, here, c, forms, accumulate))

    return supported_problems


@pytest.mark.parametrize("solver", LEAVES, ids=lambda s: s.name)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(found=with_memory(problems()))
def test_declarations_agree(solver: Solver, found: tuple[ConvProblem, Memory]) -> None:
    check_declarations(solver, found[0])


def check_declarations(solver: Solver, p: ConvProblem) -> None:
    """What is offered fits what is declared: configs survive their key, costs are positive, workspace is stable."""
    if solver.why_not(p):
        return
    for c in solver.configs(p):
        assert Config.from_key(c.key) == c
        assert solver.workspace(p, c) == solver.workspace(p, Config.from_key(c.key)) >= 0
        assert solver.hidden_workspace(p, c) >= 0
        cost = solver.cost(p, c)
        assert cost.flops >= 0
        assert cost.bytes > 0
        assert cost.kernels >= 0
        assert 0 < cost.efficiency <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("solver", [s for s in LEAVES if "cuda" in s.devices], ids=lambda s: s.name)
@pytest.mark.parametrize("pass_", list(Pass), ids=lambda x: x.value)
def test_nothing_is_allocated_beyond_what_is_declared(solver: Solver, pass_: Pass) -> None:
    """On a GPU the allocator tells: the peak of a run is the workspace and what is declared as hidden, no more."""
    if solver.baseline:
        pytest.skip("what torch's own choice takes is not declared")
    check_allocations(solver, pass_)


def check_allocations(solver: Solver, pass_: Pass) -> None:
    """Hold the peak of runs on a GPU to what ``solver`` declares."""
    device = torch.device("cuda")
    for p in typical(pass_, device_name(device)):
        if solver.why_not(p):
            continue
        a, b = (torch.randn(p.shape(role), device=device) for role in p.operands)
        out = torch.empty(p.shape(p.result), device=device)
        for c in itertools.islice(solver.configs(p), CONFIGS):
            try:
                run = solver.bind(p, c, a, b, out)
            except SolverUnavailable:
                continue
            workspace, buffer = poisoned(solver.workspace(p, c), device)
            run(a, b, out, workspace)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            run(a, b, out, workspace)
            grown = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            del buffer
            assert grown <= solver.hidden_workspace(p, c), f"{p.key} {c}"


def typical(pass_: Pass, device: str) -> list[ConvProblem]:
    """Layers large enough that library scratch shows."""
    return [
        ConvProblem(pass_, 16, 32, 64, (Axis(27, 5, 1, 1, 2, 2), Axis(27, 5, 1, 1, 2, 2)), device=device),
        ConvProblem(pass_, 16, 64, 64, (Axis(28, 1), Axis(28, 1)), device=device),
        ConvProblem(pass_, 4, 64, 64, (Axis(56, 7, 1, 1, 3, 3), Axis(56, 7, 1, 1, 3, 3)), 64, device=device),
        ConvProblem(pass_, 2, 8, 8, (Axis(4096, 129, 1, 1, 64, 64),), device=device),
        ConvProblem(pass_, 16, 32, 64, (Axis(4096, 101, 1, 1, 50, 50),), device=device),
        ConvProblem(pass_, 2, 8, 8, (Axis(16, 3, 1, 1, 1, 1),) * 3, device=device),
    ]
