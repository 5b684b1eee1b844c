"""Measuring by all ranks: each measures its share of the problems on its own device, before rank 0 decides."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilewise.comm.agreement import gather, receive, send
from tilewise.machine.device import environment
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.progress import showing
from tilewise.planner import NoPlanError, Planner
from tilewise.planner.options import MEASURING
from tilewise.planner.processes.messages import Job, effort, largest_first, options_from_json
from tilewise.planner.processes.places import own_place
from tilewise.problems.base import Problem
from tilewise.wisdom import Wisdom

__all__ = ["measure_together", "shares_of"]


def measure_together(plan_table: PlanTable, problems: list[Problem], deterministic: bool) -> list[dict[str, Any]]:
    """Measure a share of ``problems`` on every rank; return what other ranks measured, on rank 0 alone.

    The results are wisdom documents for rank 0 to merge; other ranks get an empty list. Rank 0 says who measures what.
    Of ranks that share a device only the first measures, as they would disturb each other. Every rank must call this
    with equal ``problems``. What a rank raises while it measures is raised there, and ``RuntimeError`` with its text on
    all others.
    """
    if not problems or plan_table.options.rigor not in MEASURING:
        return []
    places = gather([_place(device) for device in sorted({p.device for p in problems})])
    task = _assigned(plan_table, problems, deterministic, places)
    if not any(task["shares"]):
        return []
    this_rank, document, failure = torch.distributed.get_rank(), None, None
    try:
        document = _measured(plan_table, problems, task, this_rank)
    except BaseException as error:  # the others wait, whatever it is
        failure = error
    text = None if failure is None else str(failure) or type(failure).__name__
    answers = gather({"wisdom": document, "error": text})
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise RuntimeError(f"rank {rank} could not measure its share: {answer['error']}")
    return [answer["wisdom"] for answer in answers if this_rank == 0 and answer["wisdom"] is not None]


def _place(device: str) -> list[str]:
    """The machine's name and the device's place in it, which tell whether two ranks share a device."""
    return [socket.gethostname(), own_place(device)]


def _assigned(plan_table: PlanTable, problems: list[Problem], deterministic: bool, places: list[Any]) -> dict[str, Any]:
    """What each rank is to measure, with which options and device profiles. Rank 0 decides and sends it to the others.

    Raises ``NoPlanError`` where rank 0 sent an error in its place.
    """
    if torch.distributed.get_rank() != 0:
        received: Any = receive()
        if "error" in received:
            raise NoPlanError(f"rank 0 could not plan: {received['error']}")
        return {"shares": received["shares"], "profiles": received["profiles"]}
    try:
        measuring = [rank for rank, place in enumerate(places) if place not in places[:rank]]
        jobs = [Job(problem, plan_table.constraints(problem, deterministic)) for problem in problems]
        missing = [job for job in jobs if plan_table.planner.remembered(job.problem, job.options) is None]
        shares: list[list[Any]] = [[] for _ in places]
        if len(measuring) > 1:
            index: dict[Problem, int] = {problem: i for i, problem in enumerate(problems)}
            for rank, share in zip(measuring, shares_of(missing, len(measuring)), strict=True):
                shares[rank] = [[index[job.problem], asdict(job.options)] for job in share]
        needed = {problem.device for problem in problems} if any(shares) else set()
        task = {"shares": shares, "profiles": {device: plan_table.planner.profile(device) for device in sorted(needed)}}
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send(task)
    return task


def shares_of(jobs: list[Job], count: int) -> list[list[Job]]:
    """``jobs`` divided into ``count`` lists that take about equally long.

    The largest jobs come first, and each goes to the list with the least work.
    """
    shares: list[list[Job]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for job in largest_first(jobs):
        least = loads.index(min(loads))
        shares[least].append(job)
        loads[least] += effort(job.problem, job.options)
    return shares


def _measured(
    plan_table: PlanTable, problems: list[Problem], task: dict[str, Any], this_rank: int
) -> dict[str, Any] | None:
    """Plan this rank's share. Other ranks than 0 use a temporary store of wisdom, and return its document."""
    share = [(problems[index], options_from_json(options)) for index, options in task["shares"][this_rank]]
    if this_rank == 0:
        with showing(plan_table.planner.progress):
            _plan(plan_table.planner, share)
    if this_rank == 0 or not share:
        return None
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        wisdom = Wisdom(Path(folder) / "wisdom.sqlite3")
        for device, profile in task["profiles"].items():
            wisdom.remember_profile(environment(device).key, profile)
        _plan(Planner(wisdom, plan_table.planner.progress), share)
        return wisdom.to_json()


def _plan(planner: Planner, share: list[tuple[Problem, Any]]) -> None:
    """Plan each problem of a share. One without a plan is passed over, since rank 0 finds the same and says why."""
    tell = planner.progress
    for done, (problem, options) in enumerate(share):
        if tell is not None:
            tell(done, len(share), problem.key)
        try:
            with undisturbed():
                planner.plan(problem, options)
        except NoPlanError:
            continue  # rank 0 finds the same, and says why
