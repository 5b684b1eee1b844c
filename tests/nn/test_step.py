"""A whole step under one limit of memory: counted by another counter, brought to its least, and without a trace."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.dividing import assert_same
from tests.sampling import EVERY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import solvers
from tilewise.execute import release_workspaces
from tilewise.machine.torch_state import BENCHMARK, setting
from tilewise.nn import StepTooLarge, report
from tilewise.nn.largest_batch import PLANNED, _largest, _narrowed
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.meter import CpuMeter, storage_bytes
from tilewise.nn.memory.step_planner import StepPlanner, memory_bytes, profile
from tilewise.nn.step.step import Step
from tilewise.plan import Config, Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.measuring.times import NOISE
from tilewise.problems.conv.problem import ConvProblem


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """One thread: many small steps would wait for each other's threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Lowering(Planner):
    """The same choice on every machine: lowered whole, by halves or image by image, each slower in less workspace."""

    def front(self, problem: ConvProblem, options: Options | None = None) -> tuple[Plan, ...]:
        n = problem.batch
        sizes = dict.fromkeys(((n,), (n // 2, n - n // 2), (1,) * n if n <= 8 else (n // 4,) * 3 + (n - n // 4 * 3,)))
        plans = [lowered(problem, each) for each in sizes if 0 not in each]
        limit = None if options is None else options.workspace
        return tuple(plan for plan in plans if limit is None or plan.workspace <= limit)

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        found = self.front(problem, options)
        if not found:
            raise NoPlanError("too little")
        return found[0]


def lowered(problem: ConvProblem, sizes: tuple[int, ...]) -> Plan:
    """Micro-batches of ``sizes``, each by the first config of ``lowering_type1``; more of them take longer."""
    solver = solvers.get("lowering_type1")
    if len(sizes) == 1:
        config = next(iter(solver.configs(problem)))
        size = solver.workspace(problem, config)
        return Plan(problem.key, solver.name, solver.version, config, time_ms=1.0, workspace=size)
    divider = solvers.get("micro_batch")
    assert isinstance(divider, solvers.Split)
    config = Config(sizes=sizes)
    parts = [part.problem for part in divider.children(problem, config)]
    children = tuple(lowered(part, (part.batch,)) for part in parts if part is not None)
    most = max(child.workspace for child in children)
    counts = (1,) * len(children)
    own = divider.name, divider.version, config, children, counts
    return Plan(problem.key, *own, time_ms=float(len(sizes)), workspace=most)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.norm = nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.third(x + self.norm(self.second(x)).relu()).mean((2, 3))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda t: self.first(t).relu().sigmoid(), x, use_reentrant=False)
        return self.second(x)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 4, 3, bias=False)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.body(x)}


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.twice(self.first(x).relu())
        return x, self.twice(x.relu())


NETWORKS = [Residual, Checkpointed, Dropping, Shared]


def example(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, x: torch.Tensor) -> None:
    """The step that ``optimize`` says it runs, in other words."""
    torch.stack([t.float().square().mean() for t in tree_leaves(model(x))]).sum().backward()
    model.zero_grad(set_to_none=True)


