"""Convolutions by Fourier transforms in one kernel, with spectra in registers and caches."""
