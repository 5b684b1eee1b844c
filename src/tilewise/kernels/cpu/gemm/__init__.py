"""CPU kernels of thin matrix products."""
