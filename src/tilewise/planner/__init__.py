"""Finds plans: estimates, measures, keeps the time/workspace Pareto front."""

from tilewise.planner.options import NoPlanError, Options

__all__ = ["NoPlanError", "Options"]
