"""Finds plans: estimates, measures, keeps the time/workspace Pareto front; schedules of whole networks."""

from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.planner import Planner, Progress
from tilewise.planner.schedule import Schedule, ScheduleError
from tilewise.planner.workers import WorkersWarning

__all__ = ["NoPlanError", "Options", "Planner", "Progress", "Schedule", "ScheduleError", "WorkersWarning"]
