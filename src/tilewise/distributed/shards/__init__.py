"""Tensors that are cut across ranks: what they are, how they are made, and what they are converted to."""
