"""Training on a GPU while layers are planned in the background."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

import tilewise
from tilewise.machine.device import device_name
from tilewise.nn import report
from tilewise.nn.background.prepare import ignore_captures
from tilewise.nn.background.service import service
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.vendor._warm import search_on_few

pytestmark = pytest.mark.gpu
PATIENCE_S = 240


def network() -> nn.Module:
    layers = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1)).to("cuda")


def loss_of(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return float(loss)


def test_layers_change_over_and_losses_are_torchs() -> None:
    x = torch.randn(8, 16, 56, 56, dtype=torch.float32, device="cuda")
    model = network()
    plain = copy.deepcopy(model)
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    tilewise.optimize(model, x, wait=False, background_share=0.9)
    begin = time.monotonic()
    while report(model).pending and time.monotonic() - begin < PATIENCE_S:
        assert loss_of(model, x) == pytest.approx(loss_of(plain, x), rel=1e-4), str(report(model))
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == flags
    assert report(model).pending == 0, f"{report(model)}\nturns took {service().allowance.spent_s:.1f} s"
    assert any(layer.replaced for layer in report(model).layers), str(report(model))
    assert loss_of(model, x) == pytest.approx(loss_of(plain, x), rel=1e-4), str(report(model))


def test_a_capture_in_the_middle_is_left_alone() -> None:
    x = torch.randn(4, 16, 28, 28, dtype=torch.float32, device="cuda")
    model = network()
    tilewise.optimize(model, x, wait=False, background_share=0.9)
    for _ in range(20):
        loss_of(model, x)
    with torch.no_grad():
        want = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), tilewise.background.held_off():
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        spent = service().allowance.spent_s
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        assert service().allowance.spent_s == spent
        graph.replay()
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
        for _ in range(20):
            model(x)  # planning goes on
        graph.replay()
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
    tilewise.restore(model)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
@pytest.mark.parametrize("stride", [1, 2])
def test_torch_searches_on_few_images_without_flags_and_keeps_its_memory(pass_: Pass, stride: int) -> None:
    axes = (Axis(31, 3, stride, 1, 1, 1),) * 2
    problem = ConvProblem(pass_, 32, 16, 24, axes, precision="tf32", device=device_name("cuda"))
    search = search_on_few(problem)
    assert search is not None
    free = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del free
    reserved = torch.cuda.memory_reserved()
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    search()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() >= reserved
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == flags


def test_a_thread_that_takes_no_note_of_captures_does_not_disturb_one() -> None:
    x = torch.zeros(64, dtype=torch.float32, device="cuda")
    begun, failed = threading.Event(), list[BaseException]()

    def allocate() -> None:
        """Take memory from the driver, which a capture of another thread forbids by default."""
        assert ignore_captures()
        begun.wait(60)
        try:
            torch.empty(1 << 29, dtype=torch.uint8, device="cuda").fill_(1)
        except BaseException as error:
            failed.append(error)

    torch.cuda.empty_cache()
    thread = threading.Thread(target=allocate)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        begun.set()
        thread.join(60)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert not failed
    assert float(x[0]) == 1.0
