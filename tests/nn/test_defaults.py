"""Whole models under a caller's defaults and modes: another default type, a default device without memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.caller import DEFAULTS, OTHER, Defaults, caller
from tests.distributed.ranks import parallel, run
from tests.nn.dividing import Dividing
from tests.sampling import EVERY
from torch import nn

import tilewise
from tilewise import fft, solvers
from tilewise import nn as planned
from tilewise.distributed import optimize as optimize_ranks
from tilewise.nn import report
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

ALL = [*DEFAULTS.values(), OTHER]
NAMES = [*DEFAULTS, "float64 and meta"]


class Own(Planner):
    """Leaves nothing to torch: the first of our solvers that takes a problem computes it, in its last config."""

    ORDER = ("winograd", "depthwise", "fused_lowering", "widened", "lowering_type1", "fft", "gemm")

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        for name in self.ORDER:
            solver = solvers.get(name)
            if not solver.why_not(problem):
                return Plan(problem.key, name, solver.version, list(solver.configs(problem))[-1], time_ms=1.0)
        return Plan(problem.key, "aten", solvers.get("aten").version)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16, padding=1),
        nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 8, 5, stride=2, padding=2),
        nn.Flatten(2), nn.Conv1d(8, 4, 3, bias=False),
    )  # fmt: skip


def example() -> torch.Tensor:
    return torch.randn(4, 16, 28, 28, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and every gradient, of a loss whose gradient differs from place to place."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    (y * torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape).sin()).sum().backward()
    grads = [leaf.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def check(got: list[torch.Tensor], limit: float = 2e-5) -> None:
    exact = network().double()
    want = results(exact, example().double())
    assert len(got) == len(want)
    biases_before_norms = 4 if len(want) > 4 else 0
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.device.type == "cpu"
        assert a.dtype in (torch.float32, torch.bfloat16)
        scale = max(float(b.norm()), float(want[1].norm()) if number == biases_before_norms + 1 else 0.0, 1e-2)
        assert float((a.double() - b).norm()) <= limit * scale, number


def optimized(x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    tilewise.optimize(model, x, planner=Own())
    assert all(layer.replaced for layer in report(model).layers), "all passes are ours"
    return results(model, x)


def enabled(x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    with tilewise.enabled(wait=True, planner=Own()):
        for _ in range(2):
            model.zero_grad()
            model[3].reset_running_stats()  # type: ignore[index, operator]
            got = results(model, x)
    return got


def functional(x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    planned.set_defaults(planner=Own())
    try:
        first = model[0]  # type: ignore[index]
        first.forward = lambda x: tilewise.conv2d(x, first.weight, first.bias, padding=1)
        return results(model, x)
    finally:
        planned.set_defaults()


def compiled(x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    tilewise.optimize(model, x, planner=Own())
    torch._dynamo.reset()
    try:
        return results(torch.compile(model, backend="aot_eager"), x)  # type: ignore[arg-type]
    finally:
        torch._dynamo.reset()


WAYS: dict[str, Callable[[torch.Tensor, nn.Module], list[torch.Tensor]]] = {
    "optimize": optimized, "enabled": enabled, "functional": functional, "compile": compiled,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("defaults", ALL, ids=NAMES)
def test_a_model_is_planned_and_trained(way: str, defaults: Defaults) -> None:
    model, x = network(), example()
    with caller(defaults):
        got = WAYS[way](x, model)
    check(got)


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Deterministic algorithms, which fill memory that is not written yet."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, filled], ids=lambda mode: mode.__name__)
def test_planned_within_a_mode_and_trained_outside(mode: Any) -> None:
    model, x = network(), example()
    with caller(OTHER):
        with mode():
            tilewise.optimize(model, x, planner=Own())
            model(x)
        model[3].reset_running_stats()  # type: ignore[operator]
        got = results(model, x)
    check(got)


def test_trained_with_autocast_and_filled_memory() -> None:
    model, x = network(), example()
    with caller(OTHER), filled(), torch.autocast("cpu", torch.bfloat16):
        tilewise.optimize(model, x, planner=Own())
        got = results(model, x)
    exact, want = network(), None
    with torch.autocast("cpu", torch.bfloat16):
        want = results(exact, x)
    truth = results(network().double(), x.double())
    for a, b, c in zip(got, want, truth, strict=True):
        assert a.dtype is b.dtype
        theirs = float((b.double() - c).norm())
        assert float((a.double() - c).norm()) <= 2 * theirs + 2e-2 * float(c.norm()) + 1e-2


@pytest.mark.skipif(not EVERY, reason="plans for a minute")
@pytest.mark.parametrize(("defaults", "before"), [(defaults, i % 2 == 0) for i, defaults in enumerate(ALL)], ids=NAMES)
def test_a_layer_with_work_for_every_solver(defaults: Defaults, before: bool) -> None:
    """By the real planner; ``before``: the layer and its input are made under the defaults, too."""
    with caller((defaults[0], "cpu")) if before else contextlib.nullcontext():
        torch.manual_seed(0)
        layer = nn.Conv2d(64, 64, 3, padding=1).float()
        x = torch.randn(8, 64, 56, 56, dtype=torch.float32)
    exact = copy.deepcopy(layer).double()
    with caller(defaults):
        tilewise.optimize(layer, x)
        got = results(layer, x)
    for a, b in zip(got, results(exact, x.double()), strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.skipif(not EVERY, reason="measures every candidate")
def test_no_candidate_is_lost_to_a_default() -> None:
    problem = ConvProblem(Pass.WGRAD, 2, 4, 4, (Axis(9, 3, 1, 1, 1, 1),) * 2)
    with caller(OTHER):
        found = Planner().explain(problem)
    assert not [m for m in found if "raised" in m.reason]
    assert len({m.solver for m in found if m.time_ms is not None}) > 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("defaults", ALL, ids=NAMES)
@pytest.mark.parametrize("layout", fft.LAYOUTS)
def test_transforms(defaults: Defaults, layout: str) -> None:
    x = example()[:, :3]
    with caller(defaults):
        y = fft.rfft2(x, (32, 30), layout=layout)
        back = fft.irfft2(y, (32, 30), size=(28, 28), layout=layout)
        signal = fft.irfft(fft.rfft(x, 28, layout=layout), 28, size=28, layout=layout)
        empty = fft.rfft(x[:0], 28, layout=layout)
    assert y.dtype is empty.dtype is torch.complex64
    for found in (back, signal):
        assert found.dtype is torch.float32
        assert float((found - x).norm()) <= 1e-6 * float(x.norm())


def ranks(defaults: Defaults) -> None:
    """Two ranks compute what one device does, planned and not."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect", bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.ConvTranspose2d(8, 8, 3, 2, padding=1), nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool2d(3),
    )  # fmt: skip
    exact, x = copy.deepcopy(model).double(), torch.randn(4, 3, 24, 10)
    full = x.double().requires_grad_()
    want = exact(full)
    want.square().sum().backward()
    plain = copy.deepcopy(model)
    for plans in (False, True):
        p = parallel(copy.deepcopy(plain), (2,), ("h",))
        own = x.clone().requires_grad_()
        with caller(defaults):
            if plans:
                optimize_ranks(p, p.scatter(x), planner=Dividing())
            y = p(p.scatter(own))
            found = p.gather(y) if hasattr(y, "local") else y
            found.square().sum().backward()
        assert found.dtype is torch.float32
        pairs = [(found, want), (own.grad, full.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(p.module.parameters(), exact.parameters(), strict=True)]
        for number, (a, b) in enumerate(pairs):
            assert a is not None
            assert b is not None
            error = float((a.double() - b).norm() / b.norm())
            assert error <= 1e-4, f"{'planned' if plans else 'as it is'}: {number} is off by {error:.1e}"
    assert dist.get_world_size() == 2


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("defaults", [OTHER, *DEFAULTS.values()], ids=[NAMES[-1], *NAMES[:-1]])
def test_two_ranks(defaults: Defaults) -> None:
    run(2, ranks, defaults)
