"""Bounds of numbers that are read and kept. Imports nothing, as wisdom is read without torch."""

from __future__ import annotations

__all__ = ["INT64_MAX"]

INT64_MAX = 2**63 - 1
"""The largest 64-bit integer: more bytes no tensor has, and more neither SQLite nor readers of JSON keep exactly."""
