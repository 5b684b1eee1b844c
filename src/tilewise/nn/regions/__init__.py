"""Regions of a model that are planned as one and run as one list of steps, for inference."""
