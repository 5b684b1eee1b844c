"""Convolutions as matrix products that read tensors where they lie, in kernels of this package."""
