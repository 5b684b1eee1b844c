"""Which mesh is chosen, and why others are out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run
from torch import nn

from tilewise.distributed.mesh.choose import MeshChoice, choose_mesh
from tilewise.distributed.mesh.cost import Cluster, LinkSpeed
from tilewise.distributed.mesh.events import Kernel
from tilewise.distributed.mesh.trace import trace_step
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem

RATES = {"copy": 1e6, "fp32": 1e7, "tf32": 1e8, "bf16": 2e8, "fp16": 2e8, "launch": 0.001, "kernel": 0.001}


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))


def choose(shape: tuple[int, ...], gpus: int, **given) -> MeshChoice:
    return choose_mesh(network(), torch.empty(shape, device="meta"), gpus=gpus, rates=RATES, **given)


def reasons(choice: MeshChoice) -> dict[str, str]:
    return {str(result.mesh): result.reason for result in choice.results}


def test_enough_images_are_shared_out() -> None:
    choice = choose((8, 3, 64, 64), 4)
    assert choice.best is not None
    assert choice.best.mesh.data == 4
    times = [r.cost.image_ms for r in choice.results if r.cost]
    assert times == sorted(times)
    assert len(times) == 6
    assert choice.single.cost is not None
    assert choice.single.cost.image_ms > choice.best.cost.image_ms > choice.single.cost.image_ms / 4


def test_one_image_is_cut() -> None:
    choice = choose((1, 3, 512, 128), 4)
    assert choice.best is not None
    assert choice.best.mesh.dims == ("h",)  # its halos are the thinnest of all
    assert reasons(choice)["data=4"] == "a batch of 1 is not divisible by data=4"
    assert reasons(choice)["data=2 w=2"].endswith("not divisible by data=2")
    assert choice.results[-1].cost is None


def test_a_slow_link_keeps_images_whole() -> None:
    slow, quick = (
        choose((2, 3, 64, 64), 2, cluster=Cluster(link)) for link in (LinkSpeed(1e7, 1e-3), LinkSpeed(1e12, 1e-7))
    )
    for found in (slow, quick):
        assert found.best is not None
        assert found.best.mesh.data == 2
    lost = [
        {str(r.mesh): r.cost.image_ms - found.best.cost.image_ms for r in found.results if r.cost}["h=2"]
        for found in (slow, quick)
        if found.best is not None and found.best.cost is not None
    ]
    assert lost[0] > 10 * lost[1] > 0


def test_what_does_not_fit_is_out_with_its_needs() -> None:
    free = choose((2, 3, 256, 256), 2)
    totals = {str(r.mesh): r.cost.memory.total for r in free.results if r.cost}
    limit = totals["data=2"] - 1
    choice = choose((2, 3, 256, 256), 2, memory_limit=limit)
    assert reasons(choice)["data=2"].startswith("needs ")
    assert all((r.cost.memory.total > limit) == r.reason.startswith("needs ") for r in choice.results if r.cost)
    nothing = choose((2, 3, 256, 256), 2, memory_limit="10KiB")
    assert nothing.best is None
    assert all("the limit is 10.0 KiB" in r.reason for r in nothing.results)


def test_shards_that_are_too_small_are_out() -> None:
    assert reasons(choose((1, 3, 64, 6), 8))["w=8"] == "0: w has 6 positions for 8 ranks"
    wide = nn.Conv2d(3, 3, 9, padding=4)
    choice = choose_mesh(wide, torch.empty((1, 3, 64, 12), device="meta"), gpus=4, rates=RATES)
    assert "halo of 4 is wider than the neighbour's shard of 3" in reasons(choice)["w=4"]
    assert reasons(choice)["h=4"] == ""


def test_a_volume_is_cut_along_any_axis() -> None:
    model = nn.Conv3d(1, 2, 3, padding=1)
    choice = choose_mesh(model, torch.empty((1, 1, 16, 16, 16), device="meta"), gpus=8, rates=RATES)
    names = {str(r.mesh) for r in choice.results if not r.reason}
    assert {"d=8", "d=2 h=2 w=2", "h=4 w=2"} <= names
    assert not any("data" in name for name in names)


class Timing(Planner):
    """Knows at once what a problem takes: torch's choice, slow where ``slow`` says so. Counts what it planned."""

    def __init__(self, slow: Callable[[ConvProblem], bool]) -> None:
        super().__init__()
        self.slow = slow
        self.known: dict[ConvProblem, Plan] = {}

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        time = problem.flops / (1e5 if self.slow(problem) else 1e7)
        return self.known.setdefault(problem, Plan(problem.key, "aten", 1, time_ms=time, workspace=1000))

    def remembered(self, problem: ConvProblem, options: Options) -> Plan | None:
        return self.known.get(problem)


