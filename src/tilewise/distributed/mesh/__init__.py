"""Finds the fastest mesh of GPUs for a network, by a model of a step's time and memory."""
