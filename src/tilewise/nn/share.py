"""Planning for all ranks: they compare what is to be planned, measure a share each, and take what rank 0 decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from tilewise.comm.agreement import RankMismatch, agree, receive, send
from tilewise.device import environment
from tilewise.nn.book import Book
from tilewise.nn.measured import measure_together
from tilewise.plan import Plan
from tilewise.planner import NoPlanError
from tilewise.problem import ConvProblem

__all__ = ["plan_together"]

Calls = TypeVar("Calls")


def plan_together(
    book: Book,
    record: Callable[[], Calls],
    problems_of: Callable[[Calls], Iterable[ConvProblem]],
    deterministic: bool,
    divide: Callable[[Calls], None] | None = None,
    asked: str = "",
) -> Calls:
    """Run ``record`` on every rank and fill every rank's ``book`` with rank 0's plans for what it found.

    Every rank measures a share. ``divide`` is rank 0's work between recording and planning: it gives problems limits of
    their own. ``asked`` is what else was asked for, which all ranks must agree on. A rank that fails tells the others
    before it raises. Raises :class:`RankMismatch` where ranks differ, what ``record`` raises, ``NoPlanError`` where
    rank 0 finds no plan, and ``RuntimeError`` where a rank cannot measure.
    """
    failure: Exception | None = None
    problems: list[ConvProblem] = []
    lines = [f"torch {torch.__version__}", f"{book.options}", f"deterministic={deterministic}", asked]
    try:
        calls = record()
        problems = list(dict.fromkeys(problems_of(calls)))
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
    measured = measure_together(book, problems, deterministic)
    if torch.distributed.get_rank() == 0:
        _plan_and_send(book, problems, deterministic, measured, lambda: None if divide is None else divide(calls))
        told = _told(book, problems, deterministic)
    else:
        told = _take(book, problems, deterministic, receive())
    agree(told, "the plans that tilewise.optimize found")
    return calls


def _plan_and_send(
    book: Book, problems: list[ConvProblem], deterministic: bool, measured: list[Any], divide: Callable[[], None]
) -> None:
    try:
        for document in measured:
            book.planner.wisdom.merge(document)
        divide()
        book.plan(problems, deterministic)
        times = book.torch_times(problems)
        rows = []
        for problem in problems:
            plan = book.chosen(problem, deterministic)
            told = book.reasons.get(problem, ""), times.get(problem), book.notes.get(problem, "")
            rows.append([None if plan is None else plan.to_json(), *told, book.limits.get(problem)])
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send({"plans": rows, "facts": book.facts})


def _take(book: Book, problems: list[ConvProblem], deterministic: bool, data: Any) -> str:
    """Learn rank 0's plans; what :func:`_told` says of them, or why they cannot be taken, for all to compare."""
    if "error" in data:
        raise NoPlanError(f"rank 0 could not plan: {data['error']}")
    try:
        _learn(book, problems, deterministic, data)
        return _told(book, problems, deterministic)
    except Exception as error:  # the others wait: they hear of it as a difference
        return f"failed: {error}"


def _learn(book: Book, problems: list[ConvProblem], deterministic: bool, data: Any) -> None:
    """Learn what rank 0 sent, each plan after a check of its own here. Raises ``ValueError`` for what may not be."""
    rows, facts = data["plans"], data["facts"]
    if not isinstance(facts, dict) or not isinstance(rows, list) or len(rows) != len(problems):
        raise ValueError(f"rank 0 sent something else than plans for {len(problems)} problems")
    book.facts.update(facts)
    for problem, (sent, reason, time_ms, note, limit) in zip(problems, rows, strict=True):
        if limit is not None:
            if type(limit) is not int or limit < 0:
                raise ValueError(f"limit={limit!r:.80} of {problem.key}: a number of bytes would do")
            book.limits[problem] = limit
        if sent is None:
            book.refuse(problem, deterministic, str(reason))
        else:
            plan = Plan.from_json(sent)
            book.confirm(problem, deterministic, plan)
            book.learn(problem, deterministic, plan)
        if time_ms is not None:
            book.times[problem] = float(time_ms)
        if note:
            book.notes[problem] = str(note)


def _told(book: Book, problems: list[ConvProblem], deterministic: bool) -> str:
    """The plans as text, a line each, to compare."""
    plans = (book.chosen(problem, deterministic) for problem in problems)
    return "\n".join("torch's own" if plan is None else json.dumps(plan.to_json(), sort_keys=True) for plan in plans)
