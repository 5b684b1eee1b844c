"""What commands and benchmarks show: tables for people, JSON documents for programs, and an HTML page."""

import importlib
import random

before = random.getstate()
importlib.import_module("rich.style")  # which draws a number from Python's random when it is imported
random.setstate(before)
del before
