"""Triton kernels. Importing a kernel's module imports Triton: callers import it when they bind."""
