"""Solvers of pooling: torch's own, and a kernel for a CPU."""