def counted(model: nn.Module, x: torch.Tensor, step: Callable[[nn.Module, torch.Tensor], None] = train) -> int:
    """Peak of the step by torch's other profiler, block by block, on top of what it starts with."""
    release_workspaces()
    held = storage_bytes([*model.parameters(), *model.buffers(), x])
    with torch.autograd.profiler.profile(profile_memory=True) as found:
        step(model, x)
        step(model, x)
    events, waiting = [], list(found.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    blocks: dict[int, int] = {}
    peak = now = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        now += size if size > 0 else -blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
        peak = max(peak, now)
    return held + peak


def limited(kind: type[nn.Module], limit: int | str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = tilewise.optimize(kind(), example(), memory_limit=limit, planner=Lowering(), **options)
    return model, dict(report(model).facts["step_memory"])


@functools.cache
def span(kind: type[nn.Module]) -> tuple[int, int]:
    """What the step needs at least, and takes where it may."""
    free = limited(kind, "1GiB")[1]
    return free["least"], free["peak"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=2)
@given(share=st.floats(-0.3, 1.1))
def test_the_step_keeps_its_limit_or_says_what_it_needs(kind: type[nn.Module], share: float) -> None:
    least, most = span(kind)
    assert least < most
    limit = int(least + share * (most - least))
    if limit < least:
        with pytest.raises(StepTooLarge, match=str(least)) as raised:
            limited(kind, limit)
        assert raised.value.least == least
        return
    model, facts = limited(kind, limit)
    assert facts["limit"] == limit
    assert counted(model, example()) + NOISE <= facts["peak"] <= limit
    assert all(one.replaced for _, _, one in report(model).passes())
    torch.manual_seed(0)
    want = kind()
    torch.manual_seed(1)
    first = tree_leaves(model(example()))
    torch.manual_seed(1)
    for got, own in zip(first, tree_leaves(want(example())), strict=True):
        assert_same(got, own)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", NETWORKS)
def test_what_it_needs_at_least_is_enough(kind: type[nn.Module]) -> None:
    least = span(kind)[0]
    assert limited(kind, least)[1]["peak"] <= least
    with pytest.raises(NoPlanError, match="at least"):
        limited(kind, least - 1)


@pytest.mark.slow
def test_more_memory_is_used_for_faster_plans() -> None:
    def time(model: nn.Module) -> float:
        return sum(one.plan.time_ms for _, _, one in report(model).passes() if one.plan is not None)

    free, facts = limited(Residual, "1GiB")
    lean, _ = limited(Residual, facts["least"])
    between, _ = limited(Residual, (facts["least"] + facts["peak"]) // 2)
    assert time(free) < time(between) < time(lean)


def test_each_layer_has_the_room_of_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a workspace goes when its kernel ends: early layers of one kind get more than those at the peak."""
    monkeypatch.setattr(CpuMeter, "keeps", False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)))
    x, planner = example(8), Lowering()
    facts = report(tilewise.optimize(model, x, memory_limit="1GiB", planner=planner)).facts["step_memory"]
    limit = max(m["alive"] + m["result"] for m in facts["moments"]) + facts["moments"][0]["workspace"] // 4
    asked = [limit - m["alive"] - m["result"] for m in facts["moments"] if m["pass"] == "fprop"]
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    tilewise.restore(model)
    plan_table = PlanTable(Options(), "torch", planner)
    step_planner = StepPlanner(
        Step(model, [x], None, training=True), modules, plan_table, {}, lambda _: None, limit, Weights.CHANGING
    )
    needs = profile(step_planner.step, modules, Weights.CHANGING)
    plan_table.plan([key[1] for key in needs.base()], False)
    step_planner._base, step_planner._grain = needs.base(), 0
    chosen = step_planner._chosen(limit, {})
    forward = [plan for (_, p, _), plan in chosen.items() if p.pass_.value == "fprop"]
    assert len({plan.workspace for plan in forward}) > 1
    for (name, p, _), plan in chosen.items():
        room = limit - step_planner._base[name, p, False]
        fitting = [one for one in planner.front(p) if one.workspace <= room]
        assert plan == (fitting[0] if fitting else planner.front(p)[-1])
    assert asked == sorted(asked, reverse=True)


class Ledger(TorchDispatchMode):
    """Live storages by weak references, operator by operator: another way to count what is alive."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen = {t.untyped_storage()._cdata: (weakref.ref(t.untyped_storage()), 0) for t in held}
        self.before: list[int] = []
        self.live: dict[int, int] = {}
        for t in held:
            self._track(t)

    def _track(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, storage._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.before.append(sum(self.live.values()))
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._track(t)
        return out


@pytest.mark.parametrize("kind", [Residual, Shared, Dropping])
def test_what_is_alive_is_what_is_alive(kind: type[nn.Module]) -> None:
    model, x = kind(), example()
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    step = Step(model, [x], None, training=True)
    needs = profile(step, modules, Weights.CHANGING)
    with Ledger(step.held()) as ledger:
        step()
    calls = [m for m in needs.moments if m.kernel.problem.pass_.value != "wgrad"]
    forward = [m.alive for m in calls if m.kernel.problem.pass_.value == "fprop"]
    assert len(forward) >= 2
    for got, want in zip(forward, ledger.before, strict=False):
        assert abs(got - want) <= 1024  # scalars that operators make for themselves


def test_layers_in_a_checkpoint_run_again_in_backward() -> None:
    _, facts = limited(Checkpointed, "1GiB")
    ran = [(m["layer"], m["pass"]) for m in facts["moments"]]
    assert ran == [
        ("first", "fprop"), ("second", "fprop"), ("second", "dgrad"), ("second", "wgrad"), ("first", "fprop"),
        ("first", "wgrad"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", NETWORKS)
def test_profile_and_plans_leave_no_trace(kind: type[nn.Module]) -> None:
    model, x = kind(), example()
    train(model, x)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    tilewise.optimize(model, x, memory_limit="1GiB", planner=Lowering())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is grad and bool((grad == 1).all()) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_step_of_ones_own() -> None:
    model, x = Residual(), example()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    tilewise.optimize(model, x, memory_limit="1GiB", memory_step=step, planner=Lowering())
    assert len(report(model).facts["step_memory"]["moments"]) == 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_is_older_than_the_recording_outlives_it() -> None:
    """A step of the caller's own drops gradients first. torch warns of these blocks, once in a process."""
    grads = [torch.zeros(1000, dtype=torch.float32, device="cpu")]
    grad, seen = weakref.ref(grads[0]), []

    def step() -> None:
        grads.clear()
        seen.append(grad() is not None)

    trace = CpuMeter(lambda: list(grads)).traced(lambda: None, step)
    assert seen == [True]
    assert trace.peak == 4000
    assert grad() is None


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_that_raises_midway(planned: bool) -> None:
    model, x = Residual(), example()
    if planned:
        tilewise.optimize(model, x, planner=Lowering())
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    state, calls = copy.deepcopy(model.state_dict()), []

    def step(model: nn.Module) -> None:
        loss = model(x).sum()
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("midway")
        loss.backward()

    with pytest.raises(KeyError, match="midway"):
        tilewise.optimize(model, x, memory_limit="1GiB", memory_step=step, planner=Lowering())
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert is_planned(model.first) is planned
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    train(model, x)


def test_inference_is_a_forward_alone() -> None:
    _, facts = limited(Residual, "1GiB", training=False)
    assert [m["pass"] for m in facts["moments"]] == ["fprop"] * 3


def test_the_planner_itself_keeps_a_limit() -> None:
    model, planner = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))), Planner()
    x = torch.randn(4, 4, 10, 10)
    options = {"planner": planner, "rigor": "estimate", "batch_sizes": "undivided"}
    facts = report(tilewise.optimize(model, x, memory_limit="1GiB", **options)).facts["step_memory"]
    model = tilewise.optimize(model, x, memory_limit=facts["least"], **options)
    assert counted(model, x) <= report(model).facts["step_memory"]["peak"] <= facts["least"]


@pytest.mark.parametrize("limit", ["0%", "101%", "x%", "many", -1, True, 1.5])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(ValueError, match="memory_limit="):
        tilewise.optimize(Residual(), example(), memory_limit=limit, planner=Lowering())


def test_a_share_is_of_the_machine() -> None:
    cpu = torch.device("cpu")
    assert 0 < memory_bytes("50%", cpu) <= memory_bytes("100%", cpu) // 2 + 1


def test_a_step_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_step"):
        tilewise.optimize(Residual(), example(), memory_step=print, planner=Lowering())


@given(
    st.integers(1, 1000), st.integers(0, 100_000), st.integers(1, 64), st.integers(0, 400_000),
)  # fmt: skip
def test_largest_is_the_largest(per_example: int, constant: int, grain: int, limit: int) -> None:
    seen = []

    def floor(batch: int) -> float:
        seen.append(batch)
        return constant + -(-batch * per_example // grain) * grain

    found, _ = _largest(floor, limit)
    assert found == 1 or floor(found) <= limit
    if floor(1) <= limit:
        assert floor(found + 1) > limit or len(set(seen)) >= 12
    assert len(set(seen)) <= 16


@given(st.integers(1, 400), st.integers(1, 1000), st.integers(0, 200), st.integers(0, 64))
def test_what_is_planned_narrows_to_the_largest(largest: int, per_example: int, coarse: int, beyond: int) -> None:
    """An excess that is too large by up to ``coarse`` examples hides no batch between two that were planned."""
    seen = []

    def excess(batch: int) -> int:
        seen.append(batch)
        over = (batch - largest) * per_example
        return over + coarse * per_example if over > 0 else min(0, over + coarse * per_example)

    found = _narrowed(excess, largest + beyond, per_example)
    assert found <= largest
    assert len(seen) == len(set(seen)) <= PLANNED
    bad = min((batch for batch in seen if batch > largest), default=None)
    if found and bad is not None and len(seen) < PLANNED:
        assert (found, bad) == (largest, largest + 1)


@pytest.mark.skipif(not EVERY, reason="plans whole steps for many batches: in make test-all")
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    model = Residual()
    limit = 5 << 18
    found = tilewise.largest_batch(model, example, limit, planner=Lowering())
    assert found.step["peak"] <= limit
    assert counted(model, example(found.batch)) <= limit
    assert found.image_ms == found.step_ms / found.batch > 0
    with pytest.raises(NoPlanError):
        tilewise.optimize(Residual(), example(found.batch + 2), memory_limit=limit, planner=Lowering())
    with pytest.raises(StepTooLarge):
        tilewise.largest_batch(model, example, 1000, planner=Lowering())


def on_gpu(limit: int | str, planner: Planner, batch: int = 512) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(batch, 3, 64, 64, device="cuda")
    tilewise.optimize(model, x, memory_limit=limit, planner=planner, rigor="estimate")
    return model, x, dict(report(model).facts["step_memory"])


@pytest.fixture
def _benchmark() -> Iterator[None]:
    with setting(BENCHMARK, True):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("_benchmark")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_the_step_keeps_its_limit_on_a_gpu(share: float) -> None:
    planner = Planner()
    model, x, free = on_gpu("50%", planner)
    del model, x
    limit = int(free["least"] + share * max(0, free["peak"] - free["least"]))
    before = torch.cuda.get_per_process_memory_fraction()
    model, x, facts = on_gpu(limit, planner)
    assert torch.cuda.get_per_process_memory_fraction() == before
    assert facts["peak"] <= limit
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() <= limit


@pytest.mark.gpu
def test_a_limit_that_nothing_keeps_on_a_gpu() -> None:
    with pytest.raises(StepTooLarge) as raised:
        on_gpu("1MiB", Planner())
    least = raised.value.least
    del raised  # its traceback holds the model and the images, which would count
    gc.collect()
    _, _, facts = on_gpu(least, Planner())
    assert facts["peak"] <= least
