"""Solvers of recurrent layers: torch's own, and stacks of layers around one recurrence each."""
