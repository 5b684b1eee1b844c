"""Every solver of recurrent layers against float64, and layers as modules call them against torch's autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.recurrent import called, layers, module_of

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.planner.gate import is_offered
from tilewise.problems.recurrent.checks import dense_operands, errors_of
from tilewise.problems.recurrent.packing import packing_of
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import Solver, SolverUnavailable, Split, get, solving
from tilewise.solvers.recurrent import stepped
from tilewise.solvers.recurrent._layers import StackedLayers

# torch lays the weights of its bf16 layers in one piece nowhere, and warns of that once.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
LEAVES: list[Any] = [solver for solver in solving(RecurrentProblem) if not isinstance(solver, Split)]
BOUND = {"fp32": 3e-6, "fp16": 0.01, "bf16": 0.08}
CONFIGS = 4


def unavoidable(p: RecurrentProblem) -> float:
    """The L2 error that any way of computing ``p`` may have.

    Results of a few numbers may all be small, and a ReLU's gradient jumps: torch's own way has no more digits then. Nor
    has an exact one whose operands are off by what rounding an intermediate result does, two units in the last place.
    """
    torchs = get("aten_rnn").bind(p, Config(), *dense_operands(p, 5), *(None for _ in p.results))

    def by_torch(*tensors: Any) -> Any:
        return torchs(*tensors[: len(p.operands)], *(None for _ in p.results), None)

    def of_others(*tensors: Any) -> Any:
        operands = tensors[: len(p.operands)]
        shares = (2 * torch.finfo(t.dtype).eps * (2 * torch.randint_like(t, 2) - 1) for t in operands)
        return tuple(t.float() for t in p.reference(*(t * (1 + s) for t, s in zip(operands, shares, strict=True))))

    return max(errors_of(p, by_torch).l2, errors_of(p, of_others).l2)


def cases() -> list[Any]:
    """Every device and type of every solver."""
    return [
        pytest.param(solver, dtype, device, id=f"{solver.name}-{dtype}-{device}",
                     marks=[pytest.mark.gpu] if device == "cuda" else [])
        for solver in LEAVES for device in sorted(solver.devices) for dtype in sorted(solver.dtypes)
    ]  # fmt: skip


@pytest.mark.parametrize(("solver", "dtype", "device"), cases())
def test_a_solver_computes_what_it_supports(solver: Solver, dtype: str, device: str) -> None:
    name = device if device == "cpu" else device_name(torch.device("cuda"))
    computes(solver, dtype, layers(dtype=dtype, device=name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("solver", "dtype", "device"), [each for each in cases() if each.values[0].projects])
def test_a_solver_projects_the_states_of_an_lstm(solver: Solver, dtype: str, device: str) -> None:
    name = device if device == "cpu" else device_name(torch.device("cuda"))
    computes(solver, dtype, layers(dtype=dtype, device=name, cell="lstm", batch=3, hidden=9, projection=4), 4)


def test_solvers_without_projections_say_so() -> None:
    p = RecurrentProblem("lstm", 3, 2, 4, 6, projection=2)
    for solver in LEAVES:
        assert solver.projects or any("projection=2" in reason for reason in solver.why_not(p)), solver.name


def computes(solver: Any, dtype: str, drawn_layers: st.SearchStrategy[RecurrentProblem], examples: int = 30) -> None:
    """Compare drawn layers of a type with float64."""
    bound = []

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(data=st.data(), p=drawn_layers)
    def drawn(data: st.DataObject, p: RecurrentProblem) -> None:
        if solver.why_not(p):
            return
        configs = list(solver.configs(p))[:CONFIGS]
        if not configs:
            return
        c = data.draw(st.sampled_from(configs))
        if solver.by_blocks and p.time > 1 and data.draw(st.booleans(), "by blocks"):
            c = Config(**c, block=data.draw(st.integers(1, p.time - 1), "block"))
            if solver.moves_to_host and p.device_type == "cuda" and p.task == "training" and data.draw(st.booleans()):
                c = Config(**c, host=1)
        operands = dense_operands(p, 5)
        try:
            run = solver.bind_checked(p, c, *operands, *(None for _ in p.results))
        except SolverUnavailable:
            assert p.device_type == "cuda"
            return
        bound.append(p)

        def compute(*tensors: Any) -> Any:
            count = len(p.operands)
            before = [t.clone() for t in tensors[:count]]
            results = run(*tensors[:count], *(None for _ in p.results), None)
            for role, t, old in zip(p.operands, tensors, before, strict=False):
                assert torch.equal(t, old), f"wrote its operand {role}"
            for role, t in zip(p.results, results, strict=True):
                assert tuple(t.shape) == p.shape(role), role
                assert t.dtype is p.torch_dtype(role), role
                assert t.is_contiguous(), role
            return results

        jumps = p.cell == "rnn_relu" and p.task == "training" and dtype != "fp32"
        bound_here = 0.5 if jumps else BOUND[dtype]
        with p.flags(deterministic=False):
            error = errors_of(p, compute)
            if error.l2 > bound_here:
                bound_here = max(bound_here, 5 * unavoidable(p))
        assert error.l2 <= bound_here, f"{p.key} {c}: {error}"

    drawn()
    assert bound, "nothing was drawn that it can solve"


@pytest.mark.parametrize("solver", LEAVES, ids=lambda s: s.name)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(p=layers())
def test_declarations_agree(solver: Solver, p: RecurrentProblem) -> None:
    if solver.why_not(p):
        return
    for c in [*solver.configs(p), *(c for c, _ in solver.offers(p, 1000))]:
        assert Config.from_key(c.key) == c
        assert solver.workspace(p, c) >= 0
        assert solver.hidden_workspace(p, c) >= 0
        cost = solver.cost(p, c)
        assert cost.flops >= p.flops
        assert 0 < cost.efficiency <= 1


@pytest.mark.parametrize("name", ["aten_rnn", "stepped"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), p=layers(dtype="fp32", task="training"))
def test_gradients_that_are_needed_are_those_of_autograd(name: str, data: st.DataObject, p: RecurrentProblem) -> None:
    """A layer by itself: gradients of some results may be missing, and only some operands need theirs."""
    operands = dict(zip(p.operands, dense_operands(p, 2), strict=True))
    weights = tuple(operands[role] for role in p.weights)
    ends = ["y", "hn", "cn"] if p.cell == "lstm" else ["y", "hn"]
    given_ends = data.draw(st.sets(st.sampled_from(ends), min_size=1), "gradients of")
    begins = ("x", "h0", "c0", *p.weights)
    needed = data.draw(st.sets(st.sampled_from(begins)), "needed")
    dropout = data.draw(st.sampled_from((0.0, 0.5)), "dropout") if p.layers > 1 else 0.0

    module = module_of(p, weights, dropout)
    leaves = {r: operands[r].clone().requires_grad_() for r in ("x", "h0", "c0") if r in operands}
    torch.manual_seed(7)
    packing = packing_of(p) if p.packed else None
    y, last = called(module, leaves["x"], (leaves["h0"], leaves["c0"]) if "c0" in leaves else leaves["h0"], packing)
    results = dict(zip(ends, (y, *last) if isinstance(last, tuple) else (y, last), strict=True))
    of = dict(zip(p.weights, module._flat_weights, strict=True)) | leaves
    wanted = torch.autograd.grad(
        [results[r] for r in ends if r in given_ends],
        list(of.values()),
        [operands[f"d{r}"] for r in ends if r in given_ends],
        allow_unused=True,
    )
    want = {r: torch.zeros_like(t) if g is None else g for (r, t), g in zip(of.items(), wanted, strict=True)}

    block = data.draw(st.integers(0, p.time - 1), "block") if name == "stepped" else 0
    layer = get(name).layer(p, Config(block=block) if block else Config())  # type: ignore[attr-defined]
    torch.manual_seed(7)
    with torch.no_grad():
        *got, saved = layer.forward(
            operands["x"], operands["h0"], operands.get("c0"), weights, dropout=dropout, packing=packing, keep=True
        )
        starts = [operands[f"d{r}"] if r in given_ends else None for r in ("y", "hn", "cn")]
        gradients = layer.backward(saved, weights, *starts, [r in needed for r in begins])
    for role, value in zip(ends, got, strict=False):
        torch.testing.assert_close(value, results[role].detach(), rtol=1e-4, atol=1e-5)
    assert len(gradients) == len(begins)
    for role, gradient in zip(begins, gradients, strict=True):
        if role in needed and role in want:
            assert gradient is not None, role
            torch.testing.assert_close(gradient, want[role], rtol=1e-3, atol=1e-4)
        else:
            assert gradient is None, role


@settings(max_examples=30, deadline=None)
@given(data=st.data(), p=layers(dtype="fp32", task="training"))
def test_packed_batches_run_in_parts_in_which_no_sequence_ends(data: st.DataObject, p: RecurrentProblem) -> None:
    """By steps that take dense batches alone, as kernels may."""
    least = p.time + p.batch - 1
    p = replace(p, packed=data.draw(st.integers(least, p.time * p.batch), "packed"))
    block = data.draw(st.integers(0, p.time - 1), "block")
    packing, operands = packing_of(p), dense_operands(p, 4)
    named = dict(zip(p.operands, operands, strict=True))
    layer = StackedLayers(p, stepped.recurrence(p), block=block)
    weights = [named[role] for role in p.weights]
    with torch.no_grad():
        *results, saved = layer.forward(
            named["x"], named["h0"], named.get("c0"), weights, packing=packing, keep=True
        )  # fmt: skip
        ends = [named.get(role) for role in ("dy", "dhn", "dcn")]
        gradients = layer.backward(saved, weights, *ends, [True] * (3 + len(weights)))
    found = [t for t in (*results, *gradients) if t is not None]
    for role, got, want in zip(p.results, found, p.reference(*operands), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4, msg=lambda text, r=role: f"{r}: {text}")


def test_what_is_dropped_follows_the_generator() -> None:
    p = RecurrentProblem("gru", 5, 3, 4, 6, layers=3)
    operands = dense_operands(p, 1)
    layer = get("stepped").layer(p, Config())  # type: ignore[attr-defined]
    x, h0, *weights = operands
    results = []
    for seed, keep in ((1, True), (1, False), (2, False)):
        torch.manual_seed(seed)
        results.append(layer.forward(x, h0, None, weights, dropout=0.5, keep=keep)[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    module = module_of(p, tuple(weights), 0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(results[0], module(x, h0)[0].detach())


@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm"])
def test_long_recurrences_stay_exact(cell: str) -> None:
    p = RecurrentProblem(cell, 300, 2, 3, 33, task="training")
    run = get("stepped").bind(p, Config())
    assert errors_of(p, run).l2 < 3e-6
    assert (
        errors_of(replace(p, task="inference"), get("stepped").bind(replace(p, task="inference"), Config())).l2 < 3e-6
    )


def of_blocks(p: RecurrentProblem, operands: Any, block: int, **options: Any) -> list[Any]:
    """Results and all gradients, by blocks of steps."""
    named = dict(zip(p.operands, operands, strict=True))
    weights = [named[role] for role in p.weights]
    layer = StackedLayers(p, stepped.recurrence(p), block=block, **options)
    with torch.no_grad():
        *results, saved = layer.forward(
            named["x"], named["h0"], named.get("c0"), weights, packing=packing_of(p) if p.packed else None, keep=True
        )  # fmt: skip
        ends = [named.get(role) for role in ("dy", "dhn", "dcn")]
        for _ in range(2):  # a graph may be gone back twice
            gradients = layer.backward(saved, weights, *ends, [True] * (3 + len(weights)))
    return [t for t in (*results, *gradients) if t is not None]


@settings(max_examples=5, deadline=None)
@given(data=st.data(), p=layers(task="training"))
def test_what_blocks_keep_on_the_host_is_what_they_compute_again(data: st.DataObject, p: RecurrentProblem) -> None:
    block, operands = data.draw(st.integers(1, p.time), "block"), dense_operands(p, 4)
    for got, want in zip(of_blocks(p, operands, block, on_host=True), of_blocks(p, operands, block), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [{}, {"steps": "replayed"}])
def test_on_a_gpu_what_blocks_keep_leaves_the_device(steps: dict[str, str]) -> None:
    p = RecurrentProblem(
        "lstm", 600, 64, 32, 128, layers=2, task="training", device=device_name(torch.device("cuda"))
    )  # fmt: skip
    solver: Any = get("stepped")
    operands = dense_operands(p, 1)
    found, peaks = [], []
    for c in (Config(**steps), Config(**steps, block=60, host=1), Config(**steps, block=60)):
        run = solver.bind(p, c)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = run(*operands, *(None for _ in p.results), None)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append(results)
        del results, run
    assert all(map(torch.equal, found[1], found[2]))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("name", ["stepped", "resident_rnn"])
@settings(max_examples=30, deadline=None)
@given(p=layers(dtype="fp32"), share=st.floats(0.01, 1.2))
def test_blocks_are_offered_under_a_limit(name: str, p: RecurrentProblem, share: float) -> None:
    solver: Any = get(name)
    if solver.why_not(p):
        return

    def needs(c: Config) -> int:
        return int(solver.workspace(p, c) + solver.hidden_workspace(p, c))

    whole = list(solver.configs(p))
    limit = int(share * min(map(needs, whole)))
    offered = [c for c, _ in solver.offers(p, limit)]
    assert [c for c in offered if "block" not in c] == whole
    blocks = [c for c in offered if "block" in c]
    assert all(is_offered(solver, p, c) for c in offered)
    assert all(is_offered(solver, p, Config(**{**c, "block": n})) == (n < p.time) for c in blocks for n in (1, p.time))
    for c in whole:
        own = [each for each in blocks if solver.like(each) == c]
        if needs(c) <= limit or p.time == 1:
            assert not own
        else:
            fitting = [each for each in own if needs(each) <= limit]
            assert fitting == own or own == [Config(**c, block=1)]
            sizes = [needs(Config(**c, block=n)) for n in range(1, p.time)]
            assert bool(fitting) or min(sizes) > limit or needs(own[0]) > limit


def test_on_a_gpu_blocks_are_offered_with_what_they_keep_on_the_host() -> None:
    p = RecurrentProblem("gru", 100, 8, 16, 64, task="training", device="cuda:Some GPU")
    solver: Any = get("stepped")
    limit = max(solver.hidden_workspace(p, c) for c in solver.configs(p)) - 1
    offered = [c for c, _ in solver.offers(p, limit)]
    moved = [c for c in offered if "host" in c]
    assert moved
    assert all("block" in c and solver.hidden_workspace(p, c) <= limit for c in moved)
    assert all(is_offered(solver, p, c) for c in moved)
    for other in (replace(p, task="inference"), replace(p, device="cpu")):
        assert not any("host" in c for c, _ in solver.offers(other, 1000))
        assert not any(is_offered(solver, other, c) for c in moved)
    assert not any(is_offered(solver, p, Config(**{**c, "host": 2})) for c in moved)
