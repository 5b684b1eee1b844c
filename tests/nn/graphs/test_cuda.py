"""Models captured on a GPU: results and gradients, what changes, captures that fail, streams, memory, planning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from tests.nn.graphs.models import assert_alike, assert_same_steps, bits, images, network, step, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn import CannotCapture, graph_report, report, ungraphed

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with fp32_precision("cuda", "conv", "ieee"), fp32_precision("cuda", "matmul", "ieee"):
        yield


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    model, twin = twins(network(CUDA, **options))
    tilewise.graphed(model, images(CUDA))
    return model, twin


def inputs(number: int) -> list[torch.Tensor]:
    return [images(CUDA) for _ in range(number)]


def same(model: nn.Module, twin: nn.Module, given: list[torch.Tensor], tolerance: float = 1e-3) -> None:
    assert_same_steps(model, twin, given, tolerance=tolerance)


def test_steps_and_their_sum_of_gradients_are_the_models() -> None:
    model, twin = pair()
    same(model, twin, inputs(3))
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
    same(model, twin, inputs(2))
    assert graph_report(model).replayed == 5, graph_report(model)
    assert graph_report(model).bytes > 0


def test_an_optimizer_trains_it_alike() -> None:
    model, twin = pair()
    given = inputs(4)
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), 1e-3, momentum=0.9)
        for x in given:
            step(each, x)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(bits(model), bits(twin), 1e-3)
    assert graph_report(model).replayed == 4, graph_report(model)


def test_capturing_leaves_everything_as_it_was() -> None:
    model, x = network(CUDA, dropout=0.5), images(CUDA)
    before, random = bits(model), torch.cuda.get_rng_state()
    tilewise.graphed(model, x)
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert [*map(torch.equal, bits(model), before)] == [True] * len(before)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_draws_new_numbers() -> None:
    model, _ = pair(dropout=0.5)
    x = images(CUDA)
    results = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        results.append([model(x).detach() for _ in range(2)])
    assert graph_report(model).replayed == 6, graph_report(model)
    assert not torch.equal(results[0][0], results[0][1])
    assert not torch.equal(results[0][0], results[2][0])
    assert_alike(results[0], results[1], 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model, twin = twins(network(CUDA))

    def run(each: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cuda", dtype):
            y = each(x)
            assert y.dtype is dtype
        y.float().square().mean().backward()
        return [y.detach(), *(p.grad for p in each.parameters() if p.grad is not None)]

    with torch.autocast("cuda", dtype):
        tilewise.graphed(model, images(CUDA))
    for number in range(3):
        for each in (model, twin):
            with torch.no_grad():
                each[6].weight.mul_(1.5)
        assert_same_steps(model, twin, inputs(1), run, tolerance=3e-2)
        assert graph_report(model).replayed == number + 1, graph_report(model)


def moved(model: Any) -> None:
    model[6].weight.data = model[6].weight.data * 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "moved": moved,
    "assign": lambda m: m.load_state_dict({n: t * 0.5 for n, t in m.state_dict().items()}, assign=True),
    "eval": lambda m: m.eval(),
    "frozen": lambda m: m[0].requires_grad_(False),
    "there and back": lambda m: m.cpu().cuda(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(name: str) -> None:
    model, twin = pair()
    same(model, twin, inputs(1))
    for each in (model, twin):
        CHANGES[name](each)
        each.zero_grad()
    same(model, twin, inputs(2))
    assert graph_report(model).replayed == 3, graph_report(model)


def test_inference_beside_training() -> None:
    model, twin = pair()
    x = images(CUDA)
    for _ in range(2):
        for grad in (True, False):
            model.train(grad), twin.train(grad)
            with torch.set_grad_enabled(grad):
                same(model, twin, [x])
    with torch.inference_mode():
        assert_alike([model(x)], [twin(x)], 1e-3)
    assert graph_report(model).replayed == 5, graph_report(model)
    assert len(graph_report(model).captures) == 2


def test_a_smaller_batch_and_two_forwards_at_once() -> None:
    model, twin = pair()
    same(model, twin, [images(CUDA), images(CUDA, 3), images(CUDA)])
    assert "unlike any example" in "".join(graph_report(model).without)
    a, b = inputs(2)
    for each in (model, twin):
        each.zero_grad()
        (each(a) * each(b)).sum().backward()
    grads = [[p.grad for p in each.parameters() if p.grad is not None] for each in (model, twin)]
    assert_alike(*grads, 1e-3)  # type: ignore[arg-type]
    assert graph_report(model).replayed == 3, graph_report(model)


def test_second_backward_and_second_derivatives() -> None:
    model, twin = twins(network(CUDA))
    x = images(CUDA)
    tilewise.graphed(model, x.clone().requires_grad_())
    results = []
    for each in (model, twin):
        value = x.clone().requires_grad_()
        y = each(value)
        y.sum().backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(y.square().sum(), value, create_graph=True)
        gradient.square().sum().backward()
        results.append([value.grad, *(p.grad for p in each.parameters())])
    assert_alike(*results, 1e-2)  # type: ignore[arg-type]
    assert graph_report(model).replayed == 1, graph_report(model)


class Waiting(nn.Module):
    """A forward that waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float32, device=CUDA)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = nn.functional.dropout(self.linear(x), 0.5)
        return y * y.sum().item()


