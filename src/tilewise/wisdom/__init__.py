"""Wisdom: what was measured and planned, kept on disk between runs (FFTW's word).

Importing this package is light: SQLite is loaded when a store is first used.
"""

from tilewise.wisdom.database import WisdomWarning
from tilewise.wisdom.paths import cache_dir
from tilewise.wisdom.store import Kept, Summary, Wisdom

__all__ = ["Kept", "Summary", "Wisdom", "WisdomWarning", "cache_dir"]
