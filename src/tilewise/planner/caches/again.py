"""Which problems are planned again: those measured on a busy host, when it is quiet, and those that torch overtook."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.machine import load
from tilewise.plan import Measurement, Plan, device_of, is_busy
from tilewise.planner.options import MEASURING, Options
from tilewise.planner.search.known import Known

__all__ = ["Again"]


class Again:
    """Says what is measured again: what was timed on a busy host, once the host is quiet.

    A process does so once for each problem, whatever comes of it: on a host that is busy again, the newer is kept.
    Where the system does not tell the load, no host is taken to be quiet.
    """

    def __init__(self) -> None:
        self._planned: set[tuple[str, bool]] = set()
        """Keys of the problems that were planned again, and whether a front was looked for."""
        self._dropped: set[str] = set()
        """Keys of the problems whose doubtful measurements were dropped."""
        self._overtaken: set[str] = set()
        """Keys of the problems whose plans torch's own choice has overtaken."""
        self._waiting: set[str] = set()
        """Keys of the problems in memory that were measured on a busy host."""

    def is_wanted(self, plan: Plan, options: Options, *, front: bool = False) -> bool:
        """Whether the problem of ``plan``, which was found before alone or in a ``front``, is to be planned again."""
        if options.rigor not in MEASURING or (plan.problem, front) in self._planned:
            return False
        if plan.problem in self._overtaken and not front:
            return True
        return plan.busy and _is_quiet(plan.device)

    def overtake(self, problems: Iterable[str]) -> None:
        """Note that torch's own choice has overtaken the remembered plans of the problems with these keys."""
        self._overtaken.update(problems)

    def settle(self, problems: Iterable[str]) -> None:
        """Note that the plans of the problems with these keys stay as they are in this process."""
        self._planned.update((problem, False) for problem in problems)

    def begin(self, problem: str, *, front: bool = False) -> None:
        """Note that the problem with this key is planned again now."""
        self._planned.add((problem, front))
        if not front:
            self._overtaken.discard(problem)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Keys of the problems whose measurements in memory the next search is to look at by :meth:`drop`."""
        return tuple(self._waiting)

    def drop(self, problem: str, known: Known, options: Options) -> None:
        """Drop from what is ``known`` of the problem with this key what a search with ``options`` measures again."""
        device = device_of(problem)
        if options.rigor in MEASURING:
            for key in [key for key, m in known.items() if _is_mixed(m, device)]:
                del known[key]
        busy = [key for key, m in known.items() if is_busy(m.load, device)]
        if not busy or problem in self._dropped:
            return
        if options.rigor not in MEASURING or not _is_quiet(device):
            self._waiting.add(problem)
            return
        self._dropped.add(problem)
        self._waiting.discard(problem)
        for key in busy:
            del known[key]


def _is_quiet(device: str) -> bool:
    """Whether the host is known not to be busy now."""
    share = load.others_now()
    return share is not None and not is_busy(share, device)


def _is_mixed(m: Measurement, device: str) -> bool:
    """Whether a time holds an unknown part of the host's: earlier versions kept a mean of both on a GPU."""
    return device != "cpu" and m.time_ms is not None and not m.reason and m.host_ms is None
