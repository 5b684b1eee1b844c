"""The program's random numbers, left as they were by what runs inside the library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["kept", "seed"]

Restore = Callable[[], None]


@contextmanager
def kept(modules: Iterable[torch.nn.Module] = ()) -> Iterator[None]:
    """Whatever is drawn within, the next numbers outside are those that would have come without it.

    That holds of Python's ``random``, NumPy's global state, torch's generators of the CPU and of every GPU, and of
    generators that are attributes of ``modules``. Around code of the caller's, and around imports of packages that
    draw as they are imported. What was not drawn from is not written. The states are the process's: numbers that
    another thread draws from a state that moved within are drawn again afterwards.
    """
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    restores = [_python(random), _numpy(np.random), *map(_torch, _torch_generators()), *_of(modules)]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        if not cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def seed(value: int, device: torch.device) -> None:
    """Begin Python's, NumPy's and torch's random numbers anew, torch's on the CPU and on ``device``; in :func:`kept`.

    ``torch.manual_seed`` would set those of every device, also of ones that are not in use yet.
    """
    random.seed(value)
    np.random.seed(value)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)


def _torch_generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found += torch.cuda.default_generators
    return found


def _of(modules: Iterable[torch.nn.Module]) -> Iterator[Restore]:
    """Of generators that modules hold under a name of their own."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield _torch(value)
            elif isinstance(value, random.Random):
                yield _python(value)
            elif isinstance(value, np.random.RandomState):
                yield _numpy(value)
            elif isinstance(value, np.random.Generator):
                yield _numpy_bits(value.bit_generator)


def _python(source: Any) -> Restore:
    """Of the module ``random``, or of a ``random.Random``; one that keeps no state has none to move."""
    try:
        before = source.getstate()
    except NotImplementedError:  # random.SystemRandom
        return lambda: None

    def restore() -> None:
        if source.getstate() != before:
            source.setstate(before)

    return restore


def _torch(generator: torch.Generator) -> Restore:
    before = generator.get_state()

    def restore() -> None:
        if not torch.equal(generator.get_state(), before):
            generator.set_state(before)

    return restore


def _numpy(source: Any) -> Restore:
    """Of the module ``numpy.random``, or of a ``RandomState``."""
    before = source.get_state(legacy=False)

    def restore() -> None:
        if not _same(source.get_state(legacy=False), before):
            source.set_state(before)

    return restore


def _numpy_bits(source: Any) -> Restore:
    before = source.state

    def restore() -> None:
        if not _same(source.state, before):
            source.state = before

    return restore


def _same(a: Any, b: Any) -> bool:
    """Whether two states of NumPy's, of nested dictionaries, arrays and numbers, are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(np.array_equal(a, b))
