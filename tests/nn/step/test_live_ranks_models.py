"""Models in several ranks whose own steps are compared while they train, with the collectives of their backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.test_ranks import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

SETUP = """
import contextlib, io, json, warnings
from tests import toys
from tests.nn.step.test_live_models import Clock, EXTRA_S, Promising, Slow, late
from tests.nn.step.test_live_programs import Network
import tilewise.nn.step.live as live
Clock.now = 0.0
live.moment = Clock.look
solvers = contextlib.ExitStack()
solvers.enter_context(toys.installed(Slow()))
solvers.enter_context(toys.one_thread())
torch.manual_seed(1)
x = torch.randn(2, 2, 12, 12)
def told(made, ways, model, said=""):
    gradients = [f"{float(p.grad.square().sum()):.5f}" for p in model.parameters()]
    print(json.dumps({"step": made.to_json(), "text": str(made), "ways": ways, "gradients": gradients, "said": said}))
    solvers.close()
"""


def told(script: str, tmp_path: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank came to."""
    return [json.loads(output.splitlines()[-1]) for output in run(SETUP + script, tmp_path, ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("gains", [True, False])
def test_training_in_parallel_while_planning_is_enabled(wait: bool, gains: bool, tmp_path: Path) -> None:
    first, second = told(
        f"""
model = Network(late={gains})
ddp = nn.parallel.DistributedDataParallel(model)
with tilewise.enabled(planner=Promising("lowering_type1" if {gains} else "slow"), wait={wait}) as session:
    for _ in range(500):
        ddp.zero_grad()
        ddp(x + rank).square().mean().backward()
    told(session.report().step, model.ways, model)
""",
        tmp_path,
    )
    assert first == second
    assert first["step"]["reason"] == ""
    assert first["step"]["kept"] is gains
    assert first["step"]["ranks"] == 2
    assert first["ways"][-1] is gains
    assert 30 < sum(first["ways"]) < 480


def test_one_line_is_said_by_rank_0(tmp_path: Path) -> None:
    outputs = told(
        """
import tilewise.nn.script.session as of_session
class Quiet(Promising):
    def __init__(self, progress=None):
        super().__init__("lowering_type1")
of_session.Planner = Quiet
model = Network(late=True)
ddp = nn.parallel.DistributedDataParallel(model)
with contextlib.redirect_stderr(io.StringIO()) as said, tilewise.enabled() as session:
    for _ in range(250):
        ddp(x + rank).square().mean().backward()
told(session.report().step, model.ways, model, said.getvalue())
""",
        tmp_path,
    )
    assert outputs[0]["said"] == f"tilewise: {outputs[0]['text']}\n"
    assert outputs[1]["said"] == ""


def test_a_model_that_was_optimized_before_its_ranks_met(tmp_path: Path) -> None:
    """Each rank has planned by itself; they compare together."""
    first, second = told(
        """
from tilewise.nn.layers.kinds import is_planned
dist.destroy_process_group()
model = Network(late=True)
ways = []
tilewise.optimize(model, x, wait=False, planner=Promising("lowering_type1"))
tilewise.wait(model)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}.new", rank=rank, world_size=ranks)
ddp = nn.parallel.DistributedDataParallel(model)
for _ in range(300):
    ddp.zero_grad()
    ddp(x + rank).square().mean().backward()
    ways.append(is_planned(model.first))
told(report(model).step, ways, model)
""",
        tmp_path,
    )
    assert first["step"]["reason"] == ""
    assert first == second
    assert first["step"]["ranks"] == 2


def test_planning_that_was_enabled_before_the_ranks_met(tmp_path: Path) -> None:
    """As ``tilewise run`` and ``enable()`` at the top of a script do."""
    first, second = told(
        """
dist.destroy_process_group()
with tilewise.enabled(planner=Promising("lowering_type1")) as session:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}.new", rank=rank, world_size=ranks)
    model = Network(late=True)
    ddp = nn.parallel.DistributedDataParallel(model)
    for _ in range(250):
        ddp(x + rank).square().mean().backward()
told(session.report().step, model.ways, model)
""",
        tmp_path,
    )
    assert first == second
    assert first["step"]["kept"]
    assert first["step"]["ranks"] == 2


@pytest.mark.slow
def test_ranks_with_other_goals_do_not_hold_each_other_up(tmp_path: Path) -> None:
    outputs = told(
        """
model = Network(late=True)
ddp = nn.parallel.DistributedDataParallel(model)
goal = "passes" if rank == 1 else "step"
with tilewise.enabled(planner=Promising("lowering_type1"), goal=goal) as session:
    for _ in range(900):
        ddp(x + rank).square().mean().backward()
    told(session.report().step, model.ways, model)
""",
        tmp_path,
    )
    assert outputs[0]["step"]["reason"] == "no answer of rank 1 for 801 steps"
    assert outputs[1]["step"]["reason"] == "goal='passes'"
    assert outputs[0]["ways"] == outputs[1]["ways"]
