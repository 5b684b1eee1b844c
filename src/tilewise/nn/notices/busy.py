"""A line that says before planning that other programs use this machine's cores, so that nobody is surprised later."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.machine import load
from tilewise.nn.notices.channel import say
from tilewise.plan import is_busy
from tilewise.planner import Options, Planner
from tilewise.planner.options import MEASURING
from tilewise.problems.base import Problem

__all__ = ["BUSY", "say_if_busy"]

BUSY = (
    "other programs use this machine's cores: planning takes longer, and times are doubtful; "
    "they are measured again another time"
)


def say_if_busy(planner: Planner, options: Mapping[Problem, Options], *, shown: bool) -> None:
    """Say :data:`BUSY` where it is so and one of these problems is to be measured.

    It may take :data:`tilewise.machine.load.LEAST_S` to find out, which is nothing beside measuring. Nothing is said
    for a planner that plans in a way of its own.
    """
    if type(planner).plan is not Planner.plan:
        return
    unknown = (p for p, o in options.items() if o.rigor in MEASURING and planner.remembered(p, o) is None)
    first = next(unknown, None)
    if first is not None and is_busy(load.others_now(), first.device):
        say(BUSY, shown=shown)
