"""Helpers that solvers of several families use."""
