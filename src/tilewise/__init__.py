"""tilewise plans convolutions the way FFTW plans Fourier transforms."""

__version__ = "0.1.0.dev0"
