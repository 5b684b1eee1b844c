"""Programs in native code: the same bits as in Python, whatever their steps are, and what happens around a call."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.programs.programs import aten, doubled, inputs_of, programs, separately
from torch import Tensor

from tilewise.execute import bind
from tilewise.kernels.native.programs import loading, why_never
from tilewise.nn.programs.program import KEPT_ARENAS, Program
from tilewise.nn.programs.slots import Operator, Place, Slot, Step
from tilewise.plan import Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get

FOUR = ((4,), (1,), torch.float32)
TANH = Operator(aten.tanh.out, (Place(0),), out="out")


@pytest.fixture(autouse=True)
def _native_code() -> None:
    """Skip all where there is no native code, with the reason."""
    if reason := why_never() or loading().finished().reason:
        pytest.skip(reason)


def native(program: Program) -> Program:
    """The program, which runs in native code."""
    assert program.use_native() == ""
    return program


def tanhs(count: int, *, between: Any = None) -> Program:
    """Steps one after the other over vectors of 4 numbers, the second one ``between`` in Python."""
    slots = [Slot(*FOUR, "input"), *[Slot(*FOUR)] * (count - 1), Slot(*FOUR, "output")]
    steps = [Step(f"layer{i}", (i,), i + 1, operator=TANH) for i in range(count)]
    if between is not None:
        steps[1] = Step("between", (1,), 2, between)
    return Program(slots, steps, [0], [count])


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@given(programs(), st.integers(0, 99))
def test_native_code_computes_what_the_steps_do_with_memory_of_their_own(made: Any, seed: int) -> None:
    slots, steps, inputs, outputs = made
    program = native(Program(slots, steps, inputs, outputs))
    for again in range(2):
        tensors = inputs_of(slots, inputs, seed + again)
        before = [tensor.clone() for tensor in tensors]
        found = as_tuple(program(*tensors))
        for have, want in zip(found, separately(slots, steps, inputs, outputs, *before), strict=True):
            assert torch.equal(have, want)
        assert all(map(torch.equal, tensors, before))
        copies = [tensor.clone() for tensor in found]
        program(*inputs_of(slots, inputs, seed + 7))
        assert all(map(torch.equal, found, copies))


def problem(**changes: Any) -> ConvProblem:
    """A small convolution with a filter that stays the same."""
    fields: dict[str, Any] = {
        "pass_": Pass.FPROP, "batch": 2, "in_channels": 5, "out_channels": 7, "groups": 1,
        "axes": (Axis(9, 3, 1, 1, 1, 1), Axis(8, 3, 1, 1, 1, 1)), "constant_weight": True, "checked_weight": False,
        "bias": True,
    }  # fmt: skip
    return ConvProblem(**{**fields, **changes})


def plan_of(p: ConvProblem, name: str) -> Plan:
    """The solver's first config as a plan."""
    solver = get(name)
    return Plan(p.key, name, solver.version, next(iter(solver.configs(p))))


def planned_step(p: ConvProblem, name: str) -> Program:
    """One layer by a plan of the solver, between two others."""
    generator = torch.Generator("cpu").manual_seed(1)
    x, w, y = (torch.randn(p.shape(r), generator=generator, dtype=torch.float32, device="cpu") for r in ("x", "w", "y"))
    constants = [w]
    if p.bias:
        constants.append(torch.randn(p.out_channels, generator=generator, dtype=torch.float32, device="cpu"))
    bound = bind(plan_of(p, name), p, x, w, y)
    slots = [Slot.like(x, "input"), Slot.like(x), *(Slot.like(c, "constant") for c in constants), Slot.like(y)]
    places = [1, *range(2, len(slots) - 1)]
    if p.residual:
        slots.insert(len(slots) - 1, Slot.like(y, "input"))
        places.append(len(slots) - 2)
    slots.append(Slot.like(y, "output"))
    out = len(slots) - 2
    steps = [
        Step("before", (0,), 1, operator=TANH),
        Step("conv", tuple(places), out, plan=bound),
        Step("after", (out,), out + 1, operator=TANH),
    ]
    return Program(slots, steps, [i for i, slot in enumerate(slots) if slot.kind == "input"], [out + 1])


