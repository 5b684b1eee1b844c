"""What a device must be able to do so that a model's forward and backward can be captured and replayed on it."""

from __future__ import annotations

from tilewise.machine.recording import Recorder, recorder_of

__all__ = ["CannotCapture", "Recorder", "recorder_of"]


class CannotCapture(RuntimeError):
    """A model that cannot be captured, or not with these arguments. The message says why.

    On a GPU, where a model waits for a result in its forward:

    >>> try:  # doctest: +SKIP
    ...     tilewise.graphed(model, images)
    ... except tilewise.nn.CannotCapture as error:
    ...     print("runs without graphs:", error)
    """
