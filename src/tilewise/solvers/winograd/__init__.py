"""Convolutions by Winograd's minimal filtering, on CPUs and GPUs."""