SOLVERS = ["winograd", "fused_lowering", "aten"]


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    "changes", [{}, {"bias": False}, {"activation": "relu", "residual": True}], ids=["bias", "plain", "epilogue"]
)
def test_a_plan_gives_its_own_bits(name: str, changes: dict[str, Any]) -> None:
    program = native(planned_step(problem(**changes), name))
    assert program.native is not None
    assert program.native.in_python == {}
    given = inputs_of(list(program.slots), list(program.inputs), 3)
    for _ in range(2):
        assert torch.equal(program(*given), program.in_python(*given))


def test_a_depthwise_plan_gives_its_own_bits() -> None:
    p = problem(in_channels=8, out_channels=8, groups=8, bias=False)
    program = native(planned_step(p, "depthwise"))
    assert program.native is not None
    assert program.native.in_python == {}
    given = inputs_of(list(program.slots), list(program.inputs), 3)
    assert torch.equal(program(*given), program.in_python(*given))


@pytest.mark.parametrize("name", ["winograd", "aten"])
def test_a_weight_that_changes_in_place_is_seen(name: str) -> None:
    program = native(planned_step(problem(), name))
    given = inputs_of(list(program.slots), list(program.inputs), 3)
    before = program(*given)
    weight = program.slots[2].tensor
    assert weight is not None
    weight.mul_(2)
    after = program(*given)
    assert not torch.equal(before, after)
    assert torch.equal(after, program.in_python(*given))
    assert program.native is not None
    assert torch.equal(program.native.call(*given), after)


def test_a_weight_that_every_call_compares_stays_in_python() -> None:
    program = native(planned_step(problem(checked_weight=True), "winograd"))
    assert program.native is not None
    assert program.native.in_python == {1: "every call looks whether the weight has changed"}
    given = inputs_of(list(program.slots), list(program.inputs), 3)
    assert torch.equal(program(*given), program.in_python(*given))


def test_an_error_names_its_step_and_the_next_call_works() -> None:
    fails = [True]

    def may_fail(x: Tensor, out: Tensor) -> None:
        if fails:
            raise KeyError("no more")
        out.copy_(x)

    program = native(tanhs(3, between=may_fail))
    x = torch.ones(4, dtype=torch.float32, device="cpu")
    with pytest.raises(KeyError, match="no more") as caught:
        program(x)
    assert caught.value.__notes__ == ["in step 1 of 3, 'between'"]
    fails.clear()
    assert torch.equal(program(x), x.tanh().tanh())


