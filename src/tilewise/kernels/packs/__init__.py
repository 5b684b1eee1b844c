"""Packs: compiled kernels in one file, to carry to machines that then need not compile them."""
