"""Replicas that are replayed, by a recorder on a CPU: which calls are captured, and that replays compute the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.nn.graphs.tape import TapeRecorder
from tests.nn.shared.nets import assert_alike, convolutional, images, loss_of, normed, twins
from torch import nn

import tilewise
from tilewise.nn.shared.engine import Engine
from tilewise.nn.shared.shared import SharedModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _said_elsewhere() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has batch norms")
        yield


def captured(model: nn.Module, shares: tuple[int, ...]) -> tuple[SharedModel, list[TapeRecorder]]:
    """A shared model whose replicas are captured as on a GPU, and the recorders as they are made."""
    made: list[TapeRecorder] = []

    def recorder(device: torch.device) -> TapeRecorder:
        made.append(TapeRecorder())
        return made[-1]

    shared = tilewise.shared(model, parts=len(shares), shares=shares)
    shared._engine = Engine(model, (CPU,) * len(shares), shares, {CPU: recorder})
    return shared, made


def recordings(made: list[TapeRecorder]) -> int:
    return sum(recorder.log.count("record") for recorder in made)


def replays(made: list[TapeRecorder]) -> int:
    return sum(recorder.log.count("replay") for recorder in made)


@pytest.mark.parametrize("keep", [False, True])
def test_replays_train_as_the_model_does(keep: bool) -> None:
    model, twin = twins(convolutional())
    shared, made = captured(model, (1, 1))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (shared, twin)]
    for _ in range(6):
        x = images(6)
        for each, optimizer in zip((shared, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=not keep)
            loss_of(each(x)).backward()
            optimizer.step()
        assert_alike(shared, twin)
    assert recordings(made) == 4  # forward and backward of two replicas
    told = shared.report().graphs
    assert all("5 calls replayed from 1 CUDA graphs" in text for text in told), told


def test_a_size_that_comes_once_is_not_captured() -> None:
    model, twin = twins(convolutional())
    shared, made = captured(model, (1, 1))
    for epoch in range(2):
        for batch in (8, 8, 8, 3):
            x = images(batch)
            for each in (shared, twin):
                each.zero_grad()
                loss_of(each(x)).backward()
            assert_alike(shared, twin)
        assert recordings(made) == (4, 8)[epoch]


def test_buffers_of_replays_are_averaged() -> None:
    model, twin = twins(normed())
    shared, made = captured(model, (1, 2))
    plain = tilewise.shared(twin, parts=2, shares=(1, 2))
    for _ in range(4):
        x = images(6)
        for each in (shared, plain):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert_alike(shared, plain)
    assert replays(made)


def test_modes_have_captures_of_their_own() -> None:
    model, twin = twins(nn.Sequential(convolutional(), nn.Hardtanh()))
    shared, made = captured(model, (1, 1))
    for _ in range(3):
        x = images(4)
        for each in (shared, twin):
            each.train()
            loss_of(each(x)).backward()
            each.eval()
        with torch.no_grad():
            torch.testing.assert_close(shared(x), twin(x))
    assert recordings(made) == 6  # an evaluation has no backward
    assert_alike(shared, twin)


def test_what_cannot_be_captured_runs_all_the_same_and_says_why() -> None:
    model, twin = twins(convolutional())
    for each in (model, twin):
        each[0].register_forward_hook(lambda *_: None)  # type: ignore[index, operator]
    shared, made = captured(model, (1, 1))
    for _ in range(3):
        x = images(4)
        for each in (shared, twin):
            loss_of(each(x)).backward()
    assert_alike(shared, twin)
    assert not recordings(made)
    assert all("a replay calls no hooks" in text for text in shared.report().graphs)


def test_two_calls_before_a_backward_do_not_overwrite_each_other() -> None:
    model, twin = twins(convolutional())
    shared, _ = captured(model, (1, 1))
    for _ in range(3):
        x, y = images(4), images(4)
        for each in (shared, twin):
            first, second = each(x), each(y)
            (loss_of(first) + 2 * loss_of(second)).backward()
        assert_alike(shared, twin)


def test_captures_end_with_the_model_that_they_were_made_of() -> None:
    model, twin = twins(convolutional())
    shared, made = captured(model, (1, 1))
    for step in range(6):
        if step == 3:
            for each in (model, twin):
                each[2] = nn.Tanh()  # type: ignore[index, operator]
        x = images(4)
        for each in (shared, twin):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert_alike(shared, twin)
    assert recordings(made) == 8
