"""fbfft Figure 7: batched 1-D transforms of short signals, forward and inverse, against cuFFT.

Vasilache et al. 2014, Figure 7 and Section 5.4; as ``fft2d_speed``, of signals.
"""

from __future__ import annotations

from harness import transforms
from harness.result import Result
from harness.settings import Settings
from harness.transforms import draw as draw

DEFAULTS = {**transforms.DEFAULTS, "batches": "4,32,128,1024,4096,16384,65536,1048576"}
QUICK = {**transforms.QUICK, "sizes": "8,192"}


def run(settings: Settings) -> Result:
    """One row a size, direction and batch."""
    return transforms.speeds(settings, 1)
