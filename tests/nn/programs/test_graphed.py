"""Programs that are recorded once and replayed, with a recorder on the CPU: results, copies, other threads."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.nn.graphs.tape import TapeRecorder

from tilewise.nn.programs.graphed import Graphed
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Operator, Place, Slot, Step

aten = torch.ops.aten
ROWS = torch.float32


def program(outputs: int = 1) -> Program:
    """``relu(2 x)``, and with two outputs ``2 x`` as well."""
    kinds = ("input", "output" if outputs > 1 else "intermediate", "output")
    slots = [Slot((2, 3), (3, 1), ROWS, kind) for kind in kinds]
    steps = [
        Step("double", (0,), 1, operator=Operator(aten.mul.out, (Place(0), 2), out="out")),
        Step("relu", (1,), 2, operator=Operator(aten.clamp_min.out, (Place(0), 0), out="out")),
    ]
    return Program(slots, steps, [0], [2, 1][:outputs])


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_replay_computes_what_the_steps_do(outputs: int) -> None:
    made = program(outputs)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert made.use_graph([x], TapeRecorder()) == ""
    first = made(x)
    second = made(y)
    want = [torch.relu(2 * x), 2 * x][:outputs]
    for got, wanted in zip(first if outputs > 1 else [first], want, strict=True):
        assert torch.equal(got, wanted)  # not overwritten by the second call
    assert torch.equal(second[0] if outputs > 1 else second, torch.relu(2 * y))


def test_a_replay_takes_tensors_as_the_program_does() -> None:
    made = program()
    assert made.use_graph([torch.randn(2, 3)], TapeRecorder()) == ""
    with pytest.raises(ValueError, match=r"input 0 is float32 \(3, 2\)"):
        made(torch.randn(3, 2))


def test_what_cannot_be_recorded_runs_step_by_step() -> None:
    class Refusing(TapeRecorder):
        def record(self, run):  # type: ignore[no-untyped-def]
            raise RuntimeError("operation not permitted\nin detail")

    made, x = program(), torch.randn(2, 3)
    assert made.use_graph([x], Refusing()) == "RuntimeError: operation not permitted"
    assert torch.equal(made(x), torch.relu(2 * x))


def test_a_call_beside_a_replay_runs_step_by_step() -> None:
    entered, done = threading.Event(), threading.Event()

    class Slow(TapeRecorder):
        def ordered(self) -> None:
            entered.set()
            assert done.wait(60)

    x = torch.randn(2, 3)
    graphed = Graphed(program(), [x], Slow())
    thread = threading.Thread(target=graphed, args=(x,))
    thread.start()
    try:
        assert entered.wait(60)
        assert graphed(x) is NotImplemented
    finally:
        done.set()
        thread.join(60)
    assert torch.equal(graphed(x), torch.relu(2 * x))


def test_a_dropped_recording_is_not_replayed() -> None:
    made, x = program(), torch.randn(2, 3)
    tape = TapeRecorder()
    made.use_graph([x], tape)
    assert made.graph is not None
    assert made.graph.nbytes >= 24
    made.graph = None
    x.add_(1)
    assert torch.equal(made(x), torch.relu(2 * x))
    assert "replay" not in tape.log
