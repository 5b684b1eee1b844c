"""Parts of the batch at once on a CPU (Hadjis et al. 2015, Caffe con Troll, section 2.2 and Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewise.machine.device import cpu_count
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.conv import ConvSplit
from tilewise.solvers.splits._batch import batch_part


class Partition(ConvSplit):
    """Runs p parts of the batch at once on n threads, with n / p threads each. WGRAD adds its parts in order.

    Never more threads are at work than torch has in the calling thread, also where that number has changed since the
    plan was made. With one thread the parts run one after the other.
    """

    name, version = "partition", 1
    devices = frozenset({"cpu"})
    axis, level, at_once = "batch", 2, True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: a batch of 1, a single core, or a torch whose threads cannot be limited for each part."""
        reasons = [] if p.batch > 1 else ["a batch of 1 cannot be divided"]
        if cpu_count() < 2:
            reasons.append("this process may use one core, which computes one part at a time")
        if not bounds_threads():
            reasons.append("torch's threads cannot be bounded part by part: it was not built with OpenMP")
        return reasons

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Nothing: its parts are in :meth:`divisions`."""
        return ()

    def divisions(self, p: ConvProblem, threads: int) -> Sequence[tuple[int, ...]]:
        """As many equal parts as there are threads, then smaller powers of two of parts."""
        powers = [2**n for n in range((threads - 1).bit_length() - 1, 0, -1)]
        counts = dict.fromkeys(min(count, p.batch) for count in (threads, *powers))
        return [_equal(p.batch, count) for count in counts if count > 1]

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of a part of ``size`` in any of :meth:`divisions`, where larger parts come first."""
        return batch_part(p, size, math.gcd(size, p.batch))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)


def _equal(whole: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that add up to ``whole`` and differ by at most one, the larger first."""
    size, more = divmod(whole, count)
    return (size + 1,) * more + (size,) * (count - more)
