"""Several ranks run the same plans, found by one of them; what differs is an error on every rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from tests.forked import ForkedScript

PRELUDE = """
import sys
import torch, torch.distributed as dist
from torch import nn
import tilewise
from tilewise.nn import report
from tests.nn.dividing import Dividing
rank, ranks = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=ranks)
dist.barrier()  # one that leaves the group while another still connects would end that one's init
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
x = torch.randn(4, 3, 9, 9)
planner = Dividing()
"""
# DistributedDataParallel goes before the group. If it is the last to hold it, torch ends the group while it holds the
# GIL, and waits for gloo's thread, which may itself be waiting for the GIL to let go of what a backward gave its work.
END = """
ddp = None
dist.destroy_process_group()
"""


def run(script: str, tmp_path: Path, ranks: int = 2) -> list[str]:
    """All ranks' outputs; a hang is a failure. A script calls its DistributedDataParallel ``ddp``, if it has one."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    whole = PRELUDE + script + END
    begun = [
        ForkedScript(
            "-c", whole, str(rank), str(tmp_path / "store"), str(ranks),
            environment={**environment, "TILEWISE_CACHE_DIR": str(tmp_path / f"cache{rank}")},
            has_tilewise="TILEWISE_ENABLE" not in environment,  # which takes effect at the import
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        results = [process.finished(timeout=120) for process in begun]
    except subprocess.TimeoutExpired as error:
        for rank, process in enumerate(begun):
            if process.args is not error.cmd:
                error.add_note(f"rank {rank} meanwhile: {process.aborted()}")
        raise
    finally:
        for process in begun:
            process.kill()
    for result in results:
        assert result.returncode == 0, result.stderr
    return [result.stdout for result in results]


pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.mark.slow
def test_one_plans_and_all_run_the_same(tmp_path: Path) -> None:
    outputs = run(
        """
ddp = nn.parallel.DistributedDataParallel(model)
tilewise.optimize(ddp, x, planner=planner)
for _, _, one in report(ddp).passes():
    print(one.role, one.replaced, one.plan.to_json())
assert len(planner.planned) == (5 if rank == 0 else 0)
plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
plain.load_state_dict(model.state_dict())
ddp(x + rank).square().sum().backward()
halves = [plain(x + r).square().sum() / 2 for r in range(2)]
sum(halves).backward()
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-3)
assert type(model(x).grad_fn).__name__.startswith("PlannedConv")
other = model(torch.randn(2, 3, 9, 9))  # never planned by one rank alone
assert not type(other.grad_fn).__name__.startswith("PlannedConv")
assert len(planner.planned) == (5 if rank == 0 else 0)
""",
        tmp_path,
    )
    assert outputs[0] == outputs[1]
    assert outputs[0].count("'solver': 'micro_batch'") >= 5


def test_ranks_that_differ(tmp_path: Path) -> None:
    outputs = run(
        """
for example, options in ((x[: 4 - rank], {}), (x, {"workspace": 100 + rank}), (x[:, : 3 - rank], {})):
    try:
        tilewise.optimize(model, example, planner=planner, **options)
    except (tilewise.nn.RankMismatch, RuntimeError) as error:
        print(type(error).__name__, error)
assert not planner.planned
""",
        tmp_path,
    )
    for rank in range(2):
        first, second, *third = outputs[rank].splitlines()
        assert first.startswith("RankMismatch ranks differ in what tilewise.optimize is to plan: rank 0 has")
        assert "mb4" in first
        assert "mb3" in first
        assert "workspace=100" in second
        assert "workspace=101" in second
        assert "expected input" in " ".join(third)
    assert outputs[0].splitlines()[2].startswith("RankMismatch")
    assert outputs[1].splitlines()[2].startswith("RuntimeError")


def test_a_rank_that_cannot_plan_tells_the_others(tmp_path: Path) -> None:
    outputs = run(
        """
from tilewise.planner import NoPlanError
class Refusing(Dividing):
    def plan(self, problem, options=None):
        raise NoPlanError("nothing fits")
try:
    tilewise.optimize(model, x, planner=Refusing(), workspace=0)
except NoPlanError as error:
    print(error)
""",
        tmp_path,
    )
    assert outputs == ["nothing fits\n", "rank 0 could not plan: nothing fits\n"]


def test_rank_0_reads_the_schedule_for_all(tmp_path: Path) -> None:
    outputs = run(
        """
import pathlib, warnings
warnings.simplefilter("error")
path = pathlib.Path(sys.argv[2]).with_name(f"schedule{rank}.json")  # rank 1 has no such file
if rank == 0:
    path.with_name("wrong0.json").write_text("{}")
    dist.barrier()
else:
    dist.barrier()
tilewise.optimize(model, x, planner=planner)
made = tilewise.schedule(model)
if rank == 0:
    made.save(path)
class Never(Dividing):
    def plan(self, problem, options=None):
        raise AssertionError
tilewise.optimize(model, x, schedule=path, planner=Never())
print([one.plan.to_json()["config"] for _, _, one in report(model).passes()])
assert all(type(model(x + r).grad_fn).__name__.startswith("PlannedConv") for r in range(2))
for given in (path.with_name(f"wrong{rank}.json"), None if rank else path):
    try:
        tilewise.optimize(model, x, schedule=given, planner=Never())
    except (tilewise.ScheduleError, tilewise.nn.RankMismatch) as error:
        print(type(error).__name__, str(error).replace(str(path.parent), ""))
""",
        tmp_path,
    )
    plans, *errors = (list(lines) for lines in zip(*(text.splitlines() for text in outputs), strict=True))
    assert plans[0] == plans[1]
    assert "sizes" in plans[0]
    assert errors[0][0].startswith("ScheduleError /wrong0.json: schema=None")
    assert errors[0][1].startswith("ScheduleError rank 0 could not read the schedule: /wrong0.json: schema=None")
    assert all(text.startswith("RankMismatch ranks differ in the schedule") for text in errors[1])


def test_each_rank_measures_a_share_and_all_hear_of_what_fails(tmp_path: Path) -> None:
    """As if each had a device of its own but the last, which shares rank 0's."""
    outputs = run(
        """
from tests.planner.simulated import PROFILE
from tilewise.machine.device import environment
from tilewise.nn.ranks import measure as measured
from tilewise.nn.ranks import together as share
from tilewise.plan import Plan
from tilewise.planner import Planner
import dataclasses, pathlib
measured.own_place = lambda device: f"device {rank % 2}"
asked = []
class Counting(Planner):
    def plan(self, problem, options=None):
        asked.append(problem)
        return super().plan(problem, options)
measured.Planner = Counting
model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3)).bfloat16()
x = torch.randn(4, 3, 9).bfloat16()
torch.set_num_threads(1)
planner = Counting()
if rank == 0:
    planner.wisdom.remember_profile(environment("cpu").key, PROFILE)
tilewise.optimize(model, x, planner=planner)
first = len(asked)
assert first == (5 + 3 if rank == 0 else 2 if rank == 1 else 0), first
kept = planner.wisdom.to_json()["environments"]
assert len(kept) == (rank == 0)
for _, _, one in report(model).passes():
    print(one.plan.to_json())
tilewise.optimize(model, x, planner=planner)
assert len(asked) == first + (5 if rank == 0 else 0)  # from wisdom, and no rank measures
def failing(self, problem, options=None):
    raise RuntimeError("the device fell off")
if rank == 1:
    Counting.plan = failing
try:
    tilewise.optimize(model, x[:3], planner=planner)
except RuntimeError as error:
    print(error)
learn = share.PlanTable.learn
if rank == 2:
    share.PlanTable.learn = lambda self, p, d, plan: learn(self, p, d, dataclasses.replace(plan, workspace=7))
for example in (x, x):
    try:
        tilewise.optimize(model, example, planner=planner)
    except tilewise.nn.RankMismatch as error:
        print(error)
    def broken(*_):
        raise ValueError("no such plan")
    if rank == 2:
        share.PlanTable.learn = broken
""",
        tmp_path,
        ranks=3,
    )
    lines = [output.splitlines() for output in outputs]
    assert lines[0][:5] == lines[1][:5] == lines[2][:5]
    assert all(line.startswith("{'format'") for line in lines[0][:5])
    fault = "the device fell off"
    assert [rest[5] for rest in lines] == [f"rank 1 could not measure its share: {fault}", fault, lines[0][5]]
    for rest in lines:
        assert rest[6].startswith("ranks differ in the plans that tilewise.optimize found: rank 0 has")
        assert "rank 2 has 'failed: no such plan'" in rest[7]


def test_a_plan_that_another_rank_may_not_use_is_an_error_on_all(tmp_path: Path) -> None:
    """Each rank holds what rank 0 sends to its own solvers, to the limit and to float64."""
    outputs = run(
        """
import dataclasses
from tilewise.plan import Config, Plan
from tests import toys
class Wrong(Dividing):
    def plan(self, problem, options=None):
        return dataclasses.replace(Plan(problem.key, *choice), time_ms=1.0)
with toys.installed(toys.toy(name="wrong", compute=lambda self, p, a, b: p.reference(a, b) * 1.001)):
    for choice in (("fft", 4, Config(basis=(24, 1))), ("wrong", 1, Config())):
        try:
            tilewise.optimize(model, x, planner=Wrong())
        except tilewise.nn.RankMismatch as error:
            print(error)
""",
        tmp_path,
    )
    for output in outputs:
        first, second = output.splitlines()
        assert "rank 1 has 'failed: the plan for conv" in first
        assert "fft does not offer basis=24x1 here" in first
        assert "wrong: error 1.0e-03 over the limit" in second