@pytest.mark.parametrize("number", [2, 2.5, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_number_stands_for_a_tensor(number: float, dtype: torch.dtype) -> None:
    """As in x + 1, which torch writes as the sum of two tensors; it has no say in the result's type."""
    x = torch.arange(-2, 2, device="cpu").to(dtype)
    want = x * number
    kept, new = (Operator(overload, (Place(0), number)) for overload in (aten.mul.Tensor, aten.add.Tensor))
    slots = [Slot.like(x, "input"), Slot.like(want), Slot.like(want, "output")]
    program = native(
        Program(slots, [Step("mul", (0,), 1, operator=kept), Step("add", (1,), 2, operator=new)], [0], [2])
    )
    assert torch.equal(program(x), want + number)
    assert program(x).dtype is want.dtype


def test_what_is_no_number_does_not_stand_for_a_tensor() -> None:
    x = torch.ones(4, dtype=torch.float32, device="cpu")
    step = Step("mul", (0,), 1, operator=Operator(aten.mul.Tensor, (Place(0), "2")))
    program = Program([Slot.like(x, "input"), Slot.like(x, "output")], [step], [0], [1])
    assert "an argument is a str: a tensor would do" in program.use_native()


def test_an_operators_error_is_torchs_own() -> None:
    product = Operator(aten.mm.default, (Place(0), Place(1)))
    slots = [Slot((2, 3), (3, 1), torch.float32, "input"), Slot((2, 3), (3, 1), torch.float32, "output")]
    program = native(Program(slots, [Step("mm", (0, 0), 1, operator=product)], [0], [1]))
    x = torch.ones(2, 3, dtype=torch.float32, device="cpu")
    messages = []
    for call in (program, program.in_python):
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            call(x)
        assert caught.value.__notes__ == ["in step 0 of 1, 'mm'"]
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_a_tensor_that_a_step_returns_is_checked() -> None:
    slots = [Slot(*FOUR, "input"), Slot(*FOUR, "output")]
    for run, error in ((lambda x: x[:2], ValueError), (lambda x: 1, TypeError)):
        program = native(Program(slots, [Step("bad", (0,), 1, run, returns_new=True)], [0], [1]))
        with pytest.raises(error, match="the step returned"):
            program(torch.ones(4, dtype=torch.float32, device="cpu"))


def test_inputs_that_lie_otherwise_are_refused() -> None:
    program = native(tanhs(2))
    with pytest.raises(ValueError, match="input 0 is float64"):
        program(torch.ones(4, dtype=torch.float64, device="cpu"))
    with pytest.raises(TypeError, match="a tensor would do"):
        program(3)
    with pytest.raises(ValueError, match="2 inputs given"):
        program(*[torch.ones(4, dtype=torch.float32, device="cpu")] * 2)


def test_an_input_that_is_a_view_is_read_where_it_lies() -> None:
    rows = torch.randn(3, 4, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    assert torch.equal(native(tanhs(1))(rows[1]), rows[1].tanh())


def test_the_modes_around_a_call_change_nothing() -> None:
    program = native(tanhs(2, between=doubled))
    x = torch.ones(4, dtype=torch.float32, device="cpu", requires_grad=True)
    want = 2 * x.detach().tanh()
    found = program(x)
    assert not found.requires_grad
    assert torch.equal(found, want)
    with torch.inference_mode():
        assert torch.equal(program(x), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(program(x), want)
    assert torch.equal(program(x), want)


def test_threads_call_one_program_at_the_same_time() -> None:
    program = native(planned_step(problem(), "winograd"))
    inputs = [inputs_of(list(program.slots), list(program.inputs), seed) for seed in range(6)]
    wants = [program.in_python(*given) for given in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        wrong.extend(number for _ in range(30) if not torch.equal(program(*inputs[number]), wants[number]))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert program.native is not None
    assert 1 <= program.native.call.frames() <= KEPT_ARENAS
    program.release()
    assert program.native.call.frames() == 0


def test_a_forked_process_runs_in_python_and_ends() -> None:
    program = native(planned_step(problem(), "winograd"))
    given = inputs_of(list(program.slots), list(program.inputs), 3)
    want = program(*given)
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # torch's operators cannot use OpenMP in a forked process
        same = program.native is None and torch.equal(program(*given), want)
        os._exit(0 if same else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process did not end")


@pytest.mark.slow
def test_an_interrupt_ends_a_long_call() -> None:
    size = 700
    matrix = Slot((size, size), (size, 1), torch.float32)
    slots = [Slot(matrix.shape, matrix.strides, matrix.dtype, "input"), *[matrix] * 2999]
    slots.append(Slot(matrix.shape, matrix.strides, matrix.dtype, "output"))
    product = Operator(aten.mm.out, (Place(0), Place(1)), out="out")
    steps = [Step(f"mm{i}", (i, 0), i + 1, operator=product) for i in range(3000)]
    program = native(Program(slots, steps, [0], [3000]))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        program(torch.zeros(size, size, dtype=torch.float32, device="cpu"))
    timer.join()
    assert "in step" in caught.value.__notes__[0]


def test_workspaces_lie_in_the_arena() -> None:
    program = native(planned_step(problem(), "fused_lowering"))
    assert program.native is not None
    assert program.native.arena_bytes > program.arena_bytes


def test_native_code_is_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_NATIVE", "0")
    program = tanhs(2)
    assert program.use_native() == "TILEWISE_NATIVE is 0"
    x = torch.ones(4, dtype=torch.float32, device="cpu")
    assert torch.equal(program(x), x.tanh().tanh())
