"""Finds plans: estimates, measures, keeps the time/workspace Pareto front; schedules of whole networks.

>>> from tilewise.planner import Planner, Progress
>>> def progress(done: int, total: int, text: str) -> None:
...     print(done, "of", total, text)
>>> planner = Planner(progress=progress)
"""

from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.planner import Planner, Progress
from tilewise.planner.processes.workers import WorkersWarning
from tilewise.planner.schedules.schedule import Schedule, ScheduleError

__all__ = ["NoPlanError", "Options", "Planner", "Progress", "Schedule", "ScheduleError", "WorkersWarning"]
