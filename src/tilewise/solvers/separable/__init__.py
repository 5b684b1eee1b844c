"""Solvers of depthwise convolutions with pointwise ones around them: torch's own, and strips that stay in cache."""
