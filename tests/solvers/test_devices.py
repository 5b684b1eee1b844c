"""Shares of a batch on several devices at once: right whatever runs beside them, in their threads, told and checked."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests import toys
from torch import nn

import tilewise
from tilewise import execute, solvers
from tilewise.execute import PlanMismatch, bind
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Config, Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.gate import why_unfit
from tilewise.planner.remembered import constraints_text
from tilewise.planner.search.leaves import OverLimit, check_declared
from tilewise.planner.search.sharing import device_shares
from tilewise.planner.search.sharing.balance import GAIN, balanced
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.shares import Shares, parts_of_size, shares_by
from tilewise.wisdom import Wisdom

devices = solvers.get("devices")
assert isinstance(devices, solvers.Split)
needs_threads = pytest.mark.skipif(not bounds_threads(), reason="torch's threads cannot be bounded here")
LEAVES = (
    toys.toy(name="writer"),
    toys.toy(name="adder", accumulates=True, adds_bias=True, scratch=513),
    toys.toy(name="giver", own_output=True, scratch=64),
)
some = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    execute.release_workspaces()


def plan_of(problem: ConvProblem, config: Config, names: Sequence[str]) -> Plan:
    """The plan that shares the batch as ``config`` says, with one solver of ``names`` for each part."""
    parts = devices.children(problem, config)
    leaves = tuple(
        toys.leaf(name, part.problem) for name, part in zip(names, parts, strict=True) if part.problem is not None
    )
    return Plan(problem.key, "devices", devices.version, config, leaves, (1,) * len(leaves))


@st.composite
def shares(draw: st.DrawFn, batch: int) -> Config:
    """Shares between the tensors' own device and the CPU, which may be the same: either may have nothing."""
    here = draw(st.integers(0, batch))
    cuts = draw(toys.cuts(batch - here)) if here < batch else ()
    return Shares(("here", "cpu"), ((here,) if here else (), tuple(cuts)), draw(st.integers(1, 3))).config()


@needs_threads
@some
@given(st.data())
def test_any_shares_give_the_reference(data: st.DataObject) -> None:
    """Views, odd batches and channels, 16-bit sums, biases, results that are added to or begin as NaN."""
    problem = data.draw(toys.problems(batch=(2, 7), dtypes=("fp32", "bf16")))
    config = data.draw(shares(problem.batch))
    a, b = toys.operands(problem)
    want = toys.reference(problem, a, b, 1.0, problem.bias)
    bias = toys.bias_of(problem) if problem.bias else None
    limit = 2 * toys.DTYPE_ERROR[problem.out_dtype]
    torch.set_num_threads(data.draw(st.sampled_from((1, 2, 3, 5))))
    with toys.installed(*LEAVES):
        count = len(devices.children(problem, config))
        names = [data.draw(st.sampled_from(LEAVES)).name for _ in range(count)]
        plan = plan_of(problem, config, names)
        toys.check_bound(plan, problem, a, b, bias, want, limit)


@needs_threads
@pytest.mark.parametrize("pass_", Pass)
def test_real_solvers_give_the_same_bits_on_changing_threads(pass_: Pass) -> None:
    problem = toys.small(pass_, 7, channels=16, size=9)
    config = Shares(("here", "cpu"), ((3,), (2, 2))).config()
    a, b = toys.operands(problem)
    bound = bind(plan_of(problem, config, ["aten"] * 3), problem, a, b)
    torch.set_num_threads(2)
    first = bound(a, b)
    assert toys.distance(first, problem.reference(a, b)) < 1e-5
    for threads in (1, 2, 4, 3):
        torch.set_num_threads(threads)
        again = bound(a, b)
        assert toys.distance(again, first.double()) < 1e-6
        assert torch.equal(bound(a, b), again)
    with torch.inference_mode():
        assert torch.equal(bound(a, b), again)


@needs_threads
def test_shares_are_computed_at_the_same_time_each_with_its_threads() -> None:
    meeting = threading.Barrier(2)
    seen: set[int] = set()

    class Meets(toys.Plain):
        name = "meets"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            meeting.wait(20)  # raises where the other one is not computing
            seen.add(torch.get_num_threads())
            return super().compute(p, a, b)

    problem = toys.small(batch=4)
    a, b = toys.operands(problem)
    with toys.installed(Meets()):
        config = Shares(("here", "cpu"), ((2,), (2,))).config()
        bound = bind(plan_of(problem, config, ["meets"] * 2), problem, a, b)
        torch.set_num_threads(4)
        assert toys.distance(bound(a, b), problem.reference(a, b)) < 1e-6
    assert seen == {2}
    assert torch.get_num_threads() == 4


