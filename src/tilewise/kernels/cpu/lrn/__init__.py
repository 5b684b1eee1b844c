"""Kernels of local response normalization across channels: one pass over memory for each direction."""
