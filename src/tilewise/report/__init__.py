"""What commands and benchmarks show: tables for people, JSON documents for programs, and an HTML page."""

import importlib

from tilewise.machine.python_random import python_kept

with python_kept():  # rich draws a number from Python's random when it is imported
    importlib.import_module("rich.style")
