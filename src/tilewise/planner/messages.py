"""What is asked of a planner in another process, as JSON: nothing else goes over a pipe or between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilewise.axis import Axis
from tilewise.planner.options import Options
from tilewise.problem import ConvProblem, Pass

__all__ = ["Job", "effort", "largest_first", "options_from_json", "problem_from_json", "problem_to_json"]

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
        return {"problem": problem_to_json(self.problem), "options": asdict(self.options), "share": share}

    @classmethod
    def from_json(cls, data: object) -> Job:
        """Read :meth:`to_json` back. Raises ``ValueError``."""
        members = _members(data, ("problem", "options", "share"))
        share = members["share"]
        if share is not None:
            if not (isinstance(share, list) and len(share) == 2 and all(type(n) is int and n >= 0 for n in share)):
                raise ValueError(f"share={share!r:.80}: null or an index and a count would do")
            share = (share[0], share[1])
        return cls(problem_from_json(members["problem"]), options_from_json(members["options"]), share)


def problem_to_json(problem: ConvProblem) -> dict[str, Any]:
    """Every field of ``problem`` in plain JSON values."""
    return {**asdict(problem), "pass_": problem.pass_.value}


def problem_from_json(data: object) -> ConvProblem:
    """Read :func:`problem_to_json` back. Raises ``ValueError`` naming the field at fault."""
    members = dict(_members(data, tuple(field.name for field in fields(ConvProblem))))
    kinds: dict[str, type | tuple[type, ...]] = {
        "pass_": str, "batch": int, "in_channels": int, "out_channels": int, "axes": list, "groups": int,
        "dtype": str, "out_dtype": str, "precision": str, "bias": bool, "accumulate": bool, "constant_weight": bool,
        "layouts": list, "alignment": list, "device": str,
    }  # fmt: skip
    for name, kind in kinds.items():
        value = members[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name}={value!r:.80}: expected {getattr(kind, '__name__', kind)}")
    members["pass_"] = Pass(members["pass_"])
    members["axes"] = tuple(_axis(axis) for axis in members["axes"])
    for name, kind in (("layouts", str), ("alignment", int)):
        if len(members[name]) != 3 or any(type(value) is not kind for value in members[name]):
            raise ValueError(f"{name}={members[name]!r:.80}: three would do")
        members[name] = tuple(members[name])
    return ConvProblem(**members)


def options_from_json(data: object) -> Options:
    """Options of ``dataclasses.asdict``. Raises ``ValueError`` naming the field at fault."""
    return Options(**_members(data, tuple(field.name for field in fields(Options))))


def _axis(data: object) -> Axis:
    members = _members(data, tuple(field.name for field in fields(Axis)))
    if any(type(value) is not int for value in members.values()):
        raise ValueError(f"axes has {data!r:.200}: integers would do")
    return Axis(**members)


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
