"""fbfft Figure 7: batched 1-D transforms of short signals, forward and inverse, against cuFFT.

Vasilache et al. 2014, Figure 7 and Section 5.4; as ``fft2d_speed``, of signals.
"""

from __future__ import annotations

from typing import Any

from harness.picture import Figure, speedup_lines
from harness.result import Result
from harness.settings import Settings
from harness.transforms import speeds

DEFAULTS = {
    "sizes": "",
    "batches": "4,32,128,1024,4096,16384,65536,1048576",
    "largest": "1GiB",
    "padding": "3",
    "budget_ms": "150",
    "seconds": "0",
}
QUICK = {"sizes": "8,192", "batches": "4", "largest": "64KiB", "budget_ms": "10"}


def run(settings: Settings) -> Result:
    """One row a size, direction and batch."""
    return speeds(settings, 1)


def draw(document: dict[str, Any]) -> Figure:
    """The figure's two panels."""
    return speedup_lines(document, ("forward", "inverse"))
