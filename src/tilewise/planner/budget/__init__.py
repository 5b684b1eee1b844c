"""One workspace budget for many kernels: which plan each of them gets."""
