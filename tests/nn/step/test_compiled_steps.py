"""Steps of models that ``torch.compile`` has traced: how they are compared, or why they are not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from tests.nn.step.test_live_models import (
    Network,
    Promising,
    _solvers_and_service,  # noqa: F401
    begun,
    example,
    of_step,
    own_clock,  # noqa: F401
    step,
    switched,
    trained,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
from tilewise.nn.layers.kinds import is_planned


@pytest.fixture(autouse=True)
def _new_traces() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("in_place", [False, True])
def test_live_steps_that_are_compiled_say_why_they_are_not_compared(in_place: bool) -> None:
    x, model = example(), Network()
    begun(model, x, "lowering_type1")
    assert of_step(model).pending
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    for _ in range(3):
        step(model if in_place else compiled, x)
    made = of_step(model)
    assert not made.pending
    assert "its steps are not seen: torch.compile traced the model" in made.reason
    assert str(made) == f"step: not compared, {made.reason}"
    assert is_planned(model.first)


def test_a_compiled_model_that_is_optimized_later_says_it_too() -> None:
    x, model = example(), Network()
    compiled = torch.compile(model, backend="eager")
    step(compiled, x)
    tilewise.optimize(compiled, x, planner=Promising("lowering_type1"), wait=False)
    tilewise.wait(compiled)
    for _ in range(3):
        step(compiled, x)
    assert "torch.compile traced the model" in of_step(model).reason
    assert "torch.compile traced the model" in of_step(compiled).reason


def test_steps_that_are_seen_after_all_are_compared() -> None:
    x, model = example(), Network(late=True)
    begun(model, x, "lowering_type1")
    with torch.no_grad():
        torch.compile(model, backend="eager")(x)
    assert not of_step(model).pending
    step(model, x)
    assert of_step(model).pending
    trained(model, x)
    assert of_step(model).kept
    assert of_step(model).speedup is not None


def test_a_model_that_is_compiled_during_a_step_of_torchs_has_its_plans() -> None:
    x, model = example(), Network()
    begun(model, x, "lowering_type1")
    plain = tilewise.restore(copy.deepcopy(model))
    switched(model, x)
    compiled = torch.compile(model, backend="eager")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(step(compiled, x), step(plain, x), rtol=1e-4, atol=1e-5)
    assert is_planned(model.first)


def test_a_session_whose_calls_are_all_compiled_says_so() -> None:
    x, model = example(), Network()
    with tilewise.enabled(planner=Promising("lowering_type1")) as session:
        for _ in range(2):
            step(model, x)
        session.wait()
        assert session.report().step is not None
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            step(compiled, x)
        made = session.report().step
        assert made is not None
        assert not made.pending
        assert "torch.compile traced their calls" in made.reason
        step(model, x)
        again = session.report().step
        assert again is not None
        assert again.pending


def test_steps_of_a_compiled_model_are_compared_compiled() -> None:
    """Both ways are compiled once, and switching between them compiles nothing."""
    counter = CompileCounterWithBackend("eager")
    x, model = example(), Network()
    compiled = torch.compile(model, backend=counter)
    step(compiled, x)
    before, ran = counter.frame_count, itertools.count()

    def own(net: nn.Module) -> None:
        assert net is compiled
        next(ran)
        step(net, x)

    tilewise.optimize(compiled, x, step=own, planner=Promising("lowering_type1"))
    made = of_step(compiled)
    assert made.way == "compiled"
    assert made.reason == ""
    assert next(ran) >= 2 * made.pairs
    assert before < counter.frame_count <= before + 3  # with plans, and once more where passes were taken back
    assert str(made).startswith("step (compiled): ")
    assert made == of_step(model)
    frames = counter.frame_count
    step(compiled, x)
    assert counter.frame_count == frames or made.kept


def test_a_compiled_part_makes_a_compiled_step() -> None:
    x, model = example(), Network()
    model.second.compile(backend="eager")
    tilewise.optimize(model, x, planner=Promising("lowering_type1"))
    assert of_step(model).way == "compiled"


def test_a_compiler_that_fails_leaves_the_plans_as_they_are() -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        raise ArithmeticError("no such operator")

    x, model = example(), Network()
    compiled = torch.compile(model, backend=fails)
    tilewise.optimize(compiled, x, planner=Promising("lowering_type1"))
    made = of_step(compiled)
    assert made.way is None
    assert "the step raised BackendCompilerFailed" in made.reason
    assert is_planned(model.first)


def test_an_eager_step_says_that_it_was_eager() -> None:
    x, model = example(), Network()
    tilewise.optimize(model, x, planner=Promising("lowering_type1"))
    made = of_step(model)
    assert made.way == made.to_json()["way"] == "eager"
    assert str(made).startswith("step: ")
