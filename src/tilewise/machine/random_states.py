"""The program's random numbers, kept as if nothing inside the library had drawn any."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["kept", "seed", "state_of", "tell_apart", "with_state"]

Restore = Callable[[], None]
CONTAINERS = (list, tuple, set, frozenset, dict, deque)


@contextmanager
def kept(modules: Iterable[torch.nn.Module] = (), arguments: object = ()) -> Iterator[None]:
    """Put random states back at the end of the block, as if nothing had been drawn within.

    It covers Python's ``random``, NumPy's global state, torch's generators of the CPU and of every GPU, and generators
    that are attributes of ``modules`` or in ``arguments``, also within lists, tuples, sets and dictionaries. It is used
    around the caller's code, and around imports of packages that draw as they are imported. States that were not drawn
    from are not written. The states are the process's: numbers that another thread draws meanwhile are drawn again
    afterwards.
    """
    cuda = torch.cuda.is_initialized()
    restores = [_python(random), _numpy(np.random), *map(_torch, _torch_generators()), *_of(modules, arguments)]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        if not cuda and torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def seed(value: int, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's random numbers, torch's on the CPU and on ``device``. Used in :func:`kept`.

    ``torch.manual_seed`` would seed every device, also those not in use yet.
    """
    random.seed(value)
    np.random.seed(value)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        _generator(device).manual_seed(value)


def tell_apart(devices: Iterable[torch.device]) -> None:
    """Seed torch's default generators of GPUs anew where several have one seed, as ``torch.manual_seed`` gives them."""
    seeds: set[int] = set()
    for place, index in enumerate(sorted({int(device.index) for device in devices if device.type == "cuda"})):
        generator = torch.cuda.default_generators[index]
        value = generator.initial_seed()
        if value in seeds:
            value = (value + place) % (1 << 63)
            generator.manual_seed(value)
        seeds.add(value)


def state_of(device: torch.device) -> torch.Tensor:
    """The state of torch's default generator of ``device``, for :func:`with_state`."""
    return _generator(device).get_state()


@contextmanager
def with_state(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Within the block torch's default generator of ``device`` draws on from ``state``; then it goes on as before."""
    generator = _generator(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    """torch's default generator of ``device``."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


def _torch_generators() -> list[torch.Generator]:
    """torch's default generators of the CPU and, where CUDA is in use, of every GPU."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return generators


def _of(modules: Iterable[torch.nn.Module], arguments: object) -> Iterator[Restore]:
    """What restores generators that are attributes of modules, arguments, or in containers of either."""
    open_ = [arguments, *(value for module in modules for value in vars(module).values())]
    seen: set[int] = set()
    while open_:
        value = open_.pop()
        if isinstance(value, torch.Generator):
            yield _torch(value)
        elif isinstance(value, random.Random):
            yield _python(value)
        elif isinstance(value, np.random.RandomState):
            yield _numpy(value)
        elif isinstance(value, np.random.Generator):
            yield _numpy_bits(value.bit_generator)
        elif isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            open_ += value.values() if isinstance(value, dict) else value


def _python(source: Any) -> Restore:
    """What restores the module ``random`` or a ``random.Random``. ``SystemRandom`` keeps no state."""
    try:
        before = source.getstate()
    except NotImplementedError:  # random.SystemRandom
        return lambda: None

    def restore() -> None:
        if source.getstate() != before:
            source.setstate(before)

    return restore


def _torch(generator: torch.Generator) -> Restore:
    """What restores one of torch's generators."""
    before = generator.get_state()

    def restore() -> None:
        if not torch.equal(generator.get_state(), before):
            generator.set_state(before)

    return restore


def _numpy(source: Any) -> Restore:
    """What restores the module ``numpy.random`` or a ``RandomState``."""
    before = source.get_state(legacy=False)

    def restore() -> None:
        if not _same(source.get_state(legacy=False), before):
            source.set_state(before)

    return restore


def _numpy_bits(source: Any) -> Restore:
    """What restores one of NumPy's bit generators."""
    before = source.state

    def restore() -> None:
        if not _same(source.state, before):
            source.state = before

    return restore


def _same(a: Any, b: Any) -> bool:
    """Whether two states of NumPy's (nested dictionaries, arrays and numbers) are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(np.array_equal(a, b))
