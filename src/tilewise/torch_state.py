"""What torch keeps for a whole process or thread: flags set for a while and put back, and the caller's modes left out.

The only place that sets a flag of torch's. Flags are set by the functions that ``torch.backends.cudnn.flags`` uses, so
that they can be set after ``torch.backends.disable_global_flags()``, too: what that forbids is to set one for good.
Those of GPUs alone stay as they are while something runs on a CPU.
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

__all__ = [
    "BACKENDS",
    "FITTING",
    "fp32_precision",
    "framework_flags",
    "read_precision",
    "undisturbed",
    "without_benchmark",
]

read_precision = torch._C._get_fp32_precision_getter
write_precision = torch._C._set_fp32_precision_setter
BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
"""torch's names for who computes products on a type of device."""
FITTING = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}
"""What the flag of an operation comes to where products have a precision."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """No autograd, inference mode, autocast or mode of the caller's reaches what runs inside, on this thread.

    Modes are those of ``torch.set_default_device`` and of ``torch.overrides`` and ``torch.utils._python_dispatch``.
    """
    with (
        torch._C.DisableTorchFunction(),  # first: the others would be told to modes of functions
        _no_dispatch_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield


def _no_dispatch_modes() -> AbstractContextManager[object]:
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()  # the other way imports much of torch when it is first taken
    from torch.utils._python_dispatch import _disable_current_modes

    disabled: AbstractContextManager[object] = _disable_current_modes()
    return disabled


@contextmanager
def framework_flags(device_type: str, precision: str, *, deterministic: bool) -> Iterator[None]:
    """torch's flags as a plan's baseline is measured: benchmark mode, the problem's precision, as deterministic.

    They are the process's own, so plan from one thread at a time. All of them are of GPUs: where ``device_type`` is
    another than ``"cuda"`` nothing changes.
    """
    if device_type != "cuda":
        yield
        return
    with setting(BENCHMARK, True), setting(DETERMINISTIC, deterministic), fp32_precision("cuda", "conv", precision):
        yield


@contextmanager
def without_benchmark(device_type: str) -> Iterator[None]:
    """torch without cuDNN's benchmark mode, for work that is not timed."""
    if device_type != "cuda":
        yield
        return
    with setting(BENCHMARK, False):
        yield


@contextmanager
def fp32_precision(device_type: str, operation: str, precision: str) -> Iterator[None]:
    """torch's flag for fp32 operands of ``operation``, ``conv`` or ``matmul``: ``ieee`` or ``tf32``.

    Not by the older ``allow_tf32``, which may set it to "as the general flag".
    """
    backend = BACKENDS[device_type]
    if read_precision(backend, operation) in FITTING[precision]:
        yield
        return
    with setting(_precision_flag(backend, operation), precision):
        yield


@dataclass(frozen=True)
class Flag:
    """A flag of the process: ``own`` reads what is to be put back later."""

    name: str
    own: Callable[[], Any]
    write: Callable[[Any], object]


BENCHMARK = Flag("cudnn.benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark)
DETERMINISTIC = Flag("cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic)


@functools.cache
def _precision_flag(backend: str, operation: str) -> Flag:
    return Flag(
        f"{backend}.{operation}.fp32_precision",
        functools.partial(_own_precision, backend, operation),
        functools.partial(write_precision, backend, operation),
    )


class Wish:
    """A value that somebody wants a flag to have for a while."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


@dataclass
class Held:
    """A flag that is set: what it was before anybody set it, and what is wanted of it, the latest last."""

    before: Any
    wishes: list[Wish] = field(default_factory=list)


_held: dict[str, Held] = {}
_lock = threading.RLock()


def _nobody_sets() -> None:
    """A thread that was setting a flag when the process forked does not live in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_nobody_sets)


@contextmanager
def setting(flag: Flag, value: object) -> Iterator[None]:
    """``flag`` at ``value`` inside.

    Threads that set one flag at a time see what was wanted last. When the last of them is done it is what it was before
    the first, in whatever order they end.
    """
    wish = Wish(value)
    try:
        _begin(flag, wish)
        yield
    finally:
        _surely(functools.partial(_end, flag, wish))


def _begin(flag: Flag, wish: Wish) -> None:
    with _lock:
        held = _held.get(flag.name)
        if held is None:
            held = _held[flag.name] = Held(flag.own())
        held.wishes.append(wish)
        flag.write(wish.value)


def _end(flag: Flag, wish: Wish) -> None:
    """Undo as much of :func:`_begin` as was done; a second time it has nothing to do."""
    with _lock:
        held = _held.get(flag.name)
        if held is None:
            return
        if wish in held.wishes:
            held.wishes.remove(wish)
        flag.write(held.wishes[-1].value if held.wishes else held.before)
        if not held.wishes:
            del _held[flag.name]


def _own_precision(backend: str, operation: str) -> str:
    """The flag itself, ``"none"`` where it inherits: torch tells only what it comes to.

    Where that leaves it open, the flags that it would inherit from are other ones for a moment.
    """
    own: str = read_precision(backend, operation)
    if own == "none" or own != read_precision(backend, "all"):
        return own
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
        _surely(put_back)


def _surely(undo: Callable[[], None]) -> None:
    """``undo``, which can be called twice, to its end also where Control-C comes in between."""
    try:
        undo()
    except KeyboardInterrupt:
        undo()
        raise
