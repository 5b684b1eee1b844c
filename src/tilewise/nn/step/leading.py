"""Rank 0 leads the comparison of steps in a program of several ranks, and the others follow.

It goes in rounds of question and answer. Every rank says which plans it has and what its steps are like. Rank 0 says
which steps, by their numbers, are to be timed; every rank times its own and answers; for each step the slowest rank
counts. At last rank 0 says what holds for all, from a step on that lies ahead of every rank. Nobody waits for anything
meanwhile: ranks look for messages every few steps, and run by plans until there is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tilewise.comm.agreement import named_ranks, several_ranks
from tilewise.nn.ranks.post import Post
from tilewise.nn.step.blocks import HURRIED
from tilewise.nn.step.lead import (
    EXPLORING_PAIRS,
    ROUNDS,
    Alone,
    Anew,
    Lead,
    Said,
    Times,
    Trial,
    Verdict,
    pairs_of,
)
from tilewise.nn.step.pairs import Pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import Asked, Key, Search, concluded, search, why_nothing_to_compare

__all__ = ["Chief", "Following", "Leading", "lead_of"]

LOOK = 4
"""Steps between two looks for a message."""
AHEAD = 2 * LOOK
"""What rank 0 says holds so many steps later than any rank is known to be: all have heard of it by then."""
CHUNK = 10
"""Pairs that are timed between two answers, at most: then rank 0 sees whether more are needed."""
FRUITLESS = 4
"""Answers without a single pair that counts on all ranks, after which steps are taken to be too irregular."""


def lead_of(name: str) -> Lead:
    """What leads this process, or joins it to the other ranks under ``name``. Raises ``PostLost`` as a post does."""
    if not several_ranks():
        return Alone()
    return Leading(Post(name)) if dist.get_rank() == 0 else Following(Post(name))


def names_of(gains: Mapping[Key, float]) -> dict[str, Key]:
    """The keys by a text that is the same on all ranks."""
    return {f"{problem.key} deterministic={flag}": (problem, flag) for problem, flag in gains}


def plans_told(gains: Mapping[Key, float], counted: int, stretch: int, number: int) -> dict[str, Any]:
    """The first answer of a rank: its plans, what its steps are like, and where it is."""
    told = {name: None if math.isnan(gains[key]) else gains[key] for name, key in names_of(gains).items()}
    return {"gains": told, "counted": counted, "stretch": stretch, "at": number}


class Chief:
    """What rank 0 says after the answers of all ranks, its own first. It decides and knows no store."""

    def __init__(self) -> None:
        self._gains: dict[str, float] = {}
        self._search: Search[str] | None = None
        self._asked = Asked[str](frozenset(), 0)
        self._taken = Pairs((), ())
        """The pairs of this choice so far."""
        self._counted = self._least = self._trials = self._fruitless = self._ranks = 0
        self._at = 0
        """The largest number of a step that any rank is known to be at."""

    def after(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The next message. Raises ``ValueError`` where answers are not those of one question."""
        why = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer.get("why")]
        if why:
            return ended(why[0])
        if any("anew" in answer for answer in answers):
            return {"anew": True}
        self._at = max(answer["at"] for answer in answers)
        if self._search is None:
            return self._first(answers)
        return self._timed([answer["times"] for answer in answers])

    def _first(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Begin to search among the plans that any rank has, each with the largest gain."""
        for answer in answers:
            for name, gain in answer["gains"].items():
                gained = math.nan if gain is None else gain
                known = self._gains.get(name, gained)
                self._gains[name] = math.nan if math.isnan(gained + known) else max(gained, known)
        reason = why_nothing_to_compare(self._gains)
        if reason:
            return ended(reason)
        counted = max(answer["counted"] for answer in answers)
        self._counted = counted * max(answer["stretch"] for answer in answers)
        self._least, self._ranks = math.ceil(counted / 2), len(answers)
        self._search = search(self._gains, lambda _: ROUNDS, EXPLORING_PAIRS)
        return self._begin(next(self._search))

    def _begin(self, asked: Asked[str]) -> dict[str, Any]:
        """Ask for the first pairs of a choice."""
        self._asked, self._taken = asked, Pairs((), ())
        return self._trial()

    def _trial(self) -> dict[str, Any]:
        """Ask for the pairs that are missing, or some of them: later each time where some rank came too late."""
        self._trials += 1
        before = len(self._taken.first_ms)
        trial = {
            "withheld": sorted(self._asked.withheld),
            "pairs": min(CHUNK, self._asked.pairs - before),
            "counted": self._counted,
            "before": before,
            "wanted": self._asked.pairs,
            "begin": self._at + AHEAD * 2**self._fruitless,
            "seed": self._trials,
        }
        return {"trial": trial}

    def _timed(self, every: Sequence[Times]) -> dict[str, Any]:
        """Take what the ranks have timed, and go on."""
        fresh = pairs_of(slowest(every), self._least)
        self._fruitless = 0 if fresh.first_ms else self._fruitless + 1
        taken = Pairs(self._taken.first_ms + fresh.first_ms, self._taken.second_ms + fresh.second_ms)
        self._taken, done = taken, len(taken.first_ms)
        if self._fruitless >= FRUITLESS:
            return ended(f"ranks do not take the same steps at the same time ({done} of {self._asked.pairs} pairs)")
        if done < self._asked.pairs and not (done >= HURRIED and taken.speedup[2] < 1.0):
            return self._trial()
        assert self._search is not None
        try:
            return self._begin(self._search.send(taken))
        except StopIteration as over:
            made, withheld = concluded(self._gains, over.value)
            report = dataclasses.replace(made, ranks=self._ranks).to_json()
            return {"verdict": {"report": report, "withheld": sorted(withheld), "begin": self._at + AHEAD}}


def slowest(every: Sequence[Times]) -> Times:
    """Each step's time on the slowest rank; ``None`` where it does not count on one.

    >>> slowest([[[1.0, 2.0]], [[3.0, None]]])
    [[3.0, None]]

    Raises ``ValueError`` where ranks did not time the same blocks.
    """
    return [
        [None if None in column else max(ms for ms in column if ms is not None) for column in zip(*block, strict=True)]
        for block in zip(*every, strict=True)
    ]


def ended(reason: str) -> dict[str, Any]:
    """The message that nothing is compared, for ``reason``."""
    return {"verdict": {"report": StepReport(reason=reason).to_json(), "withheld": [], "begin": None}}


class _Joined:
    """What leading and following have in common: the post, the names of this rank's plans, and when to look."""

    several = True

    def __init__(self, post: Post) -> None:
        self._post = post
        self._names: dict[str, Key] = {}
        self._looks = 0
        self._is_over = False

    def _is_time(self) -> bool:
        """Whether it is time to look for a message."""
        self._looks += 1
        return self._looks % LOOK == 0

    def _heard(self, message: Mapping[str, Any]) -> Said:
        """What is to be done on this rank by a message of rank 0's."""
        if "trial" in message:
            return Trial(**{**message["trial"], "withheld": self._keys(message["trial"]["withheld"])})
        self._is_over = True
        if "verdict" not in message:
            return Anew()
        verdict = message["verdict"]
        return Verdict(StepReport(**verdict["report"]), self._keys(verdict["withheld"]), verdict["begin"])

    def _keys(self, names: Sequence[str]) -> frozenset[Key]:
        """Those of the named problems that have plans on this rank."""
        return frozenset(self._names[name] for name in names if name in self._names)


class Leading(_Joined):
    """Rank 0: it asks, and decides by what all ranks have answered."""

    patience = 1

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        self._chief = Chief()
        self._own: dict[str, Any] | None = None
        self._question = 0

    @property
    def began(self) -> bool:
        """As :meth:`Lead.began`."""
        return self._own is not None or self._is_over

    def begin(self, gains: Mapping[Key, float], counted: int, stretch: int, number: int) -> None:
        """As :meth:`Lead.begin`."""
        self._names, self._own = names_of(gains), plans_told(gains, counted, stretch, number)

    def timed(self, times: Times, number: int) -> None:
        """As :meth:`Lead.timed`."""
        self._own = {"times": times, "at": number}

    def next(self, number: int) -> Said | None:
        """As :meth:`Lead.next`."""
        if self._is_over or self._own is None or not self._is_time():
            return None
        answers = self._post.answers(self._question)
        if answers is None:
            return None
        message = self._chief.after([{**self._own, "at": number}, *answers])
        self._tell(message)
        return self._heard(message)

    def leave(self, reason: str) -> None:
        """As :meth:`Lead.leave`."""
        if not self._is_over:
            self._is_over = True
            self._tell(ended(f"rank 0: {reason}") if reason else {"anew": True})

    def waits_for(self) -> str:
        """As :meth:`Lead.waits_for`."""
        return f"no answer of {named_ranks(self._post.silent(self._question)) or 'the other ranks'}"

    def _tell(self, message: dict[str, Any]) -> None:
        """Tell the others, who answer it next."""
        self._question += 1
        self._post.tell(self._question, message)


class Following(_Joined):
    """Another rank: it does what rank 0 says."""

    patience = 2  # rank 0 is to give up first, and to say why

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        self._answers = 0

    @property
    def began(self) -> bool:
        """As :meth:`Lead.began`."""
        return self._answers > 0 or self._is_over

    def begin(self, gains: Mapping[Key, float], counted: int, stretch: int, number: int) -> None:
        """As :meth:`Lead.begin`."""
        self._names = names_of(gains)
        self._answer(plans_told(gains, counted, stretch, number))

    def timed(self, times: Times, number: int) -> None:
        """As :meth:`Lead.timed`."""
        self._answer({"times": times, "at": number})

    def next(self, number: int) -> Said | None:
        """As :meth:`Lead.next`."""
        if self._is_over or not self._answers or not self._is_time():
            return None
        message = self._post.told(self._answers)
        return None if message is None else self._heard(message)

    def leave(self, reason: str) -> None:
        """As :meth:`Lead.leave`: as the next answer, which rank 0 reads when it has asked."""
        if not self._is_over:
            self._is_over = True
            self._answer({"why": reason} if reason else {"anew": True})

    def waits_for(self) -> str:
        """As :meth:`Lead.waits_for`."""
        return "no word of rank 0"

    def _answer(self, message: dict[str, Any]) -> None:
        """Answer rank 0's question."""
        self._post.answer(self._answers, message)
        self._answers += 1
