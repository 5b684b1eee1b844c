"""Solvers of local response normalization: torch's own, one pass over memory, and parts of the batch."""
