"""Calls that run without a graph, backwards that a replay cannot give, and models that cannot be captured."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nn.graphs.models import assert_alike, assert_same_steps, images, network, step, twins
from tests.nn.graphs.tape import Tape, TapeRecorder
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn import CannotCapture, graph_report
from tilewise.nn.graphs.graphed import captured


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    model, twin = twins(network(**options))
    captured(model, [images()], TapeRecorder)
    return model, twin


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


OTHER: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a smaller batch": (lambda: images(batch=3), "called with (3, 3, 6, 6) float32, unlike any example"),
    "channels last": (lambda: images().to(memory_format=torch.channels_last), "unlike any example"),
    "with a gradient": (lambda: images().requires_grad_(), "others need a gradient"),
    "a subclass": (lambda: images().as_subclass(Tagged), "a Tagged"),
}


class Tagged(torch.Tensor):
    """A tensor of another type."""


@pytest.mark.parametrize("name", OTHER)
def test_other_arguments(name: str) -> None:
    make, why = OTHER[name]
    model, twin = pair()
    assert_same_steps(model, twin, [make()])
    assert why in graph_report(model).reason
    assert graph_report(model).replayed == 0


def in_thread(model: nn.Module, x: torch.Tensor) -> None:
    graphs = model.forward.__closure__  # type: ignore[attr-defined]
    lock = next(cell.cell_contents for cell in graphs if hasattr(cell.cell_contents, "_lock"))._lock
    thread = threading.Thread(target=step, args=(model, x))
    with lock:
        thread.start()
        thread.join()


def under_hooks(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        step(model, x)


def under_mode(model: nn.Module, x: torch.Tensor) -> None:
    with Tape():
        step(model, x)


def under_anomaly(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        step(model, x)


def checkpointed(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().sum().backward()


SITUATIONS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "thread": (in_thread, "another thread"),
    "hooks": (under_hooks, "hooks on saved tensors"),
    "mode": (under_mode, "a mode that watches"),
    "anomaly": (under_anomaly, "anomaly"),
    "checkpoint": (checkpointed, "hooks on saved tensors"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name: str) -> None:
    run, why = SITUATIONS[name]
    model, twin = pair()
    x = images()
    run(model, x)
    assert graph_report(model).replayed == 0
    assert why in graph_report(model).reason
    step(twin, x)
    assert_alike(gradients(model), gradients(twin))
    step(model, x)
    assert graph_report(model).replayed == 1
    assert graph_report(model).reason == ""
    assert "replayed 1 times" in str(graph_report(model))
    assert why in str(graph_report(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_transforms() -> None:
    model, twin = pair()
    x = images()
    model.eval(), twin.eval()
    got, want = (torch.func.grad(lambda v, each=each: each(v).square().sum())(x) for each in (model, twin))
    assert_alike([got], [want])
    assert "a transform of torch.func" in graph_report(model).reason
    assert graph_report(model).replayed == 0
    assert_alike([torch.jit.trace(model, x)(x)], [twin(x)])


def test_a_reentrant_checkpoint_around_it() -> None:
    model, twin = pair(dropout=0.5)
    x = images().requires_grad_()
    for each in (model, twin):
        torch.manual_seed(3)
        checkpoint(each, x, use_reentrant=True).square().sum().backward()
    assert_alike(gradients(model), gradients(twin))


def test_two_forwards_before_a_backward() -> None:
    model, twin = pair()
    a, b = images(), images()
    for each in (model, twin):
        (each(a) * each(b)).sum().backward()
    assert_alike(gradients(model), gradients(twin))
    assert graph_report(model).replayed == 1
    assert "before the backward of an earlier call" in graph_report(model).reason
    assert_same_steps(model, twin, [a])
    assert graph_report(model).replayed == 2


def test_a_forward_whose_backward_never_comes() -> None:
    model, _ = pair()
    y = model(images())
    model(images())
    assert graph_report(model).replayed == 1
    del y
    model(images())
    assert graph_report(model).replayed == 2


def test_a_mode_is_not_captured_while_a_backward_may_come() -> None:
    model, twin = pair()
    x = images()
    for each in (model, twin):
        y = each(x)
        with torch.no_grad():
            each(x)
        y.square().sum().backward()
    assert_alike(gradients(model), gradients(twin))
    assert "may still come" in next(iter(graph_report(model).without))


def test_other_captures_may_run_before_a_backward() -> None:
    model, twin = pair()
    x = images()
    with torch.no_grad():
        model(x), twin(x)
    for each in (model, twin):
        y = each(x)
        with torch.no_grad():
            each(x + 1)
        y.square().sum().backward()
    assert_alike(gradients(model), gradients(twin))
    assert graph_report(model).replayed == 3


def test_a_second_backward() -> None:
    model, twin = pair()
    x = images()
    for each in (model, twin):
        y = each(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
    assert_alike(gradients(model), gradients(twin))
    assert_alike([*model.buffers()], [*twin.buffers()])
    assert graph_report(model).replayed == 1


def test_a_second_backward_after_another_forward() -> None:
    model, twin = pair()
    x, z = images(), images()
    for each in (model, twin):
        y = each(x)
        y.sum().backward(retain_graph=True)
        each(z).sum().backward()
        y.square().sum().backward()
    assert_alike(gradients(model), gradients(twin), 1e-4)
    assert graph_report(model).replayed == 2


def test_second_derivatives() -> None:
    model, twin = twins(network())
    x = images()
    captured(model, [x.clone().requires_grad_()], TapeRecorder)
    results = []
    for each in (model, twin):
        value = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(value).square().sum(), value, create_graph=True)
        gradient.square().sum().backward()
        results.append([gradient.detach(), value.grad, *gradients(each)])
    assert_alike(*results, 1e-4)  # type: ignore[arg-type]
    assert graph_report(model).replayed == 1


def test_a_second_backward_of_random_numbers_is_refused() -> None:
    model, _ = pair(dropout=0.5)
    y = model(images())
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"draws random numbers.*ungraphed\(model\).* would do"):
        y.sum().backward()


def test_a_second_backward_of_a_changed_model_is_refused() -> None:
    model, _ = pair()
    y = model(images())
    y.sum().backward(retain_graph=True)
    model.eval()
    with pytest.raises(RuntimeError, match="attribute training of the model has changed"):
        y.sum().backward()


def test_a_parameter_that_is_written_before_the_backward() -> None:
    model, twin = pair()
    for each in (model, twin):
        y = each(images())
        with torch.no_grad():
            each[6].weight.add_(1)
            each[3].conv.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Doing(nn.Module):
    """A linear layer that does something more in its forward."""

    def __init__(self, more: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
        self.calls = 0
        self.more = more
        self.dice = random.Random(0)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> Any:
        return self.more(self, self.linear(x))


LEARNED = torch.ones(3, dtype=torch.float32, device="cpu", requires_grad=True)


def counted(model: Any, y: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return y


def of_own_generator(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(1, generator=model.generator, dtype=torch.float32, device="cpu")


class Out:
    """What is no tensor."""


DOING: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "counts": (counted, "attribute calls of the model has changed"),
    "python": (lambda m, y: y * random.random(), "Python's random"),
    "generator": (of_own_generator, "the generator generator of a Doing"),
    "waits": (lambda m, y: y * y.sum().item(), "operation not permitted"),
    "learned": (lambda m, y: y * LEARNED, r"\(3,\) that requires a gradient"),
    "object": (lambda m, y: (y, Out()), "returns a Out"),
    "raises": (lambda m, y: y.no_such_attribute, "AttributeError"),
    "alternates": (lambda m, y: y * (1 - 2 * (next(SIGNS) % 2)), "off by 2"),
}
SIGNS = iter(range(1 << 30))


@pytest.mark.parametrize("name", DOING)
def test_forwards_that_a_replay_would_not_repeat(name: str) -> None:
    more, why = DOING[name]
    model = Doing(more)
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    with pytest.raises(CannotCapture, match=why):
        captured(model, [x], TapeRecorder)
    assert "forward" not in vars(model)
    assert model.linear.weight is next(model.parameters())
    with pytest.raises(ValueError, match="graphed has not been called"):
        graph_report(model)


def test_a_forward_that_writes_into_its_arguments() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3, dtype=torch.float32, device="cpu"))
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    before = x.clone()
    with pytest.raises(CannotCapture, match="writes into its arguments"):
        captured(model, [x], TapeRecorder)
    assert torch.equal(x, before)


def parts() -> dict[str, tuple[Callable[[], nn.Module], str]]:
    def with_hook() -> nn.Module:
        model = network()
        model[1].register_full_backward_hook(lambda *_: None)
        return model

    def with_buffer() -> nn.Module:
        model = network()
        model[1].running_mean.requires_grad_()
        return model

    def of_inference() -> nn.Module:
        with torch.inference_mode():
            return network()

    return {
        "hook": (with_hook, "backward hooks on 1: .* work"),
        "buffer": (with_buffer, "running_mean is a buffer that requires a gradient"),
        "layer": (lambda: nn.Conv2d(3, 3, 3, dtype=torch.float32, device="cpu"), r"nn\.Sequential\(model\)"),
        "lazy": (lambda: nn.Sequential(nn.LazyConv2d(3, 3, dtype=torch.float32, device="cpu")), "not initialised"),
        "compiled": (lambda: nn.Sequential(torch.compile(network(), backend="eager")), "reduce-overhead"),  # type: ignore[arg-type]
        "wrapped": (lambda: nn.Sequential(nn.DataParallel(network())), "is a DataParallel"),
        "meta": (lambda: network().to("meta"), "all must be on cpu"),
        "inference": (of_inference, "inference_mode"),
        "script": (lambda: torch.jit.script(nn.Sequential(nn.ReLU())), "TorchScript"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", parts())
def test_models_that_cannot_be_captured(name: str) -> None:
    make, why = parts()[name]
    with pytest.raises(CannotCapture, match=why):
        captured(make(), [images()], TapeRecorder)


def test_global_hooks() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(CannotCapture, match="on every module"):
            captured(network(), [images()], TapeRecorder)
    finally:
        handle.remove()


def test_hooks_that_work() -> None:
    model, twin = twins(network())
    seen: list[list[str]] = []
    for each in (model, twin):
        log: list[str] = []
        seen.append(log)
        each.register_forward_pre_hook(lambda m, args, log=log: log.append("before") or (args[0] * 2,))
        each.register_forward_hook(lambda m, args, y, log=log: log.append("after") or y * 2)
        each.register_full_backward_hook(lambda *_, log=log: log.append("backward"))
        each[0].weight.register_hook(lambda g, log=log: log.append("gradient") or g * 2)
        each[6].weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append("accumulated"))
        if each is model:
            captured(model, [images()], TapeRecorder)
    assert seen == [[], []]
    assert_same_steps(model, twin, [images()])
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(["before", "after", "gradient", "accumulated", "backward"])
    assert graph_report(model).replayed == 1


def test_without_a_gpu_the_device_is_named() -> None:
    model = network()
    with pytest.raises(ValueError, match="the example is on cpu: CUDA graphs need tensors on a CUDA device"):
        tilewise.graphed(model, images())
    with pytest.raises(ValueError, match="those given are on: none"):
        tilewise.graphed(model, 3)
    with pytest.raises(ValueError, match=r"a torch\.nn\.Module would do"):
        tilewise.graphed(3, images())  # type: ignore[type-var]
