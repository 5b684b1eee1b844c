"""What is asked of a planner in another process, as JSON: nothing else goes over a pipe or between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilewise.planner.options import Options
from tilewise.problem import ConvProblem

__all__ = ["Job", "effort", "largest_first", "options_from_json"]

CALL_FLOPS, BYTE_FLOPS = 1e10, 20.0
"""What trying a size and a byte moved take, in flops: enough to tell which problems take longer to measure."""


@dataclass(frozen=True, slots=True)
class Job:
    """One problem to plan, or with ``share`` (index, count) only that share of its sizes to measure.

    The sizes are those between powers of two (``batch_sizes="all"``); with a count of 0 only powers of two.
    """

    problem: ConvProblem
    options: Options
    share: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """A document that :meth:`from_json` reads back."""
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
        return cls(ConvProblem.from_key(problem), options_from_json(members["options"]), share)


def options_from_json(data: object) -> Options:
    """Options of ``dataclasses.asdict``. Raises ``ValueError`` naming the field at fault."""
    return Options(**_members(data, tuple(field.name for field in fields(Options))))


def _members(data: object, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(data, dict) or data.keys() != set(names):
        raise ValueError(f"{data!r:.200}: an object with {', '.join(names)} would do")
    return data


def effort(problem: ConvProblem, options: Options) -> float:
    """How long ``problem`` takes to plan, in a unit of its own, the same on every device: to share work out by."""
    sizes = {"undivided": 1.0, "powers_of_two": 1.0 + problem.batch.bit_length(), "all": float(problem.batch)}
    images = {"undivided": 1.0, "powers_of_two": 2.0, "all": problem.batch / 2}
    policy = options.batch_sizes
    return sizes[policy] * CALL_FLOPS + images[policy] * (problem.flops + BYTE_FLOPS * problem.bytes)


def largest_first(jobs: Iterable[Job]) -> list[Job]:
    """Those that take longest first, so that none of them is left for the end; equal ones as they came."""
    return sorted(jobs, key=lambda job: -effort(job.problem, job.options))