def test_a_capture_that_fails_leaves_the_device_in_order() -> None:
    x = torch.randn(4, 8, dtype=torch.float32, device=CUDA)
    stream = torch.cuda.current_stream()
    for _ in range(2):
        model = Waiting()
        with pytest.raises(CannotCapture):
            tilewise.graphed(model, x)
        assert torch.cuda.current_stream() == stream
        step(model, x)  # random numbers are drawn as before
        torch.cuda.synchronize()
    torch.cuda.manual_seed(5)
    first = nn.functional.dropout(x, 0.5)
    torch.cuda.manual_seed(5)
    assert torch.equal(first, nn.functional.dropout(x, 0.5))
    model, twin = pair()
    same(model, twin, inputs(2))
    assert graph_report(model).replayed == 2, graph_report(model)


class Checkpointed(nn.Module):
    """A part whose activations are computed again in the backward."""

    def __init__(self, *, preserve: bool) -> None:
        super().__init__()
        self.inner, self.preserve = network(CUDA), preserve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return y


def test_a_checkpoint_inside() -> None:
    model, twin = twins(Checkpointed(preserve=False))
    tilewise.graphed(model, images(CUDA))
    same(model, twin, inputs(2))
    assert graph_report(model).replayed == 2, graph_report(model)


def test_streams_in_turns() -> None:
    model, twin = pair()
    streams = [torch.cuda.Stream() for _ in range(2)]
    given = inputs(6)
    results: list[list[torch.Tensor]] = []
    for each in (model, twin):
        results.append([])
        torch.cuda.synchronize()
        for number, x in enumerate(given):
            with torch.cuda.stream(streams[number % 2]), torch.no_grad():
                results[-1].append(each(x))
        torch.cuda.synchronize()
    assert_alike(results[0], results[1], 1e-3)
    assert graph_report(model).replayed == 6, graph_report(model)


def test_workspaces_of_cublas_may_be_cleared() -> None:
    model, twin = twins(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(CUDA, torch.float32))
    x = torch.randn(256, 512, dtype=torch.float32, device=CUDA)
    tilewise.graphed(model, x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), 3.0, dtype=torch.float32, device=CUDA) for _ in range(64)]
    same(model, twin, [x, x + 1])
    assert all(bool((t == 3.0).all()) for t in taken)
    assert graph_report(model).replayed == 2, graph_report(model)


def test_another_thread_may_pin_memory_meanwhile() -> None:
    stop = threading.Event()

    def pin() -> None:
        while not stop.is_set():
            torch.empty(1 << 22, dtype=torch.uint8, device="cpu", pin_memory=True)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        model, twin = pair()
    finally:
        stop.set()
        thread.join()
    same(model, twin, inputs(2))
    assert graph_report(model).replayed == 2, graph_report(model)


def test_planned_layers_are_captured() -> None:
    model, twin = twins(network(CUDA))
    planner = Dividing()
    tilewise.optimize(model, images(CUDA), planner=planner)
    tilewise.graphed(model, images(CUDA))
    before = len(planner.planned)
    same(model, twin, inputs(3))
    assert graph_report(model).replayed == 3, graph_report(model)
    assert len(planner.planned) == before


def test_real_plans_and_auto() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model, twin = twins(nn.Sequential(*layers).to(CUDA, torch.float32))
    x = torch.randn(8, 8, 16, 16, dtype=torch.float32, device=CUDA)
    tilewise.optimize(model, x, graphs="auto", cuda_graphs=True)
    found = report(model).facts["graphs"]
    times = {"plain_ms", "graph_ms", "speedup", "least", "most", "pairs"}
    assert set(found) == {"kept", "reason", "bytes"} | times, found
    made = report(model).step
    assert made is not None
    if found["least"] > 1.0:  # replays are faster than launches: plans and torch's choice are compared as replays
        assert made.way == "graph"
        assert found["kept"] == made.kept
    else:
        assert not found["kept"]
    same(model, twin, [x, x + 1], tolerance=1e-2)
    if found["kept"]:
        assert graph_report(model).replayed == 2, graph_report(model)
        assert "the model is replayed" in str(report(model))


def test_memory_is_given_back() -> None:
    model = network(CUDA)
    model(images(CUDA))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tilewise.graphed(model, images(CUDA))
    held = graph_report(model).bytes
    assert held > 0
    assert torch.cuda.memory_reserved() >= held
    ungraphed(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < held


def test_results_on_the_wrong_device() -> None:
    model = network(CUDA)
    with pytest.raises(ValueError, match="those given are on"):
        tilewise.graphed(model, (images(CUDA), images()))
    model.cpu()
    with pytest.raises(CannotCapture, match=r"is on cpu; all must be on cuda:0"):
        tilewise.graphed(model, images(CUDA))
