"""How long the program's backward passes take to launch, which they do in C++, without Python's lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["Backwards"]

SEEN = 5
"""So many of the last backward passes say how long the next one takes."""
SHARE = 0.7
"""The share of a backward that is surely in C++: at its end the program wants Python's lock again."""


class Backwards:
    """Foresees backward passes by those before them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._took: deque[float] = deque(maxlen=SEEN)

    def begin(self, tell: Callable[[float], object]) -> None:
        """A backward begins on this thread: ``tell`` hears for how many seconds it lasts at least, and 0 at its end.

        Nothing is told before the first one has ended, nor where its end is not seen.
        """
        begin = self._clock()

        def ended() -> None:
            """Called by torch at the end of the backward."""
            self._took.append(self._clock() - begin)
            tell(0.0)

        try:
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        except (AttributeError, RuntimeError):  # another version of torch, or a backward of another kind
            return
        if self._took:
            tell(SHARE * min(self._took))
