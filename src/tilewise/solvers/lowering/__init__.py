"""Convolutions as matrix products of lowered images (Hadjis et al. 2015, section 2.1)."""
