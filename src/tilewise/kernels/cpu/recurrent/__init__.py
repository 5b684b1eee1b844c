"""Recurrent layers on a CPU: all steps of one layer in one direction, in one call."""
