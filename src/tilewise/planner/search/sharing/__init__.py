"""Shares of a batch for several devices: which plans they have, and which share each device takes."""
