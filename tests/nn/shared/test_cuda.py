"""Models shared among GPUs and the CPU: the same results and gradients as on one device."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn.shared.nets import (
    F64,
    Several,
    assert_alike,
    convolutional,
    gradients,
    images,
    loss_of,
    normed,
    twins,
)  # fmt: skip
from torch import nn

import tilewise
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn import ReplicaError

pytestmark = pytest.mark.gpu
TWO = ("cuda:0", "cuda:1")
DEVICES = [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cpu",), TWO, ("cuda:1", "cuda:0", "cpu")]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with fp32_precision("cuda", "conv", "ieee"), fp32_precision("cuda", "matmul", "ieee"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has batch norms")
        yield


def need(devices: tuple[str, ...]) -> None:
    if "cuda:1" in devices and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")


def trained(model: nn.Module, shared: nn.Module, batches: list[torch.Tensor], tolerance: float) -> None:
    """Both train alike for some steps."""
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in (shared, model)]
    for x in batches:
        for each, optimizer in zip((shared, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(x)).backward()
            optimizer.step()
        assert_alike(shared, model, tolerance)


@pytest.mark.parametrize("graphs", ["auto", "never"])
@pytest.mark.parametrize("home", ["cuda:0", "cpu"])
@pytest.mark.parametrize("devices", DEVICES, ids="+".join)
def test_training_is_that_of_one_device(devices: tuple[str, ...], home: str, graphs: str) -> None:
    need(devices)
    twin, model = twins(convolutional(home))
    shared = tilewise.shared(model, devices=devices, graphs=graphs, shares=(1,) * len(devices))
    trained(twin, shared, [images(n, home) for n in (8, 8, 8, 5, 8, 5, 2, 1)], 1e-9)
    if graphs == "auto":
        for device, text in zip(devices, shared.report().graphs, strict=True):
            assert ("replayed from" in text) == device.startswith("cuda"), text


def dense(device: str) -> nn.Module:
    """More weights than one stage of the backward sends, and linear layers that are worth dividing."""
    return nn.Sequential(
        convolutional(device)[:-1],  # type: ignore[index]
        nn.Linear(72, 2000, dtype=F64, device=device),
        nn.ReLU(inplace=True),
        nn.Linear(2000, 2100, dtype=F64, device=device),
        nn.Tanh(),
        nn.Linear(2100, 5, dtype=F64, device=device),
    )


@pytest.mark.parametrize("graphs", ["auto", "never"])
@pytest.mark.parametrize("sums", ["early", "late"])
@pytest.mark.parametrize("linear", ["always", "never"])
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), TWO, ("cuda:1", "cuda:0"), ("cuda:1",)], ids="+".join)
def test_divided_layers_and_early_sums(devices: tuple[str, ...], linear: str, sums: str, graphs: str) -> None:
    need(devices)
    twin, model = twins(dense("cuda:0"))
    shared = tilewise.shared(
        model, devices=devices, graphs=graphs, shares=(1,) * len(devices), linear=linear, sums=sums
    )
    trained(twin, shared, [images(n, "cuda:0") for n in (8, 8, 8, 5, 8, 5, 2, 1)], 1e-8)
    report = shared.report()
    assert bool(report.rows) == (linear == "always" and len(devices) > 1), report
    if graphs == "auto":
        assert all("replayed from" in text for text in report.graphs), report


@pytest.mark.parametrize("home", ["cuda:0", "cpu"])
@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), TWO, ("cuda:1", "cuda:0", "cpu")], ids="+".join)
def test_early_sums_of_gpus_and_the_cpu(devices: tuple[str, ...], home: str) -> None:
    need(devices)
    twin, model = twins(dense(home))
    shared = tilewise.shared(model, devices=devices, shares=(1,) * len(devices), sums="early")
    trained(twin, shared, [images(n, home) for n in (8, 8, 8, 5, 2)], 1e-8)


class Wide(nn.Module):
    """Many weights of which each sample's gradient is exact, for activations of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 150_000, dtype=F64, device="cuda:0") / 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum(1)


@pytest.mark.parametrize("graphs", ["auto", "never"])
@pytest.mark.parametrize("devices", [TWO, ("cuda:0", "cuda:1", "cuda:0"), ("cuda:1", "cuda:0", "cpu")], ids="+".join)
def test_early_sums_are_the_same_bits_as_late_ones(devices: tuple[str, ...], graphs: str) -> None:
    need(devices)
    models = twins(nn.Sequential(Wide(), nn.Tanh(), Wide(), nn.Tanh(), Wide()))
    both = [
        tilewise.shared(model, devices=devices, graphs=graphs, shares=(1,) * len(devices), sums=sums)
        for model, sums in zip(models, ("early", "late"), strict=True)
    ]
    for step in range(6):
        x = torch.randn(len(devices), 8, dtype=F64, device="cuda:0")
        for each in both:
            each.zero_grad(set_to_none=step % 2 == 0)
            each(x).sum().backward()
        for (name, a), b in zip(both[0].named_parameters(), both[1].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), (step, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", DEVICES, ids="+".join)
def test_measured_shares_compute_the_same(devices: tuple[str, ...]) -> None:
    need(devices)
    twin, model = twins(convolutional("cuda:0"))
    shared = tilewise.shared(model, devices=devices)
    trained(twin, shared, [images(64, "cuda:0") for _ in range(60)], 1e-8)
    report = shared.report()
    assert sum(report.sizes) == 64
    assert report.rates is not None, report


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), TWO], ids="+".join)
def test_batch_norms_average_their_statistics(devices: tuple[str, ...]) -> None:
    need(devices)
    model = normed("cuda:0")
    own = [copy.deepcopy(model) for _ in range(2)]
    shared = tilewise.shared(model, devices=devices, shares=(1, 2))
    for _ in range(4):
        x = images(6, "cuda:0")
        shared(x).square().mean().backward()
        for each, part in zip(own, x.split((2, 4)), strict=True):
            each(part)
        with torch.no_grad():
            for name in ("running_mean", "running_var"):
                values = [each[1].get_buffer(name) for each in own]  # type: ignore[index, operator]
                mean = values[0] / 3 + values[1] * 2 / 3
                for value in values:
                    value.copy_(mean)
                torch.testing.assert_close(model.get_buffer(f"1.{name}"), mean)
    assert int(model.get_buffer("1.num_batches_tracked")) == 4


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), TWO], ids="+".join)
def test_weights_are_copied_when_they_change(devices: tuple[str, ...]) -> None:
    need(devices)
    twin, model = twins(convolutional("cuda:0"))
    shared = tilewise.shared(model, devices=devices, shares=(1, 1))
    x = images(6, "cuda:0")
    for step in range(6):
        torch.testing.assert_close(shared(x), twin(x), rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            for each in (model, twin):
                list(each.parameters())[step % 4].mul_(1.5)
    state = {name: value * 2 for name, value in twin.state_dict().items()}
    for each in (shared, twin):
        each.load_state_dict(state)
    torch.testing.assert_close(shared(x), twin(x), rtol=1e-9, atol=1e-9)
    for each in (model, twin):
        each[0].weight.data.zero_()  # type: ignore[index, union-attr, operator]
    shared.refresh()
    torch.testing.assert_close(shared(x), twin(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), TWO], ids="+".join)
