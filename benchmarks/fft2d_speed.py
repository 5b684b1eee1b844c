"""fbfft Figure 8: batched 2-D transforms of small planes, forward and inverse, against cuFFT.

Vasilache et al. 2014, Figure 8 and Section 5.4. ``torch.fft`` is the baseline, cuFFT on a GPU; both allocate their
results. Batches go from the figure's to as many planes as ``largest`` bytes hold. The groups beside forward and inverse
are of planes ``padding`` shorter than the transform, which torch pads, and of frequency-major spectra, which torch
transposes. ``share_of_copy`` is the time of a device copy of the task's least bytes, over ours: the floor's share.
"""

from __future__ import annotations

from harness import transforms
from harness.result import Result
from harness.settings import Settings
from harness.transforms import draw as draw

DEFAULTS = {**transforms.DEFAULTS, "batches": "4,32,128,1024,4096,16384,65536"}
QUICK = {**transforms.QUICK, "sizes": "8,16"}


def run(settings: Settings) -> Result:
    """One row a size, direction and batch."""
    return transforms.speeds(settings, 2)
