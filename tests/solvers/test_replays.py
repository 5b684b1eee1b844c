"""Recorded steps of recurrent layers, which are replayed: the same bits as launched singly, and few recordings.

On a CPU a tape records operators as a CUDA graph records kernels.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.graphs.tape import TapeRecorder
from tests.recurrent import layers

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.recurrent.checks import dense_operands
from tilewise.problems.recurrent.packing import Packing, packing_of
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import SolverUnavailable, get
from tilewise.solvers.common import replays as replays_module
from tilewise.solvers.common.replays import Replays
from tilewise.solvers.recurrent._layers import Layer
from tilewise.solvers.recurrent.stepped import replayed_layers


def taped() -> Replays:
    return Replays(lambda _: TapeRecorder())


@torch.no_grad()
def trained(layer: Layer, p: RecurrentProblem, operands: Any, packing: Packing | None = None) -> list[Any]:
    """Results of a layer, and for training all gradients."""
    named = dict(zip(p.operands, operands, strict=True))
    weights = [named[role] for role in p.weights]
    training = p.task == "training"
    packing = packing_of(p) if packing is None and p.packed else packing
    *results, saved = layer.forward(
        named["x"], named["h0"], named.get("c0"), weights, packing=packing, keep=training
    )  # fmt: skip
    if training:
        ends = [named.get(role) for role in ("dy", "dhn", "dcn")]
        results += layer.backward(saved, weights, *ends, [True] * (3 + len(weights)))
    return results


def same_bits(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@settings(max_examples=4, deadline=None)
@given(data=st.data(), p=layers())
def test_replays_have_the_bits_of_single_launches(data: st.DataObject, p: RecurrentProblem) -> None:
    block = data.draw(st.integers(0, p.time - 1), "block")
    replays = taped()
    layer = replayed_layers(p, block, replays)
    plain = get("stepped").layer(p, Config(block=block) if block else Config())  # type: ignore[attr-defined]
    calls = [dense_operands(p, seed) for seed in (1, 2, 3)]
    found = [trained(layer, p, operands) for operands in calls]
    for got, operands in zip(found, calls, strict=True):  # after all calls: none changed what another returned
        same_bits(got, trained(plain, p, operands))
    assert 0 < len(replays) <= replays_module.MOST_OWN
    assert not any("CUDA" in reason and "kept" not in reason for reason in replays.reasons)


def test_other_lengths_are_recorded_when_they_come_again() -> None:
    p = RecurrentProblem("gru", 5, 2, 3, 4)
    replays = taped()
    layer = replayed_layers(p, 0, replays)
    counts = []
    for time in (5, 5, 3, 3, 3):
        trained(layer, p, dense_operands(RecurrentProblem("gru", time, 2, 3, 4), time))
        counts.append(len(replays))
    assert counts == [1, 1, 1, 2, 2]
    packed = RecurrentProblem("gru", 5, 2, 3, 4, packed=8)
    layer, counts = replayed_layers(packed, 0, replays), []
    operands = dense_operands(packed, 1)
    for sizes in ([2, 2, 2, 1, 1], [2, 2, 2, 2], [2, 2, 2, 1, 1], [2, 2, 2, 2]):
        trained(layer, packed, operands, Packing(torch.tensor(sizes)))
        counts.append(len(replays))
    assert counts == [2, 2, 3, 4]


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_module, "MOST_OWN", 2)
    replays = taped()
    for size in (1, 2, 3, 4):
        x = torch.ones(size)
        for _ in range(2):
            (y,) = replays("twice", lambda t: (t + t,), [x], at_once=True)
            assert torch.equal(y, x + x)
    assert len(replays) == 2
    assert list(replays.reasons.values()) == [4]
    assert "2 of one layer, are kept at the most" in next(iter(replays.reasons))


def test_what_cannot_be_recorded_runs_as_it_is_and_says_why() -> None:
    replays_module._told.clear()
    replays, x = Replays(), torch.ones(3)
    with pytest.warns(UserWarning, match="launched singly, as no CUDA graph could record them: .*CUDA device"):
        (y,) = replays("twice", lambda t: (t + t,), [x], at_once=True)
    assert torch.equal(y, x + x)
    replays("twice", lambda t: (t + t,), [x], at_once=True)  # is not tried again
    assert list(replays.reasons.values()) == [1]
    with pytest.raises(SolverUnavailable, match="CUDA graphs need a GPU"):
        get("stepped").layer(RecurrentProblem("gru", 5, 2, 3, 4), Config(steps="replayed"))  # type: ignore[attr-defined]


def test_tensors_of_another_look_have_recordings_of_their_own() -> None:
    replays, whole = taped(), torch.randn(4, 6)
    for x in (whole, whole[:, ::2], whole.T, whole[1:], whole.double()):
        for _ in range(2):
            (y,) = replays("square", lambda t: (t * t,), [x], at_once=True)
            assert torch.equal(y, x * x)
    assert len(replays) == 5


def test_threads_take_turns() -> None:
    replays = taped()
    wrong: list[int] = []

    def run(number: int) -> None:
        x = torch.full((50,), float(number))
        for _ in range(40):
            (y,) = replays("twice", lambda t: (t + t,), [x], at_once=True)
            if not torch.equal(y, x + x):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(p=layers(device=device_name(torch.device("cuda")) if torch.cuda.is_available() else "cpu"))
def test_on_a_gpu_graphs_have_the_bits_of_single_launches(p: RecurrentProblem) -> None:
    solver: Any = get("stepped")
    with p.flags(deterministic=False):
        layer, plain = solver.layer(p, Config(steps="replayed")), solver.layer(p, Config())
        calls = [dense_operands(p, seed) for seed in (1, 2, 3)]
        found = [trained(layer, p, operands) for operands in calls]
        for got, operands in zip(found, calls, strict=True):
            same_bits(got, trained(plain, p, operands))


@pytest.mark.gpu
def test_within_a_capture_steps_are_part_of_it() -> None:
    p = RecurrentProblem("lstm", 6, 3, 8, 16, task="training", device=device_name(torch.device("cuda")))
    solver: Any = get("stepped")
    layer, operands = solver.layer(p, Config(steps="replayed")), dense_operands(p, 1)
    want = trained(solver.layer(p, Config()), p, operands)
    replays = layer.recurrence.replays
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trained(solver.layer(p, Config()), p, operands)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = trained(layer, p, operands)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(got, want)
    assert not len(replays)
    same_bits(trained(layer, p, operands), want)
    assert len(replays) == 2
    assert not replays.reasons