def test_the_leader_is_measured_until_it_stays_the_leader() -> None:
    planner = Timing(lambda p: p.batch == 1)  # what leads by estimates
    example = torch.empty((2, 3, 64, 64), device="meta")
    given = {"gpus": 2, "rates": RATES, "planner": planner}
    before = choose_mesh(network(), example, **given)
    assert not planner.known
    assert before.best is not None
    assert before.best.mesh.data == 2
    assert set(before.best.cost.sources) == {"estimated"}
    measured = choose_mesh(network(), example, rigor="measure", **given)
    assert measured.best is not None
    assert measured.best.mesh.data == 1
    assert set(measured.best.cost.sources) == {"measured"}
    assert measured.best.cost.memory.workspace in (0, 1000)
    planned = len(planner.known)
    after = choose_mesh(network(), example, **given)
    assert len(planner.known) == planned
    assert after.best == measured.best


def test_parts_are_scaled_from_the_whole_layer() -> None:
    planner = Timing(lambda p: False)
    example = torch.empty((1, 3, 64, 64), device="meta")
    given = {"gpus": 2, "rates": RATES, "planner": planner}
    for problem in trace_problems(network(), example):
        planner.plan(problem)
    choice = choose_mesh(network(), example, **given)
    assert set(choice.single.cost.sources) == {"measured"}
    best = choice.best
    assert best is not None
    assert set(best.cost.sources) == {"scaled"}
    estimated = choose_mesh(network(), example, gpus=2, rates=RATES, planner=Timing(lambda p: False))
    ratio = best.cost.step_ms / next(r for r in estimated.results if r.mesh == best.mesh).cost.step_ms
    alone = choice.single.cost.step_ms / estimated.single.cost.step_ms
    assert ratio == pytest.approx(alone, rel=0.2)  # what a kernel misses of its roofline, its part misses, too


def trace_problems(model: nn.Module, example: torch.Tensor) -> list[ConvProblem]:
    trace = trace_step(model, example, device="cpu")
    return [p for event in trace.events if isinstance(event, Kernel) for p in event.problems]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": True}, "gpus=True"),
        ({"gpus": 2, "rigor": "wisdom_only"}, "rigor='wisdom_only'"),
        ({"gpus": 2, "memory_limit": "lots"}, "memory_limit='lots'"),
        ({"gpus": 2, "device": "meta"}, "meta"),
    ],
)
def test_arguments_that_make_no_sense(given, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        choose_mesh(network(), torch.empty((2, 3, 32, 32), device="meta"), rates=RATES, **given)


def chosen_within_a_job() -> list[str]:
    """Of a model whose norms ask all ranks: here none is asked, and the model keeps its group."""
    norm = nn.SyncBatchNorm(8, process_group=dist.new_group([0, 1]))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm)
    if dist.get_rank() == 1:
        return []
    choice = choose_mesh(model, torch.empty((2, 3, 32, 32), device="meta"), gpus=2, rates=RATES)
    assert type(norm) is nn.SyncBatchNorm
    return [reason for reason in reasons(choice).values() if reason]


def test_one_rank_of_a_job_may_choose() -> None:
    assert run(2, chosen_within_a_job, timeout=60) == [[], []]