@needs_threads
@pytest.mark.parametrize("bad", ["here", "cpu"])
def test_what_one_share_raises_is_raised_once_all_have_ended(bad: str) -> None:
    ended: list[int] = []

    class Slow(toys.Plain):
        name = "slow"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            ended.append(p.batch)
            return super().compute(p, a, b)

    class Fails(toys.Plain):
        name = "fails"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError(f"no {p.batch} images")

    problem = toys.small(batch=5)
    a, b = toys.operands(problem)
    with toys.installed(Slow(), Fails()):
        config = Shares(("here", "cpu"), ((3,), (2,))).config()
        names = ["fails", "slow"] if bad == "here" else ["slow", "fails"]
        bound = bind(plan_of(problem, config, names), problem, a, b)
        with pytest.raises(ArithmeticError, match="no 3 images" if bad == "here" else "no 2 images"):
            bound(a, b)
    assert ended == [2 if bad == "here" else 3]


@needs_threads
def test_an_interrupt_waits_for_shares_that_have_begun() -> None:
    """They write into the caller's memory: none may still do so when the caller goes on."""
    working: list[int] = []

    class Long(toys.Plain):
        name = "long"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            working.append(p.batch)
            for _ in range(20):
                time.sleep(0.01)
            working.remove(p.batch)
            return super().compute(p, a, b)

    problem = toys.small(batch=5)
    a, b = toys.operands(problem)
    with toys.installed(Long()):
        config = Shares(("here", "cpu"), ((3,), (2,))).config()
        bound = bind(plan_of(problem, config, ["long"] * 2), problem, a, b)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                bound(a, b)
            interrupt.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert not working
        assert toys.distance(bound(a, b), problem.reference(a, b)) < 1e-6


@needs_threads
def test_several_threads_may_call_one_plan() -> None:
    problem = toys.small(Pass.WGRAD, 6)
    a, b = toys.operands(problem)
    with toys.installed(*LEAVES):
        config = Shares(("here", "cpu"), ((3,), (2, 1))).config()
        bound = bind(plan_of(problem, config, ["adder"] * 3), problem, a, b)
        inputs = [(a * n, b) for n in range(1, 5)]
        wants = [problem.reference(*pair) for pair in inputs]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                for got, want in zip(pool.map(lambda pair: bound(*pair), inputs), wants, strict=True):
                    assert toys.distance(got, want) < 1e-6


def test_memory_is_told_for_each_device() -> None:
    """The workspace of the own share, and of the other device copies of two parts, the filter and its workspace."""
    problem = toys.small(batch=8)
    with toys.installed(toys.toy(name="needs", scratch=1000)):
        config = Shares(("here", "cpu"), ((3,), (2, 2, 1))).config()
        plan = plan_of(problem, config, ["needs"] * 4)
        bound = bind(plan, problem, *toys.operands(problem))
        image = problem.nbytes("x") // problem.batch
        copies = 2 * 2 * image + problem.nbytes("w") + 2 * 2 * image  # y is as large as x
        assert bound.workspace == 1000
        assert bound.workspaces == {"cpu": 1000 + 1000 + copies}
        check_declared(plan, problem, bound, 2000 + copies)
        with pytest.raises(OverLimit, match="the limit is"):
            check_declared(plan, problem, bound, 1999 + copies)


