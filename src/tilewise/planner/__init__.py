"""Finds plans: estimates, measures, keeps the time/workspace Pareto front."""

from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.planner import Planner, Progress
from tilewise.planner.workers import WorkersWarning

__all__ = ["NoPlanError", "Options", "Planner", "Progress", "WorkersWarning"]
