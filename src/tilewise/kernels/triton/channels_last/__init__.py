"""Kernels over tensors whose channels lie innermost."""
