"""Convolutions of torch's modules and functions, computed by plans."""
