"""Triton kernels. Importing this package imports Triton: callers import it when they bind."""
