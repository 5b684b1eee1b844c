"""What cannot be shared is said, and an error or an interrupt in one part ends the step and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from tests.nn.shared.nets import F64, assert_alike, convolutional, images, loss_of, normed, twins
from torch import nn

import tilewise
from tilewise.nn import ReplicaError


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "one of the two"),
        ({"parts": 2, "devices": ("cpu",)}, "one of the two"),
        ({"parts": 0}, "parts=0"),
        ({"parts": True}, "parts=True"),
        ({"devices": "cpu"}, "a tuple of devices"),
        ({"devices": ()}, "a tuple of devices"),
        ({"devices": ("cuda:77",)}, "'cuda:77' is not here"),
        ({"devices": ("meta",)}, "'meta' is not here"),
        ({"devices": ("nowhere",)}, "'nowhere' is no device"),
        ({"devices": (3.5,)}, "3.5 is no device"),
        ({"parts": 2, "shares": (1,)}, "2 numbers"),
        ({"parts": 2, "shares": (0, 0)}, "at least one of them above 0"),
        ({"parts": 2, "shares": (1, -1)}, "0 or more"),
        ({"parts": 2, "shares": (1, float("nan"))}, "0 or more"),
        ({"parts": 2, "shares": "ab"}, "2 numbers"),
        ({"parts": 2, "graphs": "always"}, "graphs='always'"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tilewise.shared(nn.Linear(2, 2), **arguments)


def test_a_model_that_cannot_be_shared_is_named() -> None:
    inner = nn.Linear(2, 2)
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("kept", torch.ones(1, dtype=F64, device="cpu", requires_grad=True))
    divided = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    cases = [
        ("no module", "a torch.nn.Module"),
        (tilewise.shared(inner, parts=2), "the module inside"),
        (nn.DataParallel(inner), "the module inside"),
        (nn.LazyLinear(2), "not initialised"),
        (buffered, "kept requires a gradient"),
        (divided, "on cpu, meta"),
    ]
    for model, text in cases:
        with pytest.raises(ValueError, match=text):
            tilewise.shared(model, parts=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "without a tensor"),
        ((3,), "without a tensor"),
        ((torch.zeros((), dtype=F64, device="cpu"),), "first axis"),
        (
            (torch.zeros(3, 2, dtype=F64, device="cpu"), torch.zeros(4, 2, dtype=F64, device="cpu")),
            r"\(3, 2\), \(4, 2\)",
        ),
        ((torch.zeros(3, 2, dtype=F64, device="cpu"), object()), "called with a object"),
        ((torch.zeros(0, 2, dtype=F64, device="cpu"),), "batch of 0"),
        ((torch.zeros(3, 2, dtype=F64, device="cpu").to_sparse(),), "sparse"),
    ],
)
def test_arguments_that_cannot_be_cut_are_named(args: tuple[Any, ...], text: str) -> None:
    shared = tilewise.shared(nn.Linear(2, 2, dtype=F64), parts=2)
    with pytest.raises(ValueError, match=text):
        shared(*args)


class Returning(nn.Module):
    """Returns what ``make`` makes of its argument."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.mean(), r"shape \(\) for 2 samples"),
        (lambda x: x.sum(0), r"shape \(3,\) for 2 samples"),
        (lambda x: {"x": x, "other": object()}, "returns a object"),
        (lambda x: (x, float(x.sum())), "same values beside tensors"),
    ],
)
def test_results_that_cannot_be_joined_are_named(make: Any, text: str) -> None:
    shared = tilewise.shared(Returning(make), parts=2, shares=(1, 1))
    with pytest.raises(ValueError, match=text):
        shared(torch.arange(12, dtype=F64, device="cpu").view(4, 3))


class Failing(nn.Module):
    """Raises for samples that are told to, in its forward or its backward."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error
        self.norm = nn.BatchNorm1d(2, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if (x == 77).any():
            raise self.error("a sample of 77")
        if (x == 78).any():
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise self.error("a sample of 78")


@pytest.mark.filterwarnings("ignore:the model has batch norms")
def test_an_error_in_one_part_names_device_and_samples_and_the_next_step_is_right() -> None:
    model, twin = twins(Failing(ZeroDivisionError))
    shared = tilewise.shared(model, parts=2, shares=(1, 1))
    x = torch.randn(8, 2, dtype=F64, device="cpu")
    for value, where in ((77, "replica 1 on cpu, samples 4 to 8"), (78, "backward of replica 1 on cpu")):
        bad = x.clone()
        bad[6] = value
        before = copy_of(model)
        with pytest.raises(ReplicaError, match=f"{where}.*ZeroDivisionError: a sample of {value}") as caught:
            loss_of(shared(bad)).backward()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        if value == 77:
            assert all(torch.equal(a, b) for a, b in zip(before, copy_of(model), strict=True))
    model.load_state_dict(twin.state_dict())
    shared.eval()
    twin.eval()
    for each in (shared, twin):
        each.zero_grad()
        loss_of(each(x)).backward()
    assert_alike(shared, twin)


def copy_of(model: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in model.state_dict().values()]


class Waiting(nn.Module):
    """Says when it runs, and takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 99).all():
            running.set()
            time.sleep(0.3)
        return self.linear(x)


running = threading.Event()


@pytest.mark.parametrize("threads", [2, 4])
def test_an_interrupt_ends_the_call_and_the_next_one_is_right(threads: int) -> None:
    model, twin = twins(Waiting())
    shared = tilewise.shared(model, parts=2)
    x = torch.randn(4, 2, dtype=F64, device="cpu")
    shared(x)
    running.clear()

    def interrupt() -> None:
        running.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    killer = threading.Thread(target=interrupt)
    try:
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            shared(torch.full((4, 2), 99.0, dtype=F64, device="cpu"))
        killer.join()
        for each in (shared, twin):
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
    finally:
        running.set()
        torch.set_num_threads(before)


def test_calls_that_must_see_torchs_operators_run_on_the_model_and_are_counted() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=2)
    x = images(4)
    shared(x)
    got = torch.func.vmap(shared)(x[None])
    torch.testing.assert_close(got[0], twin(x))
    assert sum(shared.report().alone.values()) == 1
    assert "on the model alone" in str(shared.report())
    assert shared.report().steps == 1


def test_a_batch_of_fewer_samples_than_parts() -> None:
    model, twin = twins(convolutional())
    shared = tilewise.shared(model, parts=5)
    x = images(2)
    for each in (shared, twin):
        loss_of(each(x)).backward()
    assert_alike(shared, twin)
    assert sorted(shared.report().sizes) == [0, 0, 0, 1, 1]


def test_a_model_without_weights_and_one_without_gradients() -> None:
    x = images(3).requires_grad_()
    y = tilewise.shared(nn.ReLU(), parts=2)(x)
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).to(F64))
    shared = tilewise.shared(normed().requires_grad_(False).eval(), parts=2)
    assert not shared(images(3)).requires_grad
