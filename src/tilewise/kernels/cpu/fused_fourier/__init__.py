"""Depthwise convolutions by Fourier transforms that never leave a core's cache."""
