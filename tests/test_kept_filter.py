"""Filters that are prepared once: as right as ever when the weight changes, in whatever way its version tells."""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import tilewise
from tilewise import execute, kept_filter
from tilewise.axis import Axis
from tilewise.device import device_name
from tilewise.kept_filter import KeptFilter
from tilewise.kernels.reference import convolve
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.options import Options
from tilewise.planner.trial import leaf_plan
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import get

FFT = get("fft")
LAYERS = {
    "dense": ConvProblem(Pass.FPROP, 3, 4, 6, (Axis(9, 3, 1, 1, 1, 1), Axis(8, 3)), constant_weight=True),
    "depthwise": ConvProblem(Pass.FPROP, 3, 4, 4, (Axis(9, 5, 1, 1, 2, 2),), groups=4, constant_weight=True),
    "transposed": ConvProblem(Pass.DGRAD, 3, 4, 6, (Axis(9, 3, 2), Axis(8, 3)), groups=2, constant_weight=True),
}


def bound(p: ConvProblem) -> tuple[execute.Bound, torch.Tensor, torch.Tensor]:
    a, w = (torch.randn(p.shape(role)) for role in p.operands)
    config = next(iter(FFT.configs(p)))
    assert FFT.constant(p, config) > 0
    return execute.bind(Plan(p.key, FFT.name, FFT.version, config), p, a, w), a, w


