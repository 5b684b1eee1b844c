"""Recurrent layers around their plans: how large mini-batches of sequences may be, and which sequences go together."""

from tilewise.rnn.batching import Batches, batch_for, batches
from tilewise.rnn.step_memory import step_bytes

__all__ = ["Batches", "batch_for", "batches", "step_bytes"]
