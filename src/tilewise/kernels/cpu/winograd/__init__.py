"""Winograd's convolutions, by blocks of tiles in a core's cache."""
