"""Functions of torch that pool and normalize while planning is enabled: results, gradients, and what stays torch's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise.nn.script.recorder import OFTEN
from tilewise.nn.script.without_weights import BY_TORCH
from tilewise.plan import Config, Plan
from tilewise.solvers import baseline, get

pytest.importorskip("numba")
OURS = {"pool": ("window_pooling", Config(lanes=4, threads=1)), "lrn": ("channel_window", Config(lanes=4, threads=1))}


class Forced(tilewise.Planner):
    """A planner whose plans are those of our kernels, and torch's choice for products; it measures no time."""

    def __init__(self) -> None:
        super().__init__(progress=lambda *_: None)
        self.asked: list[Any] = []

    def plan(self, problem: Any, options: Any = None, **_: Any) -> Plan:
        self.asked.append(problem)
        if problem.kind not in OURS:
            solver = baseline(problem)
            return Plan(problem.key, solver.name, solver.version, next(iter(solver.configs(problem))), time_ms=1.0)
        name, config = OURS[problem.kind]
        solver = get(name)
        assert not solver.why_not(problem)
        return Plan(problem.key, solver.name, solver.version, config, time_ms=1e-3)

    def torch_ms(self, problems: Any) -> dict[Any, float]:
        return dict.fromkeys(problems, 1.0)


def session_of(planner: Forced) -> Any:
    return tilewise.enabled(planner=planner, rigor="estimate", wait=True)


CALLS: dict[str, tuple[tuple[int, ...], Any]] = {
    "max_pool1d": ((2, 3, 17), lambda x: F.max_pool1d(x, 3, stride=2, padding=1)),
    "max_pool2d": ((2, 3, 17, 9), lambda x: F.max_pool2d(x, [3, 2], 2, 1, 1, True)),
    "max_pool3d": ((1, 2, 5, 6, 7), lambda x: F.max_pool3d(x, 2)),
    "avg_pool1d": ((2, 3, 17), lambda x: F.avg_pool1d(x, (3,), 2)),
    "avg_pool2d": ((2, 3, 17, 9), lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "avg_pool3d": ((1, 2, 5, 6, 7), lambda x: F.avg_pool3d(x, 2, divisor_override=3)),
    "local_response_norm": ((2, 5, 6, 7), lambda x: F.local_response_norm(x, 3, alpha=0.1)),
}


def with_gradient(call: Any, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy)]


@pytest.mark.parametrize("name", list(CALLS))
def test_a_function_runs_by_plan_once_it_was_called_often(name: str) -> None:
    shape, call = CALLS[name]
    x = torch.randn(shape)
    want = with_gradient(call, x)
    planner = Forced()
    with session_of(planner) as session:
        for _ in range(OFTEN + 2):
            got = with_gradient(call, x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert [p.task for p in planner.asked] == ["training"]
        (layer,) = session.report().layers
        assert layer.kind == name
        assert [one.replaced for one in layer.passes()] == [True]
    torch.testing.assert_close(with_gradient(call, x), want, rtol=0, atol=0)
    assert getattr(F, name) is BY_TORCH[name]


def test_calls_are_planned_with_the_step_of_a_layer_that_has_a_weight() -> None:
    """The same pooling twice in a step does not end it, and a weight that comes again does."""
    model = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1), nn.Flatten(), nn.Linear(48, 2))
    x = torch.randn(1, 3, 4, 4)
    planner = Forced()
    with torch.no_grad():
        want = model(x)
        with session_of(planner):
            model(x)
            model[:3](x)
            assert planner.asked == []
            model(x)
            assert [p.kind for p in planner.asked] == ["pool", "gemm"]
            torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.max_pool2d(x.double(), 2),
        lambda x: F.max_pool2d(x[0:0], 2),
        lambda x: F.local_response_norm(x.mT, 3),
        lambda x: torch.func.vmap(lambda t: F.avg_pool2d(t, 2))(x[None])[0],
    ],
)
def test_what_stays_torchs(call: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    want = call(x)
    planner = Forced()
    with session_of(planner):
        for _ in range(OFTEN + 1):
            got = call(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert planner.asked == []


def test_autocast_and_compiled_calls_are_torchs() -> None:
    planner, x = Forced(), torch.randn(2, 3, 8, 8)
    with session_of(planner):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(OFTEN + 1):
                F.max_pool2d(x, 2)
        model = torch.compile(nn.Sequential(nn.LocalResponseNorm(3), nn.MaxPool2d(2)), backend="eager", fullgraph=True)
        for _ in range(OFTEN + 1):
            y = model(x)
        torch.testing.assert_close(y, F.max_pool2d(F.local_response_norm(x, 3), 2))
    assert {p.kind for p in planner.asked} <= {"pool", "lrn"}


def test_errors_are_torchs() -> None:
    x = torch.randn(1, 1, 3, 3)
    with session_of(Forced()):
        with pytest.raises(RuntimeError, match="Output size is too small"):
            F.max_pool2d(x, 7)
        with pytest.raises(TypeError):
            F.avg_pool2d(x, 2, unknown=3)
        with pytest.raises(TypeError):
            F.max_pool2d(x, {})


def test_under_a_memory_limit_calls_are_torchs() -> None:
    planner, x = Forced(), torch.randn(1, 1, 4, 4)
    with tilewise.enabled(planner=planner, rigor="estimate", wait=True, workspace="1MiB") as session:
        for _ in range(OFTEN + 1):
            F.max_pool2d(x, 2)
        assert "memory limits" in str(session.report())
    assert planner.asked == []


def test_a_normalization_by_torch_pools_by_torch() -> None:
    """torch's function of it calls that of pooling, of which no plan is to be made."""
    planner, x = Forced(), torch.randn(2, 3, 4, 6)
    with session_of(planner):
        for _ in range(OFTEN // 2):
            F.local_response_norm(x, 3)
        for _ in range(OFTEN + 1):
            F.max_pool2d(x, 2)
    assert {p.kind for p in planner.asked} == {"lrn", "pool"}
    assert {p.op for p in planner.asked if p.kind == "pool"} == {"max"}


def test_scripts_and_pickles_hold_torchs_functions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first = nn.LocalResponseNorm(3), nn.MaxPool2d(2)
            self.second, self.third = nn.AvgPool2d(2), nn.MaxPool2d(2, return_indices=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.third(self.second(self.first(self.norm(x))))[0]
            return y

    x, net = torch.randn(2, 4, 16, 16), Net()
    want = net(x)
    with session_of(Forced()):
        scripted = torch.jit.script(net)
        torch.testing.assert_close(scripted(x), want)
        text = pickle.dumps(F.max_pool2d)
    assert "tilewise" not in str(scripted.code)
    assert pickle.loads(text) is F.max_pool2d
