"""A program's steps recorded once on a device and replayed by one call: CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.machine.recording import Recorder

__all__ = ["Graphed"]

WARM_UPS = 2
"""Runs before recording, in which libraries take their workspaces."""


class Graphed:
    """Replays of ``steps``, a function of tensors like ``examples``, which returns a tensor or a tuple of them.

    A call copies its tensors to where the recording reads them, replays it on the current stream, and returns copies of
    the results. It returns ``NotImplemented`` while another thread calls it and while somebody else records. Raises
    what ``steps`` raises and ``RuntimeError`` for what cannot be recorded.
    """

    def __init__(self, steps: Callable[..., Any], examples: Sequence[Tensor], recorder: Recorder) -> None:
        self._recorder, self._lock = recorder, threading.Lock()
        with torch.inference_mode(False), torch.no_grad():
            self._statics = [_like(t).copy_(t) for t in examples]

            def run() -> Any:
                return steps(*self._statics)

            for _ in range(WARM_UPS):
                recorder.warm_up(run)
            self._replay, found = recorder.record(run)
        self._single = isinstance(found, Tensor)
        self._results: list[Tensor] = [found] if self._single else list(found)

    @property
    def nbytes(self) -> int:
        """Bytes that the recording and its arguments hold."""
        return self._recorder.bytes() + sum(t.numel() * t.element_size() for t in self._statics)

    def __call__(self, *tensors: Tensor) -> Any:
        """The results for the given tensors, or ``NotImplemented``."""
        recorder = self._recorder
        if recorder.recording() or not self._lock.acquire(blocking=False):
            return NotImplemented
        try:
            with torch.no_grad():
                recorder.ordered()
                for static, tensor in zip(self._statics, tensors, strict=True):
                    static.copy_(tensor)
                self._replay()
                results = [_like(result).copy_(result) for result in self._results]
        finally:
            self._lock.release()
        return results[0] if self._single else tuple(results)


def _like(t: Tensor) -> Tensor:
    """New memory for a tensor that lies as ``t`` does."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
