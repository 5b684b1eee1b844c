"""Recurrent layers around their plans: cells of one's own, and which sequences make a mini-batch that fits.

>>> from tilewise.rnn import batches
>>> list(batches([5, 1, 5, 2], 10, step=1, batch=3))
[[1, 3], [0, 2]]
"""

from tilewise.rnn.batching import Batches, batch_for, batches
from tilewise.rnn.scan import scan
from tilewise.rnn.step_memory import step_bytes

__all__ = ["Batches", "batch_for", "batches", "scan", "step_bytes"]
