"""What commands and benchmarks show: tables for people, documents for programs."""

import importlib

from tilewise import random_states

with random_states.kept():  # rich draws a number from Python's random when it is imported
    importlib.import_module("rich.style")
