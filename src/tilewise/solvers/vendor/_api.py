"""Access to cuDNN's graph API: imported once and on demand, with one handle for each thread and device.

A cuDNN handle belongs to a device and may serve one thread at a time. So every thread has its own, made at its first
use and handed on when the thread ends. Making a handle allocates memory, which a CUDA graph capture forbids: code that
captures must have run once before on that thread, as ``torch.cuda.graph`` asks anyway.
"""

from __future__ import annotations

import array
import functools
import importlib
import threading
from typing import Any

import torch

__all__ = ["Handle", "errors", "first_line", "handle", "handles", "load", "missing"]

OLDEST = 90200
"""cuDNN 9.2, the first version that tells an engine config's workspace before it is built."""
NEEDED = ("create_execution_plan", "deselect_workspace_greater_than", "_execute_with_raw_ptrs")


@functools.cache
def _import() -> tuple[Any, str]:
    """The ``cudnn`` module, or ``None`` and the reason why it cannot be used."""
    if not torch.cuda.is_available():
        return None, "there is no CUDA device here"
    try:
        module = importlib.import_module("cudnn")
    except ModuleNotFoundError as error:
        if error.name == "cudnn":
            return None, "nvidia-cudnn-frontend is not installed: pip install 'tilewise[gpu]' would do"
        return None, f"importing nvidia-cudnn-frontend failed: {error}"
    except Exception as error:  # a C extension and dlopen: anything can come out
        return None, f"importing nvidia-cudnn-frontend failed: {type(error).__name__}: {error}"
    graph = getattr(module, "pygraph", None)
    lacks = [name for name in NEEDED if not hasattr(graph, name)]
    if lacks:
        version = getattr(module, "__version__", "of unknown version")
        return None, f"nvidia-cudnn-frontend {version} has no {lacks[0]}: 1.24 would do"
    try:
        version = int(module.backend_version())
    except RuntimeError as error:
        return None, f"nvidia-cudnn-frontend found no cuDNN library: {error}"
    if version < OLDEST:
        return None, f"cuDNN {version} is too old: 9.2 ({OLDEST}) or later would do"
    return module, ""


def missing() -> str:
    """Why the graph API cannot be used here; empty when it can. Imports it at the first call."""
    return _import()[1]


def load() -> Any:
    """The ``cudnn`` module. Raises ``RuntimeError`` with :func:`missing`'s reason."""
    module, reason = _import()
    if reason:
        raise RuntimeError(reason)
    return module


@functools.cache
def errors() -> tuple[type[Exception], ...]:
    """The exceptions that the frontend raises, which have no common class."""
    return RuntimeError, ValueError, load().cudnnGraphNotSupportedError


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


_spare: dict[int, list[int]] = {}
"""Handles that ended threads left, by device."""


class Handle:
    """A cuDNN handle of one thread and the stream that it was last set to.

    ``pointers`` has room for five addresses: operands, result, bias and residual. ``address`` is where they are.
    """

    __slots__ = ("address", "device", "pointers", "stream", "value")

    def __init__(self, device: int) -> None:
        cudnn = load()
        self.device = device
        self.pointers = array.array("q", [0] * 5)
        self.address: int = self.pointers.buffer_info()[0]
        try:
            self.value: int = _spare.setdefault(device, []).pop()
        except IndexError:
            with torch.cuda.device(device):
                self.value = cudnn.create_handle()
        self.stream: int = torch._C._cuda_getCurrentRawStream(device)
        cudnn.set_stream(self.value, self.stream)

    def __del__(self) -> None:
        if hasattr(self, "stream") and _spare is not None:  # module globals go first when Python exits
            _spare[self.device].append(self.value)

    def follow(self, stream: int) -> None:
        """Set the stream on which cuDNN queues its work."""
        load().set_stream(self.value, stream)
        self.stream = stream


class _Handles(threading.local):
    """The handles of each thread, by device index."""

    def __init__(self) -> None:
        self.of: dict[int, Handle] = {}


handles = _Handles()


def handle(device: int) -> Handle:
    """This thread's handle for the device with that index, on the current stream."""
    try:
        thread_handle = handles.of[device]
    except KeyError:
        thread_handle = handles.of[device] = Handle(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if stream != thread_handle.stream:
        thread_handle.follow(stream)
    return thread_handle
