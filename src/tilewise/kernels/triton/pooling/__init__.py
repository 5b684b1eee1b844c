"""Triton kernels of pooling."""
