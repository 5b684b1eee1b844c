"""Splits: solvers that divide a problem into parts and leave each part to the planner."""
