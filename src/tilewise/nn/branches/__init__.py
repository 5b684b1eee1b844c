"""Parallel branches of a network, run on CUDA streams of their own where that is faster."""