def check(run: execute.Bound, p: ConvProblem, a: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(run(a, w).double(), convolve(p, a, w), rtol=1e-4, atol=1e-4)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each time that a filter was prepared."""
    found: list[object] = []
    original = type(FFT).prepare

    def prepare(self: object, *arguments: object) -> object:
        inner = original(self, *arguments)  # type: ignore[arg-type]

        def counted(*tensors: torch.Tensor | None) -> None:
            found.append(tensors)
            inner(*tensors)  # type: ignore[arg-type]

        return counted

    monkeypatch.setattr(type(FFT), "prepare", prepare)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_filter_is_prepared_once(name: str, prepared: list[object]) -> None:
    p = LAYERS[name]
    run, a, w = bound(p)
    for _ in range(3):
        check(run, p, torch.randn_like(a), w)
    assert len(prepared) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_any_change_of_the_weight_is_seen(name: str, prepared: list[object]) -> None:
    p = LAYERS[name]
    run, a, w = bound(p)
    check(run, p, a, w)
    w.mul_(2)
    check(run, p, a, w)
    w[0] = 1
    check(run, p, a, w)
    w.data = torch.randn_like(w)
    check(run, p, a, w)
    whole = torch.randn(2, *w.shape)
    for part in (whole[0], whole[1], whole[0]):
        check(run, p, a, part)
    assert len(prepared) == 6  # both parts of the whole are still there


def test_layers_that_share_a_plan_keep_a_filter_each(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    weights = [torch.randn(p.shape("w")) for _ in range(3)]
    for _ in range(3):
        for w in weights:
            check(run, p, a, w)
    assert len(prepared) == 3
    weights[1].mul_(2)
    for w in weights:
        check(run, p, a, w)
    assert len(prepared) == 4


def test_what_came_of_a_weight_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    kept: list[weakref.ref[torch.Tensor]] = []
    original = KeptFilter._prepared

    def prepare(self: KeptFilter, w: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        found = original(self, w, workspace)
        kept.append(weakref.ref(found))
        return found

    monkeypatch.setattr(KeptFilter, "_prepared", prepare)
    weights = [torch.randn(p.shape("w")) for _ in range(3)]
    for w in weights:
        run(a, w)
    del w, weights[1:]
    run(a, torch.randn(p.shape("w")))
    assert [found() is not None for found in kept] == [True, False, False, True]


def test_an_address_used_again_is_another_weight(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    for _ in range(20):
        check(run, p, a, torch.randn(p.shape("w")))  # each is gone before the next is made
    assert len(prepared) == 20


def test_a_weight_without_a_version_is_prepared_every_time(prepared: list[object]) -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    with torch.inference_mode():
        w = torch.randn(p.shape("w"))
        for _ in range(3):
            w.mul_(2)
            check(run, p, a, w)
    assert len(prepared) == 3
    check(run, p, a, torch.randn(p.shape("w")))


def test_a_captured_call_neither_takes_nor_leaves_a_filter(
    prepared: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = LAYERS["dense"]
    run, a, w = bound(p)
    check(run, p, a, w)
    with monkeypatch.context() as patch:
        patch.setattr(kept_filter, "is_capturing", lambda device: True)
        check(run, p, a, w)
        check(run, p, a, w)
        assert len(prepared) == 3
    check(run, p, a, w)
    assert len(prepared) == 3


@pytest.mark.gpu
def test_a_graph_follows_the_weight_and_streams_have_their_own() -> None:
    p = replace(LAYERS["dense"], device=device_name("cuda"))
    config = next(c for c in FFT.configs(p) if c.get("transform") != "own")
    a, w = (torch.randn(p.shape(role), device="cuda") for role in p.operands)
    run = execute.bind(Plan(p.key, FFT.name, FFT.version, config), p, a, w)
    for _ in range(2):
        check(run, p, a, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check(run, p, a, w)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(a, w)
    check(run, p, a, w)
    for factor in (1, 3):
        w.mul_(factor)
        graph.replay()
        torch.testing.assert_close(out.double(), convolve(p, a, w), rtol=1e-4, atol=1e-4)
        check(run, p, a, w)


def test_threads_with_weights_of_their_own() -> None:
    p = LAYERS["dense"]
    run, a, _ = bound(p)
    wrong: list[float] = []

    def work(w: torch.Tensor) -> None:
        want = convolve(p, a, w)
        for _ in range(30):
            error = float((run(a, w) - want).abs().max())
            if not error < 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(torch.randn(p.shape("w")),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_micro_batch_keeps_one_filter_for_equal_parts(prepared: list[object]) -> None:
    p = ConvProblem(Pass.FPROP, 4, 4, 6, (Axis(9, 3), Axis(8, 3)), constant_weight=True)
    split = get("micro_batch")
    child = split.child(p, 2)  # type: ignore[attr-defined]
    part = Plan(child.key, FFT.name, FFT.version, next(iter(FFT.configs(child))))
    plan = Plan(p.key, split.name, split.version, Config(sizes=(2, 2)), (part,), (2,))
    a, w = torch.randn(p.shape("x")), torch.randn(p.shape("w"))
    run = execute.bind(plan, p, a, w)
    check(run, p, a, w)
    check(run, p, a, w)
    assert len(prepared) == 1


class ByTransform(Planner):
    """Plans every forward pass by the transforms, however fast they are; the gradients stay torch's."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        if problem.pass_ is not Pass.FPROP:
            return Plan(problem.key, "aten", get("aten").version)
        found = Measurement(FFT.name, FFT.version, next(iter(FFT.configs(problem))), 1.0, 0)
        return leaf_plan(problem, found)


def test_a_plan_says_what_it_keeps() -> None:
    p = LAYERS["dense"]
    plan = ByTransform().plan(p)
    assert plan.constant == FFT.constant(p, plan.config) > 0
    assert ByTransform().plan(replace(p, constant_weight=False)).constant == 0
    assert Plan.from_json(plan.to_json()).constant == plan.constant


def test_inference_keeps_what_training_does_not(prepared: list[object]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(16, 16, 15, padding=7, groups=16)).eval()
    x = torch.randn(2, 16, 24, 24)
    weight = model[0].weight
    tilewise.optimize(model, x, training=False, planner=ByTransform())
    prepared.clear()
    with torch.no_grad():
        want = copy.deepcopy(model)
        tilewise.restore(want)
        for _ in range(3):
            torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-4)
        assert len(prepared) == 1
        weight.mul_(3)
        want[0].weight.mul_(3)
        torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-4)
    # Training it all the same is right, too.
    model(x).square().sum().backward()
    want(x).square().sum().backward()
    torch.testing.assert_close(weight.grad, want[0].weight.grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        weight -= 1e-3 * weight.grad
        torch.testing.assert_close(
            model(x), torch.conv2d(x, weight, model[0].bias, padding=7, groups=16), rtol=1e-4, atol=1e-4
        )
