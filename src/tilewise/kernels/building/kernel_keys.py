"""The keys of kernels in Triton's cache, made the same in every process.

The key of a kernel has the values of the constants that its functions use (``triton/runtime/jit.py``,
``DependenciesFinder``). Triton 3.6 reads those of a called function before it has looked into it, unless another kernel
that calls it was looked into before. So the key depends on which kernel a process meets first, and what a worker or an
earlier process compiled would not be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

__all__ = ["settle"]

_settled: dict[int, Any] = {}
"""Functions whose keys are computed, by identity: their own hash would compute the key. They are never dropped."""


def settle(kernel: Any) -> None:
    """Compute the keys of all that ``kernel`` calls before its own, so that its own is always the same.

    Costs nothing the next time. What is no kernel of Triton's compiler, as in its interpreter, is left as it is.
    """
    if id(kernel) in _settled or not isinstance(kernel, JITCallable):
        return
    _settled[id(kernel)] = kernel  # before the functions it calls, which may call it
    for called in _called(kernel.fn):
        settle(called)
    _ = kernel.cache_key


def _called(function: Any) -> Iterator[Any]:
    """What the names in a Python function may stand for: values of its module, and of modules that it names."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            yield from (found for each in names if (found := getattr(value, each, None)) is not None)
        elif value is not None:
            yield value
