"""Parts of the batch at once on a CPU (Hadjis et al. 2015, Caffe con Troll, section 2.2 and Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewise.device import cpu_count
from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers._batch import batch_part
from tilewise.solvers.base import Cost, Split
from tilewise.threads import bounds_threads


class Partition(Split):
    """p parts of the batch at once with n / p of the n threads each; WGRAD adds its parts up in order.

    Threads are a part's own: never more are at work than torch has in the thread that calls, also where that number has
    changed since the plan was made. With one they run one after the other.
    """

    name, version = "partition", 1
    devices = frozenset({"cpu"})
    axis, level, at_once = "batch", 2, True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """One image has no parts, one core has nobody to run a second, and threads must be bounded part by part."""
        reasons = [] if p.batch > 1 else ["a batch of 1 cannot be divided"]
        if cpu_count() < 2:
            reasons.append("this process may use one core, which computes one part at a time")
        if not bounds_threads():
            reasons.append("torch's threads cannot be bounded part by part: it was not built with OpenMP")
        return reasons

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """None: see :meth:`divisions`."""
        return ()

    def divisions(self, p: ConvProblem, threads: int) -> Sequence[tuple[int, ...]]:
        """As many equal parts as threads, then powers of two below."""
        powers = [2**n for n in range((threads - 1).bit_length() - 1, 0, -1)]
        counts = dict.fromkeys(min(count, p.batch) for count in (threads, *powers))
        return [_equal(p.batch, count) for count in counts if count > 1]

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """A part of ``size`` in any of :meth:`divisions`: larger parts come before those of one image less."""
        return batch_part(p, size, math.gcd(size, p.batch))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Its children's; nothing of its own."""
        return Cost(0, 0, kernels=0)


def _equal(whole: int, count: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger first."""
    size, more = divmod(whole, count)
    return (size + 1,) * more + (size,) * (count - more)
