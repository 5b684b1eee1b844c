"""Shares of a batch on a CPU and on GPUs at once, whichever of them has the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import toys
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.execute import bind
from tilewise.machine.device import device_name
from tilewise.machine.places import place_of
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.planner.measuring.times import peak_is_known
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands
from tilewise.solvers.common.shares import Shares
from tilewise.wisdom import Wisdom

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not bounds_threads(), reason="torch's threads cannot be bounded here"),
]
devices = solvers.get("devices")
assert isinstance(devices, solvers.Split)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
AXIS = Axis(14, 3, before=1, after=1)


def shared(problem: ConvProblem, others: Sequence[torch.device], parts: Sequence[Sequence[int]]) -> Plan:
    """A plan by torch's own choice: ``parts[0]`` where the tensors lie, then those of each other device."""
    places = ("here", *map(place_of, others))
    config = Shares(places, tuple(map(tuple, parts)), 2).config()
    children = tuple(
        toys.leaf("aten", part.problem) for part in devices.children(problem, config) if part.problem is not None
    )
    return Plan(problem.key, "devices", devices.version, config, children, (1,) * len(children))


def layer(pass_: Pass, home: torch.device, batch: int = 11, **changes: object) -> ConvProblem:
    """A layer whose tensors lie on ``home``."""
    problem = ConvProblem(pass_, batch, 16, 8, (AXIS, AXIS), device=device_name(home))
    return replace(problem, **changes)  # type: ignore[arg-type]


