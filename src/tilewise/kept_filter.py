"""What a constant weight comes to, prepared once and kept beside it."""

from __future__ import annotations

import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tilewise.device import is_capturing
from tilewise.solvers import Prepare
from tilewise.workspaces import aligned

__all__ = ["KeptFilter"]


class KeptFilter:
    """Prepared filters, each kept while its weight's memory and version counter stay the same.

    Layers of one problem share what is bound, so there is one for every weight that is still there. Prepared anew on
    another stream, and at every call for a weight without a version (``torch.inference_mode``). A CUDA graph prepares
    its own at every replay: what it was captured with would not be there before the first, nor stay.
    """

    __slots__ = ("_kept", "_lock", "_prepare", "_size")

    def __init__(self, prepare: Prepare, size: int) -> None:
        self._prepare, self._size = prepare, size
        self._kept: dict[tuple[int, ...], tuple[int, torch.Tensor, StorageWeakRef]] = {}
        self._lock = threading.Lock()

    def of(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """What ``weight`` comes to."""
        if is_capturing(weight.device) or weight.is_inference():
            return self._prepared(weight, workspace)
        with self._lock:
            storage = weight.untyped_storage()
            stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else 0
            key = storage._cdata, int(weight.storage_offset()), stream
            version = weight._version
            entry = self._kept.get(key)
            if entry is None or entry[0] != version:
                self._forget(key)
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # its address stays its own
                entry = self._kept[key] = version, self._prepared(weight, workspace), reference
            return entry[1]

    def _forget(self, key: tuple[int, ...]) -> None:
        """What is to be prepared anew, and what came of weights that are gone."""
        gone = [k for k, entry in self._kept.items() if entry[2].expired()]  # type: ignore[no-untyped-call]
        for k in {key, *gone}:
            self._kept.pop(k, None)

    def _prepared(self, weight: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        kept = aligned(self._size, weight.device)
        with torch.inference_mode(False), torch.no_grad():
            self._prepare(weight, kept, workspace)
        return kept
