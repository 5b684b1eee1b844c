"""Numba kernels for CPUs. Importing a module of this package but ``sizes`` imports Numba: callers do when they bind."""
