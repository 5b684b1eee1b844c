"""Convolutions as matrix products of blocks that are lowered in a core's cache."""
