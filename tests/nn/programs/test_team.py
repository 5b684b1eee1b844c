"""Launches that follow each other are run by one team of threads, with the same bits however many threads come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.nn.programs.programs import inputs_of
from torch import Tensor

from tilewise.execute import bind
from tilewise.kernels.native.programs import loading, why_never
from tilewise.nn.programs.program import Program
from tilewise.nn.programs.slots import Slot, Step
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def _native_code() -> None:
    """Skip all where there is no native code, with the reason."""
    if reason := why_never() or loading().finished().reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The number of torch's threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chain(count: int, size: int = 12, threads: tuple[int, ...] = (2, 3, 1)) -> Program:
    """``count`` 3x3 convolutions one after the other, of 24 channels, for different numbers of threads."""
    last = ("channels_last",) * 3
    p = ConvProblem(
        Pass.FPROP, 1, 24, 24, (Axis(size, 3, 1, 1, 1, 1),) * 2, constant_weight=True, checked_weight=False,
        activation="relu", layouts=last,
    )  # fmt: skip
    solver = get("indirect")
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.empty(p.shape("x"), dtype=torch.float32, device="cpu").to(memory_format=torch.channels_last)
    weight = 0.3 * torch.randn(p.shape("w"), generator=generator, dtype=torch.float32, device="cpu")
    weight = weight.to(memory_format=torch.channels_last)
    base = next(c for c in solver.configs(p) if "lines" not in c)
    bound = [
        bind(
            Plan(p.key, "indirect", solver.version, Config(**{**base, "parts": 4, "threads": n, "team": "openmp"})),
            p,
            x,
            weight,
        )
        for n in threads
    ]
    slots = [
        Slot.like(x, "input"),
        Slot.like(weight, "constant"),
        *[Slot.like(x)] * (count - 1),
        Slot.like(x, "output"),
    ]
    places = [0, *range(2, count + 2)]
    steps = [Step(f"conv{i}", (places[i], 1), places[i + 1], plan=bound[i % len(bound)]) for i in range(count)]
    return Program(slots, steps, [0], [count + 1])


def native(program: Program) -> Program:
    assert program.use_native() == ""
    assert program.native is not None
    assert program.native.in_python == {}
    return program


def given(program: Program, seed: int) -> list[Tensor]:
    return inputs_of(list(program.slots), list(program.inputs), seed)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    torch.set_num_threads(2)
    program = native(chain(9))
    torch.set_num_threads(threads)
    for seed in range(20):
        tensors = given(program, seed)
        assert torch.equal(program(*tensors), program.in_python(*tensors))


def test_several_callers_at_once() -> None:
    program = native(chain(9))
    tensors = [given(program, seed) for seed in range(4)]
    wants = [program.in_python(*each) for each in tensors]
    wrong: list[int] = []

    def call(number: int) -> None:
        wrong.extend(number for _ in range(20) if not torch.equal(program(*tensors[number]), wants[number]))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_every_step_has_its_time() -> None:
    program = native(chain(9))
    tensors = given(program, 1)
    start = time.perf_counter()
    taken = program.step_ms(tensors, 3)
    assert len(taken) == 9
    assert min(taken) > 0
    assert sum(taken) < 1e3 * (time.perf_counter() - start)


@pytest.mark.slow
def test_an_interrupt_ends_a_team() -> None:
    """Between launches, which take a second together."""
    program = chain(200, size=400, threads=(2,))
    assert program.use_native(checked=False) == ""
    (x,) = given(program, 1)
    program(x)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def call_for_long() -> None:
        for _ in range(1000):
            program(x)

    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call_for_long()
    timer.join()
    small = native(chain(4))
    tensors = given(small, 2)
    assert torch.equal(small(*tensors), small.in_python(*tensors))


ALONE = """
import torch
torch.set_num_threads(3)
from tests.nn.programs.test_team import chain, given, native
program = native(chain(4))
for seed in range(3):
    tensors = given(program, seed)
    assert torch.equal(program(*tensors), program.in_python(*tensors))
print("same")
"""


@pytest.mark.slow
def test_a_team_of_one_thread_does_not_wait_for_others() -> None:
    """OpenMP gives fewer threads than are asked for where the user limits them."""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr[-2000:]
