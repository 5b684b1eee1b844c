"""Depthwise convolutions computed directly."""
