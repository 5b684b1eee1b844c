"""Solvers that call other libraries: torch's own convolution, and cuDNN's engines."""