def test_dicts_and_weights_used_twice(devices: tuple[str, ...]) -> None:
    need(devices)
    twin, model = twins(Several().to("cuda:0"))
    shared = tilewise.shared(model, devices=devices, shares=(1, 1))
    for _ in range(4):
        x, y = (torch.randn(7, 6, dtype=F64, device="cuda:0") for _ in range(2))
        for each in (shared, twin):
            each.zero_grad()
            loss_of(each(x, more={"y": y})).backward()
        assert_alike(shared, twin)


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), TWO], ids="+".join)
def test_channels_last_and_autocast(devices: tuple[str, ...]) -> None:
    need(devices)
    model = convolutional("cuda:0", torch.float32).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin, model = twins(model)
    shared = tilewise.shared(model, devices=devices, shares=(3, 1))
    for _ in range(4):
        x = images(8, "cuda:0", torch.float32).to(memory_format=torch.channels_last)
        for each in (shared, twin):
            each.zero_grad()
            with torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
                y = each(x)
            y.float().square().mean().backward()
        assert_alike(shared, twin, 3e-2)


@pytest.mark.parametrize("graphs", ["auto", "never"])
def test_two_gpus_draw_different_numbers(graphs: str) -> None:
    need(TWO)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(1, 4096, device="cuda:0", dtype=F64), nn.Dropout(0.5))
    shared = tilewise.shared(model, devices=TWO, shares=(1, 1), graphs=graphs)
    x = torch.ones(2, 1, device="cuda:0", dtype=F64)
    for _ in range(4):
        torch.manual_seed(5)
        first, second = (shared(x) == 0).double()
        assert 0.4 < float((first == second).double().mean()) < 0.6


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), TWO], ids="+".join)
def test_work_on_a_stream_of_the_callers(devices: tuple[str, ...]) -> None:
    need(devices)
    twin, model = twins(convolutional("cuda:0"))
    shared = tilewise.shared(model, devices=devices, shares=(1, 1))
    stream = torch.cuda.Stream("cuda:0")
    for _ in range(4):
        x = images(6, "cuda:0")
        stream.wait_stream(torch.cuda.current_stream())
        for each in (shared, twin):
            each.zero_grad()
            with torch.cuda.stream(stream):
                loss_of(each(x)).backward()
        torch.cuda.current_stream().wait_stream(stream)
        assert_alike(shared, twin)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), TWO], ids="+".join)
def test_accumulated_gradients_of_inputs_and_weights(devices: tuple[str, ...]) -> None:
    need(devices)
    twin, model = twins(convolutional("cuda:0"))
    shared = tilewise.shared(model, devices=devices, shares=(1, 1))
    for _ in range(5):
        mine, its = (images(6, "cuda:0").requires_grad_() for _ in range(2))
        with torch.no_grad():
            its.copy_(mine)
        for each, x in ((shared, mine), (twin, its)):
            loss_of(each(x)).backward()
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-12)
    assert_alike(shared, twin)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if x.is_cuda and x.device.index == torch.cuda.device_count() - 1:
            raise ZeroDivisionError("here")
        return x


def test_an_error_names_its_device() -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    model = nn.Sequential(nn.Linear(2, 2, device=last, dtype=F64), Failing())
    shared = tilewise.shared(model, devices=("cpu", last), shares=(1, 1))
    for _ in range(3):
        with pytest.raises(ReplicaError, match=f"replica 1 on {last}, samples 2 to 4: ZeroDivisionError: here"):
            shared(torch.ones(4, 2, device=last, dtype=F64))


def test_a_backward_in_another_thread_than_the_forward() -> None:
    devices = TWO if torch.cuda.device_count() > 1 else ("cuda:0", "cpu")
    twin, model = twins(convolutional("cuda:0"))
    shared = tilewise.shared(model, devices=devices, shares=(1, 1))
    for _ in range(4):
        x = images(6, "cuda:0")
        shared.zero_grad()
        twin.zero_grad()
        loss = loss_of(shared(x))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        loss_of(twin(x)).backward()
        assert all(g is not None for g in gradients(model).values())
        assert_alike(shared, twin)
