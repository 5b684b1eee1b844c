"""Parts of a product at once on a CPU (Hadjis et al. 2015, Caffe con Troll, section 2.2 and Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewise.machine.device import cpu_count
from tilewise.machine.threads import bounds_threads
from tilewise.problems.gemm.cuts import cut
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.gemm._product import ProductSplit

__all__ = ["RowShares"]


class RowShares(ProductSplit):
    """Runs p parts of the rows, or of the columns where these are more, at once on n threads, with n / p threads each.

    A library that divides a thin product among its threads itself may do so along the short axis.
    """

    name, version = "row_shares", 1
    devices = frozenset({"cpu"})
    axis, level, at_once = "rows", 2, True

    def axis_of(self, p: GemmProblem) -> str:
        """The longer axis of the result."""
        return "rows" if p.m >= p.n else "columns"

    def unsupported(self, p: GemmProblem) -> list[str]:
        """Reasons: a result of one number, a single core, or a torch whose threads cannot be limited for each part."""
        reasons = [] if max(p.m, p.n) > 1 else ["one row and one column cannot be divided"]
        if cpu_count() < 2:
            reasons.append("this process may use one core, which computes one part at a time")
        if not bounds_threads():
            reasons.append("torch's threads cannot be bounded part by part: it was not built with OpenMP")
        return reasons

    def sizes(self, p: GemmProblem, policy: str) -> Sequence[int]:
        """Nothing: its parts are in :meth:`divisions`."""
        return ()

    def divisions(self, p: GemmProblem, threads: int) -> Sequence[tuple[int, ...]]:
        """As many equal parts as there are threads, then smaller powers of two of parts."""
        whole = max(p.m, p.n)
        powers = [2**n for n in range((threads - 1).bit_length() - 1, 0, -1)]
        counts = dict.fromkeys(min(count, whole) for count in (threads, *powers))
        return [_equal(whole, count) for count in counts if count > 1]

    def child(self, p: GemmProblem, size: int) -> GemmProblem:
        """The product of a part of ``size`` in any of :meth:`divisions`, where larger parts come first."""
        whole = max(p.m, p.n)
        _, _, changes = cut(p, self.axis_of(p), math.gcd(size, whole) % whole, size)
        return replace(p, **changes)


def _equal(whole: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that add up to ``whole`` and differ by at most one, the larger first."""
    size, more = divmod(whole, count)
    return (size + 1,) * more + (size,) * (count - more)