WRONG = {
    "devices": [3, "", "here; here", "here; cuda:0", "here; cuda:x=A", "here; cuda:0=", "here; gpu", "here"],
    "sizes": [(3, 4), (3, 5, 0), 8, (8,)],
    "owners": [(0, 0, 1), (1, 0, 0), (0, 2, 2), (0,), 0],
    "copiers": [0, -1, 1.0, 2**30, "1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_config_that_somebody_wrote_is_refused(name: str, value: Any) -> None:
    problem = toys.small(batch=8)
    config = Shares(("here", "cpu"), ((3,), (3, 2))).config()
    assert why_unfit(plan_of(problem, config, ["aten"] * 3), problem, Options(share_with=("cpu",))) == ""
    bad = Config(**{**config, name: value})
    with pytest.raises(ValueError, match=r"would do|must be positive|are tuples"):
        devices.children(problem, bad)
    plan = replace(plan_of(problem, config, ["aten"] * 3), config=bad)
    assert why_unfit(plan, problem, Options(share_with=("cpu",)))
    with pytest.raises(PlanMismatch):
        bind(plan, problem, *toys.operands(problem))


def test_a_plan_from_elsewhere_may_use_only_devices_that_were_asked_for() -> None:
    problem = toys.small(batch=8)
    plan = plan_of(problem, Shares(("here", "cpu"), ((5,), (3,))).config(), ["aten"] * 2)
    assert why_unfit(plan, problem, Options(share_with=("cpu",))) == ""
    reason = why_unfit(plan, problem, Options())
    assert reason == "its plan shares the batch with cpu, which share_with does not name"


def test_a_gpu_that_is_not_here_is_told() -> None:
    problem = toys.small(batch=8)
    config = Shares(("here", "cuda:77=NVIDIA Test"), ((5,), (3,))).config()
    with pytest.raises(ValueError, match=r"place='cuda:77=NVIDIA Test': this machine has \d+ GPUs"):
        devices.children(problem, config)
    with pytest.raises(ValueError, match=r"share_with: 'cuda:77' is not here, this machine has \d+ GPUs; cpu would do"):
        Planner(Wisdom(None)).plan(problem, Options(share_with=("cuda:77",)))


@pytest.mark.parametrize(
    "given", ["cpu", 3, ("gpu",), ("cuda:x",), ("cuda:-1",), (1,), ("cpu", "cpu"), ("cuda", "cuda:0")]
)
def test_options_check_the_names_of_devices(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^share_with.* would do"):
        Options(share_with=given)


def test_options_keep_the_order_of_devices() -> None:
    assert Options(share_with=["cuda", "cpu", "cuda:3"]).share_with == ("cuda:0", "cpu", "cuda:3")  # type: ignore[arg-type]
    told = constraints_text(Options(share_with=("cpu", "cuda:1")))
    assert told.endswith(" share_with=cpu,cuda:1")
    assert "share_with" not in constraints_text(Options())


@some
@given(here=st.floats(0.05, 1.0), there=st.floats(0.05, 1.0), start=st.integers(0, 256), fixed=st.floats(0.0, 20.0))
def test_the_division_in_which_both_end_together_is_met(here: float, there: float, start: int, fixed: float) -> None:
    """The other device takes a time of its own at first, and then so much for each image."""
    whole = 256

    def time_of(images: tuple[int, ...]) -> float:
        return max(images[0] / here, images[1] / there + (fixed if images[1] else 0.0))

    best = min(time_of((n, whole - n)) for n in range(whole + 1))
    found = balanced((start, whole - start), whole // 8, 1, time_of, lambda: True)
    assert sum(found) == whole
    assert min(found) >= 0
    assert time_of(found) <= best / GAIN + 1.0 / min(here, there)


@given(weights=st.lists(st.floats(0.0, 1e9), min_size=1, max_size=5).filter(any), whole=st.integers(1, 1000))
def test_shares_by_weight_are_whole_and_within_one_image(weights: list[float], whole: int) -> None:
    images = shares_by(weights, whole)
    assert sum(images) == whole
    for count, weight in zip(images, weights, strict=True):
        assert abs(count - whole * weight / sum(weights)) <= 1


def test_the_papers_example_of_its_rule() -> None:
    """A CPU of 1 TFLOPS beside a GPU of 2 gets a third (section 2.3)."""
    assert shares_by([1e12, 2e12], 300) == (100, 200)


@given(images=st.integers(0, 100), size=st.integers(1, 40))
def test_parts_of_a_size_make_up_the_whole(images: int, size: int) -> None:
    parts = parts_of_size(images, size)
    assert sum(parts) == images
    assert set(parts[:-1]) <= {size}
    assert all(0 < part <= size for part in parts)


@pytest.fixture
def _cpu_beside_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a second device beside itself: each has half of the threads."""
    monkeypatch.setattr(device_shares, "other_places", lambda names, home: tuple(names))


class FewImages(toys.Plain):
    """Computes fewer than eight images at a time, so that a larger batch has to be shared."""

    name = "few_images"

    def unsupported(self, p: ConvProblem) -> list[str]:
        return [] if p.batch < 8 else [f"takes 7 images, not {p.batch}"]


OTHERS = tuple(solver.name for solver in solvers.all_solvers() if solver.name not in ("aten", "devices"))


@needs_threads
@pytest.mark.usefixtures("_cpu_beside_cpu")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pass_", Pass)
def test_shares_are_planned_measured_kept_and_told(pass_: Pass, tmp_path: Path) -> None:
    problem, options = toys.small(pass_, 9), Options(share_with=("cpu",), exclude=("aten",))
    torch.set_num_threads(2)
    with toys.installed(FewImages(), without=OTHERS):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        tried = [m for m in planner.explain(problem, options) if m.solver == "devices"]
        found = {m.config["found"] for m in tried if "found" in m.config and m.time_ms is not None}
        assert {"flops", "rates"} & found
        for m in tried:
            assert m.time_ms is not None or m.reason
        plan = planner.plan(problem, options)
        assert plan.solver == "devices"
        shares = Shares.of(plan.config)
        assert sum(shares.images) == 9
        assert plan.error is not None
        assert plan.error.l2 < 1e-5
        assert why_unfit(plan, problem, options) == ""  # from elsewhere it would be tried
        a, b = toys.operands(problem)
        assert toys.distance(bind(plan, problem, a, b)(a, b), problem.reference(a, b)) < 1e-6
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        named = zip(shares.places, shares.images, strict=True)  # which device is faster is a matter of the moment
        assert all(f" on {place}" in plan.tree() for place, images in named if images)
        again = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        assert again.plan(problem, replace(options, rigor="wisdom_only")) == plan
        with pytest.raises(NoPlanError, match="share_with names no device"):
            again.plan(problem, Options(exclude=("aten",)))


@needs_threads
@pytest.mark.usefixtures("_cpu_beside_cpu")
def test_a_workspace_limit_holds_on_each_device(tmp_path: Path) -> None:
    problem = toys.small(Pass.FPROP, 9)
    torch.set_num_threads(2)
    with toys.installed(FewImages(), without=OTHERS):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        limit = 2 * problem.nbytes("x") // 9 * 2 + problem.nbytes("w") + 128  # one image at a time there
        tried = planner.explain(problem, Options(limit, share_with=("cpu",), exclude=("aten",)))
        for m in tried:
            assert m.reason or m.solver != "devices" or (m.workspace or 0) <= limit
        assert any("the limit is" in m.reason for m in tried)


@needs_threads
@pytest.mark.usefixtures("_cpu_beside_cpu")
def test_where_no_share_gains_the_reason_is_told(tmp_path: Path) -> None:
    class Slow(toys.Plain):
        name = "slow_in_parts"

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01 if p.batch < 6 else 0.0)
            return super().compute(p, a, b)

    torch.set_num_threads(2)
    with toys.installed(Slow(), without=OTHERS):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        options = Options(share_with=("cpu",), exclude=("aten",))
        tried = planner.explain(toys.small(Pass.FPROP, 6), options)
        assert any("every share of other devices comes out as zero" in m.reason for m in tried if m.solver == "devices")
        assert planner.plan(toys.small(Pass.FPROP, 6), options).solver == "slow_in_parts"


@needs_threads
@pytest.mark.slow
@pytest.mark.usefixtures("_cpu_beside_cpu")
def test_a_layer_is_trained_by_shares(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = toys.filled(toys.small(Pass.FPROP, 9, channels=3), "x").requires_grad_()
    want = _stepped(layer, x)
    with toys.installed(FewImages(), without=OTHERS):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        tilewise.optimize(layer, x, planner=planner, goal="passes", share_with=("cpu",), exclude=("aten",))
        assert "devices" in str(tilewise.nn.report(layer))
        torch.testing.assert_close(_stepped(layer, x), want, rtol=1e-4, atol=1e-4)
        tilewise.restore(layer)


def _stepped(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The layer's result and the gradients of its input and its parameters."""
    x.grad = None
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
