"""Jobs for planners in other processes, as JSON: nothing else goes over a pipe or between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilewise.planner.options import Options
from tilewise.problems.base import Problem
from tilewise.problems.kinds import from_key

__all__ = ["Job", "effort", "largest_first", "options_from_json"]

CALL_FLOPS, BYTE_FLOPS = 1e10, 20.0
"""The cost in flops of trying one size, and of a byte moved: enough to tell which problems take longer to measure."""


@dataclass(frozen=True, slots=True)
class Job:
    """A problem to plan, or with ``share`` (index, count) a problem of which only that share of the sizes is measured.

    The sizes are those between powers of two (``batch_sizes="all"``); with a count of 0 only powers of two.
    """

    problem: Problem
    options: Options
    share: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """The job as plain JSON values. :meth:`from_json` reads them back."""
        share = None if self.share is None else list(self.share)
        return {"problem": self.problem.key, "options": asdict(self.options), "share": share}

    @classmethod
    def from_json(cls, data: object) -> Job:
        """Read :meth:`to_json` back. Raises ``ValueError``."""
        members = _members(data, ("problem", "options", "share"))
        share = members["share"]
        if share is not None:
            if not (isinstance(share, list) and len(share) == 2 and all(type(n) is int and n >= 0 for n in share)):
                raise ValueError(f"share={share!r:.80}: null or an index and a count would do")
            share = (share[0], share[1])
        problem = members["problem"]
        if not isinstance(problem, str):
            raise ValueError(f"problem={problem!r:.80}: a problem's key would do")
        return cls(from_key(problem), options_from_json(members["options"]), share)


def options_from_json(data: object) -> Options:
    """Options from the values that ``dataclasses.asdict`` gave. Raises ``ValueError`` naming the field at fault."""
    return Options(**_members(data, tuple(field.name for field in fields(Options))))


def _members(data: object, names: tuple[str, ...]) -> Mapping[str, Any]:
    """``data`` as an object with just these members. Raises ``ValueError``."""
    if not isinstance(data, dict) or data.keys() != set(names):
        raise ValueError(f"{data!r:.200}: an object with {', '.join(names)} would do")
    return data


def effort(problem: Problem, options: Options) -> float:
    """How long ``problem`` takes to plan, in a unit that is the same on every device, for sharing work out."""
    sizes = {"undivided": 1.0, "powers_of_two": 1.0 + problem.batch_size.bit_length(), "all": float(problem.batch_size)}
    images = {"undivided": 1.0, "powers_of_two": 2.0, "all": problem.batch_size / 2}
    policy = options.batch_sizes
    return sizes[policy] * CALL_FLOPS + images[policy] * (problem.flops + BYTE_FLOPS * problem.bytes)


def largest_first(jobs: Iterable[Job]) -> list[Job]:
    """``jobs`` with the longest first, so that none of those is left for the end; equal ones stay in order."""
    return sorted(jobs, key=lambda job: -effort(job.problem, job.options))
