"""Recurrent layers around their plans: cells of one's own, and which sequences make a mini-batch that fits."""

from tilewise.rnn.batching import Batches, batch_for, batches
from tilewise.rnn.scan import scan
from tilewise.rnn.step_memory import step_bytes

__all__ = ["Batches", "batch_for", "batches", "scan", "step_bytes"]
