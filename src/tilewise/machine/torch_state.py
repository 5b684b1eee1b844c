"""State that torch keeps for a process or thread: flags set for a while and put back, and the caller's modes left out.

This is the only place that sets a flag of torch's. Flags are set by the functions that ``torch.backends.cudnn.flags``
uses, so that they can be set after ``torch.backends.disable_global_flags()`` too, which forbids only setting one for
good. Flags that concern only GPUs stay as they are while something runs on a CPU.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.machine.turns import in_turns

__all__ = [
    "BACKENDS",
    "FITTING",
    "cache_kept",
    "fp32_precision",
    "framework_flags",
    "put_aside",
    "read_precision",
    "recording_gradients",
    "undisturbed",
    "without_benchmark",
]

read_precision = torch._C._get_fp32_precision_getter
write_precision = torch._C._set_fp32_precision_setter
BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
"""torch's names for the backend that computes products on a type of device."""
FITTING = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}
"""Values of an operation's flag with which fp32 products have a precision."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the caller's autograd, inference mode, autocast and modes from what runs inside, on this thread.

    Modes are those of ``torch.set_default_device``, ``torch.overrides`` and ``torch.utils._python_dispatch``.
    """
    with (
        torch._C.DisableTorchFunction(),  # first: the others would be told to modes of functions
        _no_dispatch_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Let autograd record what runs inside, also within an operator, whose own gradients are another function's."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _no_dispatch_modes() -> AbstractContextManager[object]:
    """A context without the caller's dispatch modes."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()  # the other way imports much of torch when it is first taken
    from torch.utils._python_dispatch import _disable_current_modes

    disabled: AbstractContextManager[object] = _disable_current_modes()
    return disabled


@contextmanager
def framework_flags(
    device_type: str, precision: str, *, deterministic: bool, operation: str = "conv"
) -> Iterator[None]:
    """Set torch's flags as for a plan's baseline: benchmark mode, determinism, and the precision of ``operation``.

    ``operation`` is ``conv`` or ``matmul``. They are flags of the process, so plan from one thread at a time. All of
    them concern GPUs: nothing changes unless ``device_type`` is ``"cuda"``.
    """
    if device_type != "cuda":
        yield
        return
    of_products = fp32_precision("cuda", operation, precision)
    flags = setting(BENCHMARK, True), setting(DETERMINISTIC, deterministic), of_products
    with flags[0], flags[1], flags[2], cache_kept() if in_turns() else nullcontext():
        yield


@contextmanager
def cache_kept() -> Iterator[None]:
    """Keep torch from handing its free memory back to the GPU after each search in benchmark mode.

    A program that goes on would have to take all of it anew in its next step.
    """
    with nullcontext() if EMPTYING is None else setting(EMPTYING, False):
        yield


@contextmanager
def without_benchmark(device_type: str) -> Iterator[None]:
    """Turn cuDNN's benchmark mode off, for work that is not timed."""
    if device_type != "cuda":
        yield
        return
    with setting(BENCHMARK, False):
        yield


@contextmanager
def fp32_precision(device_type: str, operation: str, precision: str) -> Iterator[None]:
    """Set torch's flag for fp32 operands of ``operation`` (``conv`` or ``matmul``) to ``ieee`` or ``tf32``.

    Not through the older ``allow_tf32``, which may set it to follow the general flag.
    """
    backend = BACKENDS[device_type]
    if read_precision(backend, operation) in FITTING[precision]:
        yield
        return
    with setting(_precision_flag(backend, operation), precision):
        yield


@dataclass(frozen=True)
class Flag:
    """A flag of the process. ``own`` reads the value that is to be put back later; ``write`` sets it."""

    name: str
    own: Callable[[], Any]
    write: Callable[[Any], object]


BENCHMARK = Flag("cudnn.benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark)
DETERMINISTIC = Flag("cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic)
EMPTYING = (
    Flag(
        "cudnn.conv_benchmark_empty_cache",
        torch._C._cuda_get_conv_benchmark_empty_cache,
        torch._C._cudnn_set_conv_benchmark_empty_cache,
    )
    if hasattr(torch._C, "_cuda_get_conv_benchmark_empty_cache")
    else None
)
"""Whether torch frees its cache after a search; ``None`` in a torch without CUDA."""


@functools.cache
def _precision_flag(backend: str, operation: str) -> Flag:
    """The precision flag of ``operation`` on ``backend``."""
    return Flag(
        f"{backend}.{operation}.fp32_precision",
        functools.partial(_own_precision, backend, operation),
        functools.partial(write_precision, backend, operation),
    )


class Request:
    """A value that a block of code wants a flag to have, and the thread that runs it."""

    __slots__ = ("thread", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.thread = threading.get_ident()


@dataclass
class Held:
    """A flag that is set: its value before anybody set it, and the requests for it, the latest last."""

    flag: Flag
    before: Any
    requests: list[Request] = field(default_factory=list)


_held: dict[str, Held] = {}
"""Flags that are set now, by name."""
_lock = threading.RLock()


def _nobody_sets() -> None:
    """Make a new lock in a forked child: a thread that held the old one does not live there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_nobody_sets)


@contextmanager
def setting(flag: Flag, value: object) -> Iterator[None]:
    """Set ``flag`` to ``value`` for the block.

    Where threads set one flag at the same time, all see the latest request. When the last block ends the flag has the
    value from before the first, in whatever order they end.
    """
    request = Request(value)
    try:
        _begin(flag, request)
        yield
    finally:
        _to_the_end(functools.partial(_end, flag, request))


def _begin(flag: Flag, request: Request) -> None:
    """Register a request and set the flag."""
    with _lock:
        held = _held.get(flag.name)
        if held is None:
            held = _held[flag.name] = Held(flag, flag.own())
        held.requests.append(request)
        flag.write(request.value)


def _end(flag: Flag, request: Request) -> None:
    """Undo as much of :func:`_begin` as was done. A second call has nothing to do."""
    with _lock:
        held = _held.get(flag.name)
        if held is None:
            return
        if request in held.requests:
            held.requests.remove(request)
        flag.write(held.requests[-1].value if held.requests else held.before)
        if not held.requests:
            del _held[flag.name]


@contextmanager
def put_aside() -> Iterator[None]:
    """Give the flags that this thread has set their other values for the block, and set them again at its end.

    So a thread that works in turns leaves nothing behind between them. Modes of :func:`undisturbed` belong to their
    thread alone.
    """
    here = threading.get_ident()
    with _lock:
        own = [(held.flag, request) for held in _held.values() for request in held.requests if request.thread == here]
    for flag, request in reversed(own):
        _end(flag, request)
    try:
        yield
    finally:
        for flag, request in own:
            _begin(flag, request)


def _own_precision(backend: str, operation: str) -> str:
    """The flag itself, ``"none"`` where it inherits from the general one; torch tells only the resulting value.

    Where that leaves it open, the flags that it would inherit from are changed for a moment.
    """
    current: str = read_precision(backend, operation)
    if current == "none" or current != read_precision(backend, "all"):
        return current
    above: list[tuple[str, str]] = []

    def put_back() -> None:
        for name, value in above:
            write_precision(name, "all", value)

    try:
        for name in ("generic", backend):
            above.append((name, read_precision(name, "all")))
            write_precision(name, "all", "none")
        return str(read_precision(backend, operation))
    finally:
        _to_the_end(put_back)


def _to_the_end(undo: Callable[[], None]) -> None:
    """Call ``undo``, which may be called twice, to its end even if Control-C interrupts it."""
    try:
        undo()
    except KeyboardInterrupt:
        undo()
        raise
