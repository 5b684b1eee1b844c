"""What was measured: parts, which are problems with their times, and points, which are all parts at some sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.advice.sweep import Sizes
from tilewise.problems.base import Problem

__all__ = ["Part", "Point"]


@dataclass(frozen=True, slots=True)
class Part:
    """One problem and the milliseconds that it takes by ``solver``, in words ``plan``; torch's own beside it.

    ``ms`` is ``None`` where nothing computes it, and ``reason`` says why. ``checked`` says whether the plan was held
    against float64, ``busy`` whether other processes disturbed its time.

    >>> from tilewise.advice import Part
    >>> round(Part(tilewise.GemmProblem(1000, 1000, 1000), ms=2.0).rate, 3)  # TFLOP/s
    1.0
    """

    problem: Problem
    ms: float | None
    solver: str = ""
    plan: str = ""
    torch_ms: float | None = None
    checked: bool = False
    busy: bool = False
    reason: str = ""

    @property
    def rate(self) -> float | None:
        """TFLOP/s: the floating-point operations of the direct method over the time."""
        return None if not self.ms else self.problem.flops / self.ms / 1e9

    @property
    def torch_rate(self) -> float | None:
        """TFLOP/s of torch's own choice."""
        return None if not self.torch_ms else self.problem.flops / self.torch_ms / 1e9


@dataclass(frozen=True, slots=True)
class Point:
    """All ``parts`` of one step at ``sizes``, which computes ``samples`` samples.

    >>> from tilewise.advice import Part, Point
    >>> point = Point(sizes=(1000,), samples=1000, parts=(Part(tilewise.GemmProblem(1000, 1000, 1000), ms=2.0),))
    >>> point.samples_per_second
    500000.0
    """

    sizes: Sizes
    samples: int
    parts: tuple[Part, ...]

    @property
    def ms(self) -> float | None:
        """Milliseconds of one step, the sum of its parts; ``None`` where one of them has no time."""
        times = [part.ms for part in self.parts]
        return None if None in times else sum(time for time in times if time is not None)

    @property
    def torch_rate(self) -> float | None:
        """TFLOP/s by torch's own choice; ``None`` where that is not known of all parts."""
        times = [part.torch_ms for part in self.parts if part.torch_ms]
        return self.flops / sum(times) / 1e9 if len(times) == len(self.parts) else None

    @property
    def flops(self) -> int:
        """Floating-point operations of one step."""
        return sum(part.problem.flops for part in self.parts)

    @property
    def work(self) -> float:
        """Floating-point operations of one sample."""
        return self.flops / self.samples

    @property
    def rate(self) -> float:
        """TFLOP/s of one step; 0 where it has no time."""
        return self.flops / self.ms / 1e9 if self.ms else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples a second; 0 where the step has no time."""
        return self.samples / self.ms * 1e3 if self.ms else 0.0

    @property
    def checked(self) -> bool:
        """Whether the plans of all parts were held against float64."""
        return all(part.checked for part in self.parts)

    @property
    def busy(self) -> bool:
        """Whether other processes disturbed a time."""
        return any(part.busy for part in self.parts)

    def timed(self, times: tuple[float, ...], *, busy: bool = False) -> Point:
        """The point with other times of its parts, and whether other processes disturbed these."""
        parts = (replace(part, ms=ms, busy=busy) for part, ms in zip(self.parts, times, strict=True))
        return replace(self, parts=tuple(parts))
