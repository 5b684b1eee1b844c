"""Planning by all ranks: they compare what is to be planned, measure a share each, and take rank 0's plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewise.comm.agreement import RankMismatch, agree, receive, send
from tilewise.machine.device import environment
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.ranks.measure import measure_together
from tilewise.plan import Plan
from tilewise.planner import NoPlanError
from tilewise.problems.base import Problem

__all__ = ["plan_together"]


def plan_together(
    plan_table: PlanTable,
    record: Callable[[], Iterable[Problem]],
    deterministic: bool,
    divide: Callable[[], None] | None = None,
    asked: str = "",
) -> None:
    """Run ``record`` on every rank and put rank 0's plans for the problems that it returns into every ``plan_table``.

    Every rank measures a share. ``divide`` is called on rank 0 between measuring and planning, to give problems their
    own limits. ``asked`` is text on further arguments, which must be equal on all ranks. A rank that fails tells the
    others before it raises. Raises :class:`RankMismatch` where ranks differ, what ``record`` raises, ``NoPlanError``
    where rank 0 finds no plan, and ``RuntimeError`` where a rank cannot measure.
    """
    failure: Exception | None = None
    problems: list[Problem] = []
    lines = [f"torch {torch.__version__}", f"{plan_table.options}", f"deterministic={deterministic}", asked]
    try:
        problems = list(dict.fromkeys(record()))
        lines += [environment(device).key for device in sorted({p.device for p in problems})]
        lines += [p.key for p in problems]
    except Exception as error:
        failure = error
        lines.append(f"failed: {error}")
    try:
        agree("\n".join(lines), "what tilewise.optimize is to plan")
    except RankMismatch:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    measured = measure_together(plan_table, problems, deterministic)
    if torch.distributed.get_rank() == 0:
        _plan_and_send(plan_table, problems, deterministic, measured, divide)
        plans_text = _told(plan_table, problems, deterministic)
    else:
        plans_text = _take(plan_table, problems, deterministic, receive())
    agree(plans_text, "the plans that tilewise.optimize found")


def _plan_and_send(
    plan_table: PlanTable,
    problems: list[Problem],
    deterministic: bool,
    measured: list[Any],
    divide: Callable[[], None] | None,
) -> None:
    """On rank 0: merge what was measured, plan, and send the plans, or the error, to the other ranks."""
    try:
        for document in measured:
            plan_table.planner.wisdom.merge(document)
        if divide is not None:
            divide()
        plan_table.plan(problems, deterministic)
        times = plan_table.torch_times(problems)
        rows = []
        for problem in problems:
            plan = plan_table.chosen(problem, deterministic)
            details = plan_table.reasons.get(problem, ""), times.get(problem), plan_table.notes.get(problem, "")
            rows.append([None if plan is None else plan.to_json(), *details, plan_table.limits.get(problem)])
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send({"plans": rows, "facts": plan_table.facts})


def _take(plan_table: PlanTable, problems: list[Problem], deterministic: bool, data: Any) -> str:
    """On other ranks: take rank 0's plans and return them as text, or the reason why they cannot be taken.

    All ranks compare these texts. Raises ``NoPlanError`` where rank 0 sent an error.
    """
    if "error" in data:
        raise NoPlanError(f"rank 0 could not plan: {data['error']}")
    try:
        _learn(plan_table, problems, deterministic, data)
        return _told(plan_table, problems, deterministic)
    except Exception as error:  # the others wait: they hear of it as a difference
        return f"failed: {error}"


def _learn(plan_table: PlanTable, problems: list[Problem], deterministic: bool, data: Any) -> None:
    """Put the plans that rank 0 sent into ``plan_table``, each after a check on this rank.

    Raises ``ValueError`` where the data are malformed or a plan may not be used.
    """
    rows, facts = data["plans"], data["facts"]
    if not isinstance(facts, dict) or not isinstance(rows, list) or len(rows) != len(problems):
        raise ValueError(f"rank 0 sent something else than plans for {len(problems)} problems")
    plan_table.facts.update(facts)
    for problem, (sent, reason, time_ms, note, limit) in zip(problems, rows, strict=True):
        if limit is not None:
            if type(limit) is not int or limit < 0:
                raise ValueError(f"limit={limit!r:.80} of {problem.key}: a number of bytes would do")
            plan_table.limits[problem] = limit
        if sent is None:
            plan_table.refuse(problem, deterministic, str(reason))
        else:
            plan = Plan.from_json(sent)
            plan_table.confirm(problem, deterministic, plan)
            plan_table.learn(problem, deterministic, plan)
        if time_ms is not None:
            plan_table.times[problem] = float(time_ms)
        if note:
            plan_table.notes[problem] = str(note)


def _told(plan_table: PlanTable, problems: list[Problem], deterministic: bool) -> str:
    """The plan table's plans for ``problems`` as text, one line each, for comparison between ranks."""
    plans = (plan_table.chosen(problem, deterministic) for problem in problems)
    return "\n".join("torch's own" if plan is None else json.dumps(plan.to_json(), sort_keys=True) for plan in plans)
