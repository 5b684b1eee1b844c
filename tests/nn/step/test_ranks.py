"""Several ranks, each a process, time their steps at once and keep the same passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.nn.test_ranks import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

SETUP = """
import itertools, json, time
from tests.nn.test_step_goal import Promising
from tilewise.nn.layers.kinds import is_planned
planner = Promising()
def told(net):
    step = report(net).step
    planned = [is_planned(m) for m in model if isinstance(m, nn.Conv2d)]
    print(json.dumps({"step": step.to_json(), "planned": planned}))
"""


def told(outputs: list[str]) -> list[dict[str, object]]:
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_all_ranks_have_the_times_of_the_slowest_and_keep_the_same(tmp_path: Path) -> None:
    """With plans rank 1's step takes far longer: on rank 0 alone plans would win."""
    outputs = run(
        SETUP
        + """
def step(net):
    net(x).square().mean().backward()
    planned = is_planned(model[0])
    time.sleep(0.02 if planned and rank == 1 else 0.008 if not planned else 0.0)
tilewise.optimize(model, x, step=step, planner=planner)
told(model)
""",
        tmp_path,
    )
    first, second = told(outputs)
    assert first == second
    step = first["step"]
    assert isinstance(step, dict)
    assert step["reason"] == ""
    assert step["ranks"] == 2
    assert not step["kept"]
    assert first["planned"] == [False, False]


@pytest.mark.slow
def test_steps_with_collectives_of_their_own(tmp_path: Path) -> None:
    """Gradients are exchanged within each step, and all ranks run the same number of steps."""
    outputs = run(
        SETUP
        + """
ddp = nn.parallel.DistributedDataParallel(model)
tilewise.optimize(ddp, x + rank, planner=planner)
steps = itertools.count()
ddp(x + rank).square().mean().backward()
norm = sum(float(p.grad.square().sum()) for p in model.parameters())
told(ddp)
print(f"{norm:.6f}")
""",
        tmp_path,
        ranks=3,
    )
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    every = [json.loads(output.splitlines()[-2]) for output in outputs]
    assert every[0] == every[1] == every[2]
    assert every[0]["step"]["reason"] == ""
    assert every[0]["step"]["pairs"] >= 20


def test_one_line_is_said_once_by_rank_0(tmp_path: Path) -> None:
    outputs = run(
        SETUP
        + """
import contextlib, io
import tilewise.nn.layers.plan_table as plan_table
class Quiet(Promising):
    def __init__(self, progress=None):
        super().__init__()
plan_table.Planner = sys.modules["tilewise.nn.optimize"].Planner = Quiet
said = io.StringIO()
with contextlib.redirect_stderr(said):
    tilewise.optimize(model, x)
lines = [line for line in said.getvalue().splitlines() if "; step" in line]
with contextlib.redirect_stderr(said := io.StringIO()):
    tilewise.optimize(model, x, progress=lambda *_: None)
print(json.dumps([len(lines), said.getvalue()]))
""",
        tmp_path,
    )
    assert told(outputs) == [[1, ""], [0, ""]]


@pytest.mark.parametrize("made_up", [False, True])
def test_a_step_that_raises_on_one_rank_is_told_to_the_others(made_up: bool, tmp_path: Path) -> None:
    outputs = run(
        SETUP
        + f"""
counted = itertools.count()
def fails():
    if rank == 1 and next(counted) == 9:
        raise ArithmeticError("diverged")
class Failing(nn.Module):
    def forward(self, y):
        fails()
        return y
def own(net):
    fails()
    net(x).square().mean().backward()
if {made_up}:
    model.append(Failing())
    tilewise.optimize(model, x, planner=planner)
    told(model)
else:
    try:
        tilewise.optimize(model, x, step=own, planner=planner)
    except (ArithmeticError, RuntimeError) as error:
        planned = [is_planned(m) for m in model if isinstance(m, nn.Conv2d)]
        print(json.dumps({{"raised": f"{{type(error).__name__}}: {{error}}", "planned": planned}}))
""",
        tmp_path,
    )
    first, second = told(outputs)
    if made_up:
        assert [each["step"]["reason"] for each in (first, second)] == [  # type: ignore[index]
            "rank 1's step raised ArithmeticError: diverged",
            "the step raised ArithmeticError: diverged",
        ]
        assert first["planned"] == second["planned"]
    else:
        assert first == {
            "raised": "StepFailed: rank 1's step raised ArithmeticError: diverged", "planned": [False, False],
        }  # fmt: skip
        assert second == {"raised": "ArithmeticError: diverged", "planned": [False, False]}


def test_a_rank_that_fails_within_a_collective_raises_nevertheless(tmp_path: Path) -> None:
    """The other rank waits for gradients that never come, until this one has ended."""
    outputs = run(
        SETUP
        + """
import tilewise.nn.ranks.steps as of_steps
of_steps.TELLING_S = 1.0
counted = itertools.count()
ddp = nn.parallel.DistributedDataParallel(model)
def own(net):
    y = net(x).square().mean()
    if rank == 1 and next(counted) == 5:
        raise ArithmeticError("diverged")
    y.backward()
try:
    tilewise.optimize(ddp, x, step=own, planner=planner)
except (ArithmeticError, RuntimeError) as error:
    print(type(error).__name__, flush=True)
    import os
    os._exit(0)
""",
        tmp_path,
    )
    assert outputs[1] == "ArithmeticError\n"
    assert outputs[0].strip().endswith("Error") or outputs[0].strip() == "StepFailed"


def test_ranks_with_plans_for_different_problems_are_an_error_on_all(tmp_path: Path) -> None:
    outputs = run(
        SETUP
        + """
class Fewer(Promising):
    pass
try:
    tilewise.optimize(model, x, planner=planner, filter_fn=lambda name, _: rank == 0 or name != "2")
except RuntimeError as error:
    print(json.dumps({"raised": type(error).__name__}))
""",
        tmp_path,
    )
    assert [each["raised"] for each in told(outputs)] == ["RankMismatch", "RankMismatch"]


def test_ranks_that_are_asked_for_different_goals_compare_nothing(tmp_path: Path) -> None:
    outputs = run(
        SETUP
        + """
tilewise.optimize(model, x, planner=planner, goal="passes" if rank == 1 else "step")
told(model)
""",
        tmp_path,
    )
    for each in told(outputs):
        assert each["step"]["reason"] == "goal='passes'"  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [1, 2])
def test_all_ranks_are_replayed_or_none_is(keeping: int, tmp_path: Path) -> None:
    outputs = run(
        SETUP
        + f"""
from tests.nn.graphs.tape import TapeRecorder
from tilewise.nn.graphs.graphed import captured
def choose(net, examples, *, training):
    if rank >= {keeping}:
        return {{"kept": False, "reason": "slower"}}
    captured(net, examples, TapeRecorder)
    return {{"kept": True, "reason": ""}}
sys.modules["tilewise.nn.optimize"].choose_graphs = choose
tilewise.optimize(model, x, planner=planner, graphs="auto")
print(json.dumps(report(model).facts["graphs"]))
told(model)
""",
        tmp_path,
    )
    first, second = told(outputs)
    assert first == second
    facts = [json.loads(output.splitlines()[-2]) for output in outputs]
    if keeping == 1:
        assert facts[0] == {"kept": False, "reason": "another rank runs without graphs"}
        assert first["step"]["way"] == "eager"  # type: ignore[index]
    else:
        assert first["step"]["way"] == "graph"  # type: ignore[index]
        assert facts[0]["kept"] == facts[1]["kept"] == first["step"]["kept"]  # type: ignore[index]
