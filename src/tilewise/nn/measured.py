"""Measuring by all ranks, each its share of the problems on a device of its own, before rank 0 decides."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilewise.comm.agreement import gather, receive, send
from tilewise.device import environment
from tilewise.nn.book import Book
from tilewise.nn.progress import showing
from tilewise.planner import NoPlanError, Planner
from tilewise.planner.messages import Job, effort, largest_first, options_from_json
from tilewise.planner.places import own_place
from tilewise.planner.planner import MEASURING
from tilewise.problem import ConvProblem
from tilewise.torch_state import undisturbed
from tilewise.wisdom import Wisdom

__all__ = ["measure_together", "shares_of"]


def measure_together(book: Book, problems: list[ConvProblem], deterministic: bool) -> list[dict[str, Any]]:
    """What the other ranks measured of ``problems``, as wisdom documents for rank 0 to merge; elsewhere nothing.

    Rank 0 says who measures what: of ranks that share a device only the first, as they would disturb each other.
    Every rank calls it with equal ``problems``. What a rank raises while it measures is raised there, and
    ``RuntimeError`` with its text on all others.
    """
    if not problems or book.options.rigor not in MEASURING:
        return []
    places = gather([_place(device) for device in sorted({p.device for p in problems})])
    task = _assigned(book, problems, deterministic, places)
    if not any(task["shares"]):
        return []
    own, document, failure = torch.distributed.get_rank(), None, None
    try:
        document = _measured(book, problems, task, own)
    except BaseException as error:  # the others wait, whatever it is
        failure = error
    text = None if failure is None else str(failure) or type(failure).__name__
    answers = gather({"wisdom": document, "error": text})
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise RuntimeError(f"rank {rank} could not measure its share: {answer['error']}")
    return [answer["wisdom"] for answer in answers if own == 0 and answer["wisdom"] is not None]


def _place(device: str) -> list[str]:
    """What tells this rank's device from others': the machine's name and the device's own."""
    return [socket.gethostname(), own_place(device)]


def _assigned(book: Book, problems: list[ConvProblem], deterministic: bool, places: list[Any]) -> dict[str, Any]:
    """Rank 0's word on who measures what, under which options, from which profiles."""
    if torch.distributed.get_rank() != 0:
        told: Any = receive()
        if "error" in told:
            raise NoPlanError(f"rank 0 could not plan: {told['error']}")
        return {"shares": told["shares"], "profiles": told["profiles"]}
    try:
        measuring = [rank for rank, place in enumerate(places) if place not in places[:rank]]
        jobs = [Job(problem, book.constraints(problem, deterministic)) for problem in problems]
        missing = [job for job in jobs if book.planner.remembered(job.problem, job.options) is None]
        shares: list[list[Any]] = [[] for _ in places]
        if len(measuring) > 1:
            index = {problem: i for i, problem in enumerate(problems)}
            for rank, share in zip(measuring, shares_of(missing, len(measuring)), strict=True):
                shares[rank] = [[index[job.problem], asdict(job.options)] for job in share]
        needed = {problem.device for problem in problems} if any(shares) else set()
        task = {"shares": shares, "profiles": {device: book.planner.profile(device) for device in sorted(needed)}}
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send(task)
    return task


def shares_of(jobs: list[Job], count: int) -> list[list[Job]]:
    """``jobs`` in ``count`` lists that take about equally long: the largest first, each to who has least."""
    shares: list[list[Job]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for job in largest_first(jobs):
        least = loads.index(min(loads))
        shares[least].append(job)
        loads[least] += effort(job.problem, job.options)
    return shares


def _measured(book: Book, problems: list[ConvProblem], task: dict[str, Any], own: int) -> dict[str, Any] | None:
    """Plan this rank's share; other ranks than 0 into wisdom that ends with it, which is the result."""
    share = [(problems[index], options_from_json(options)) for index, options in task["shares"][own]]
    if own == 0:
        with showing(book.planner.progress):
            _plan(book.planner, share)
    if own == 0 or not share:
        return None
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        wisdom = Wisdom(Path(folder) / "wisdom.sqlite3")
        for device, profile in task["profiles"].items():
            wisdom.remember_profile(environment(device).key, profile)
        _plan(Planner(wisdom, book.planner.progress), share)
        return wisdom.to_json()


def _plan(planner: Planner, share: list[tuple[ConvProblem, Any]]) -> None:
    tell = planner.progress
    for done, (problem, options) in enumerate(share):
        if tell is not None:
            tell(done, len(share), problem.key)
        try:
            with undisturbed():
                planner.plan(problem, options)
        except NoPlanError:
            continue  # rank 0 finds the same, and says why
