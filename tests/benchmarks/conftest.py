"""Puts ``benchmarks/`` where its own files expect it: first on the path, as when ``run.py`` is started."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
