"""Solvers of matrix products."""
