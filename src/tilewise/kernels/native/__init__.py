"""Launches of GPU kernels from C: described when a plan is bound, queued by one call."""
