"""Convolutions by Fourier transforms with the spectra in memory (Vasilache et al. 2015)."""