PARTS = [((3,), (3, 3, 2)), ((11,), ()), ((), (4, 4, 3)), ((10,), (1,)), ((1,), (10,))]


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_cpu_and_a_gpu_give_the_reference(
    pass_: Pass, accumulate: bool, home: torch.device, parts: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Also where one of them has nothing, and in calls that follow one another without waiting."""
    other = GPU if home == CPU else CPU
    problem = layer(pass_, home, accumulate=accumulate)
    a, b = make_operands(problem, 3)
    out = toys.poison(problem).to(home)
    bound = bind(shared(problem, [other], parts), problem, a, b, out)
    results = []
    for scale in (1.0, 2.0, 3.0):
        out.copy_(toys.poison(problem))
        bound(a * scale, b, None, out)
        results.append(out.clone())
    for scale, got in zip((1.0, 2.0, 3.0), results, strict=True):
        want = problem.reference(a.cpu() * scale, b.cpu()) + (1.0 if accumulate else 0.0)
        assert toys.distance(got.cpu(), want) < 1e-5
    if parts[1]:
        there = str(other)
        assert bound.workspaces[there] > 0
        pinned = bound.workspaces["cpu"] - (bound.workspace if home == CPU else 0)
        assert pinned > 0  # on either side copies go by way of the host's pinned memory


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
def test_half_types_are_summed_in_fp32(pass_: Pass, dtype: str, home: torch.device) -> None:
    problem = layer(pass_, home, dtype=dtype)
    a, b = make_operands(problem, 3)
    bound = bind(shared(problem, [GPU if home == CPU else CPU], ((4,), (3, 4))), problem, a, b)
    want = problem.reference(a.cpu(), b.cpu())
    assert toys.distance(bound(a, b).cpu(), want) < toys.DTYPE_ERROR[dtype]


@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_a_bias_is_added_on_each_device(pass_: Pass, home: torch.device) -> None:
    problem = layer(pass_, home, bias=True)
    a, b = make_operands(problem, 3)
    bias = toys.bias_of(problem).to(home)
    bound = bind(shared(problem, [GPU if home == CPU else CPU], ((4,), (3, 4))), problem, a, b)
    want = problem.reference(a.cpu(), b.cpu()) + toys.bias_of(problem).double().view(1, -1, 1, 1)
    assert toys.distance(bound(a, b, bias).cpu(), want) < 1e-5


@pytest.mark.parametrize("pass_", Pass)
def test_pinned_tensors_and_views_on_the_host(pass_: Pass) -> None:
    """Pinned ones are copied without a way around, others by way of pinned buffers; views are gathered."""
    problem = layer(pass_, CPU)
    a, b = make_operands(problem, 3)
    want = problem.reference(a, b)
    plan = shared(problem, [GPU], ((3,), (4, 4)))
    out = torch.empty(want.shape, dtype=torch.float32, device="cpu", pin_memory=True)
    bound = bind(plan, problem, a.pin_memory(), b.pin_memory(), out)
    assert toys.distance(bound(a.pin_memory(), b.pin_memory(), None, out), want) < 1e-5
    viewed = replace(problem, layouts=("view", "view", "view"), alignment=(4, 4, 4))
    c, d = make_operands(viewed, 3)
    viewing = bind(shared(viewed, [GPU], ((3,), (4, 4))), viewed, c, d)
    assert toys.distance(viewing(c, d), viewed.reference(c, d)) < 1e-5


def test_precision_of_a_layer_on_the_host_holds_on_the_gpu() -> None:
    """Torch's own choice would round to TF32 there by default."""
    problem = layer(Pass.FPROP, CPU, in_channels=64, out_channels=64)
    a, b = make_operands(problem, 3)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    try:
        bound = bind(shared(problem, [GPU], ((), (6, 5))), problem, a, b)
        assert toys.distance(bound(a, b), problem.reference(a, b)) < 2e-6
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("pass_", Pass)
def test_the_current_streams_order_holds(pass_: Pass) -> None:
    """Operands are written late on a stream of the caller's, and the result is read on it at once."""
    problem = layer(pass_, GPU, batch=16)
    a, b = make_operands(problem, 3)
    want = problem.reference(a.cpu(), b.cpu())
    bound = bind(shared(problem, [CPU], ((11,), (3, 2))), problem, a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            late = torch.full_like(a, float("nan"))
            torch.cuda._sleep(20_000_000)
            late.copy_(a)
            got = bound(late, b)
            late.fill_(float("nan"))  # what has not read it yet would read this
            del late
            copy = got.clone()
            got.fill_(float("nan"))
            assert toys.distance(copy.cpu(), want) < 1e-5


@two_gpus
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("parts", [((8,), (8,)), ((3,), (5, 5, 3)), ((), (9, 7)), ((15,), (1,))], ids=str)
def test_two_gpus_give_the_reference(
    pass_: Pass, accumulate: bool, parts: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    problem = layer(pass_, GPU, batch=16, accumulate=accumulate)
    a, b = make_operands(problem, 3)
    out = toys.poison(problem).to(GPU)
    bound = bind(shared(problem, [torch.device("cuda", 1)], parts), problem, a, b, out)
    want = problem.reference(a.cpu(), b.cpu()) + (1.0 if accumulate else 0.0)
    for _ in range(3):
        out.copy_(toys.poison(problem))
        torch.cuda._sleep(5_000_000)
        bound(a, b, None, out)
        assert toys.distance(out.cpu(), want) < 1e-5
    assert bound.workspaces["cuda:1"] > 0


@two_gpus
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("home", [CPU, GPU, torch.device("cuda", 1)], ids=str)
def test_two_gpus_and_a_cpu_give_the_reference(pass_: Pass, home: torch.device) -> None:
    problem = layer(pass_, home, batch=16)
    with torch.cuda.device(home if home.type == "cuda" else 0):
        a, b = make_operands(problem, 3)
        assert a.device == home
        others = [each for each in (GPU, torch.device("cuda", 1), CPU) if each != home]
        bound = bind(shared(problem, others, ((5,), (4, 4), (2, 1))), problem, a, b)
        want = problem.reference(a.cpu(), b.cpu())
        for _ in range(3):
            got = bound(a, b)
            assert got.device == home
            assert toys.distance(got.cpu(), want) < 1e-5


@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
def test_a_capture_is_refused_with_the_reason(home: torch.device) -> None:
    problem = layer(Pass.FPROP, home)
    a, b = make_operands(problem, 3)
    bound = bind(shared(problem, [GPU if home == CPU else CPU], ((7,), (4,))), problem, a, b)
    want = bound(a, b).clone()
    graph, refused = torch.cuda.CUDAGraph(), ""
    filled = torch.zeros(8, dtype=torch.float32, device=GPU)
    with torch.cuda.graph(graph):
        filled.add_(1.0)
        try:
            bound(a, b)
        except RuntimeError as error:
            refused = str(error)
    assert "a CUDA graph is being captured" in refused
    assert "share_with=() would do" in refused
    graph.replay()
    assert torch.equal(bound(a, b), want)


def test_what_a_part_on_the_gpu_raises_is_raised_and_later_calls_are_right() -> None:
    class Fails(toys.Plain):
        name = "fails"
        broken = True

        def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            if self.broken and a.is_cuda:
                raise ArithmeticError("not today")
            return super().compute(p, a, b)

    problem, solver = layer(Pass.FPROP, CPU), Fails()
    a, b = make_operands(problem, 3)
    with toys.installed(solver):
        config = Shares(("here", place_of(GPU)), ((4,), (4, 3)), 1).config()
        parts = devices.children(problem, config)
        leaves = tuple(toys.leaf("fails", part.problem) for part in parts if part.problem is not None)
        bound = bind(Plan(problem.key, "devices", devices.version, config, leaves, (1, 1, 1)), problem, a, b)
        with pytest.raises(ArithmeticError, match="not today"):
            bound(a, b)
        solver.broken = False
        assert toys.distance(bound(a, b), problem.reference(a, b)) < 1e-5


@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
@pytest.mark.parametrize("pass_", Pass)
def test_shares_are_measured_and_any_plan_is_right(pass_: Pass, home: torch.device, tmp_path: Path) -> None:
    problem = layer(pass_, home, batch=32)
    others = tuple(s.name for s in solvers.all_solvers() if s.name not in ("aten", "devices", "lowering_type1"))
    with toys.installed(without=others):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        options = Options(share_with=("cpu", "cuda:0"))
        tried = [m for m in planner.explain(problem, options) if m.solver == "devices"]
        timed = [m for m in tried if m.time_ms is not None and not m.reason]
        assert timed, tried
        assert {"flops", "alone"} & {m.config["found"] for m in timed}
        a, b = make_operands(problem, 3)
        plan = planner.plan(problem, options)
        want = problem.reference(a.cpu(), b.cpu())
        with problem.flags(deterministic=False):
            got = bind(plan, problem, a, b)(a, b)
        assert toys.distance(got.cpu(), want) < 1e-5


@pytest.mark.parametrize("home", [CPU, GPU], ids=str)
def test_a_workspace_limit_holds_on_each_device(home: torch.device, tmp_path: Path) -> None:
    if not peak_is_known(CPU):
        pytest.skip("what the memory allocator keeps hides what a call takes")
    problem = layer(Pass.FPROP, home, batch=32)
    others = tuple(s.name for s in solvers.all_solvers() if s.name not in ("aten", "devices", "direct_gemm"))
    with toys.installed(without=others):
        planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
        options = Options("256KiB", share_with=("cpu", "cuda:0"))
        for m in planner.explain(problem, options):
            assert m.reason or m.solver != "devices" or (m.workspace or 0) <= 256 << 10


class FewImages(toys.Plain):
    """Computes fewer than eight images at a time, so that a larger batch has to be shared."""

    name = "few_images"

    def unsupported(self, p: ConvProblem) -> list[str]:
        return [] if p.batch < 8 else [f"takes 7 images, not {p.batch}"]


def test_a_layer_is_trained_by_shares(tmp_path: Path) -> None:
    """Tensors lie on the host. On a GPU the rule of FLOPS would leave no image to the CPU."""
    module = nn.Conv2d(16, 8, 3, padding=1)
    x = make_operands(layer(Pass.FPROP, CPU, batch=9), 3)[0].requires_grad_()
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    others = tuple(s.name for s in solvers.all_solvers() if s.name not in ("aten", "devices"))
    try:
        want = _stepped(module, x)
        with toys.installed(FewImages(), without=others):
            planner = Planner(Wisdom(tmp_path / "wisdom.sqlite3"))
            tilewise.optimize(
                module, x, planner=planner, goal="passes", share_with=("cpu", "cuda:0"), exclude=("aten",)
            )
            assert "devices" in str(tilewise.nn.report(module))
            for _ in range(2):
                torch.testing.assert_close(_stepped(module, x), want, rtol=1e-4, atol=1e-4)
            tilewise.restore(module)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def _stepped(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The layer's result and the gradients of its input and its parameters."""
    x.grad = None
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]
