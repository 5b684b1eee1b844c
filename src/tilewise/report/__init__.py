"""What commands and benchmarks show: tables for people, JSON documents for programs, and an HTML page."""

import importlib

from tilewise.machine import random_states

with random_states.kept():  # rich draws a number from Python's random when it is imported
    importlib.import_module("rich.style")
