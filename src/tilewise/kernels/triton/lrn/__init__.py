"""Triton kernels of local response normalization."""
