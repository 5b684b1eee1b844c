"""Puts back what steps change in optimizers, learning rate schedulers and gradient scalers.

A step is a function of the program, which holds them wherever it likes. So all objects of the process are looked
through for those that belong to the model: optimizers by its parameters, schedulers by their optimizer. Nothing says to
which model a gradient scaler belongs, so that all are kept, as the process's random numbers are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tilewise.nn.kept_values import gradients_kept, values_kept

__all__ = ["optimizers_kept"]


@contextmanager
def optimizers_kept(
    parameters: Iterable[nn.Parameter], copied: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Restore at the end the state of every optimizer that has one of ``parameters``, and of its schedulers.

    State that a first step makes is taken away again, and other tensors get back their values in their own memory. So
    do all parameters of these optimizers, and their gradients. Gradient scalers are restored as well. ``copied`` makes
    the copies, on a device of its choice. What other objects hold, such as a callable that a scheduler asks, is not
    restored; nor is what was made before ``gc.freeze()`` found.
    """
    given = list(parameters)
    found = _found({id(p) for p in given})
    own = [p for each in found if isinstance(each, Optimizer) for p in _parameters(each) if not nn.parameter.is_lazy(p)]
    kept = [_Held(vars(each)) for each in found]
    tensors = [*given, *own, *(tensor for held in kept for tensor in held.tensors)]
    with ExitStack() as stack:
        stack.enter_context(gradients_kept(own, copied))
        stack.enter_context(values_kept((t for t in tensors if not nn.parameter.is_lazy(t)), copied))
        for held in kept:
            stack.callback(held.put_back)
        yield


def _found(parameters: set[int]) -> list[object]:
    """Optimizers of parameters with these ids, their schedulers, and all gradient scalers."""
    alive = _alive((Optimizer, LRScheduler, torch.amp.GradScaler))
    optimizers = [
        each for each in alive if isinstance(each, Optimizer) and any(id(p) in parameters for p in _parameters(each))
    ]
    ids = {id(each) for each in optimizers}
    schedulers = [
        each for each in alive if isinstance(each, LRScheduler) and id(getattr(each, "optimizer", None)) in ids
    ]
    return [*optimizers, *schedulers, *(each for each in alive if isinstance(each, torch.amp.GradScaler))]


def _alive(kinds: tuple[type, ...]) -> list[object]:
    """All objects of ``kinds`` in the process. Types alone are asked, as asking an object may run code of its own."""
    known: dict[int, bool] = {}
    found = []
    for each in gc.get_objects():
        of = type(each)
        wanted = known.get(id(of))
        if wanted is None:
            wanted = known[id(of)] = issubclass(of, kinds)
        if wanted:
            found.append(each)
    return found


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer; none of one that is not made yet."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


class _Held:
    """What an object's attributes hold now, through dictionaries and lists, and the ``tensors`` among it."""

    def __init__(self, attributes: dict[str, object]) -> None:
        self._dicts: list[tuple[dict[object, object], dict[object, object]]] = []
        self._lists: list[tuple[list[object], list[object]]] = []
        self.tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        waiting: list[object] = [attributes]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, dict):
                self._dicts.append((value, dict(value)))
                waiting += value.values()
            elif isinstance(value, list):
                self._lists.append((value, list(value)))
                waiting += value
            elif isinstance(value, tuple):
                waiting += value

    def put_back(self) -> None:
        """Let dictionaries and lists hold what they held, in its order. Those that did not change are not written."""
        for there, before in self._dicts:
            if _ids(there) != _ids(before):
                there.clear()
                there.update(before)
        for entries, earlier in self._lists:
            if [*map(id, entries)] != [*map(id, earlier)]:
                entries[:] = earlier


def _ids(values: dict[object, object]) -> list[tuple[int, int]]:
    """The keys and values of a dictionary by identity: comparing tensors would compute."""
    return [(id(key), id(value)) for key, value in values.items()]
