"""Regions of a model that run as one list of steps, for inference."""
