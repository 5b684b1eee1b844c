"""CPU kernels of pooling."""
