"""Batch, group, instance, layer and RMS norms of images that are cut across ranks."""
