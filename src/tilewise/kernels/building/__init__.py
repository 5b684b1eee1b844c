"""Building kernels: compiling them ahead, in worker processes, and keeping machine code on disk."""
