"""Triton kernels of recurrent cells."""
