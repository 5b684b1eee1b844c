"""Which forwards of watched models are still to be differentiated, so that nothing may change yet."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch

__all__ = ["OpenGraphs"]

ABANDONED = 20
"""A graph is no longer waited for once so many later ones were differentiated: outputs may be kept for good."""
DEEPEST = 8
"""How deep outputs are looked for in containers."""


class _Graph:
    """The graph of one forward. Hooks of its nodes hold it, so that it lives as long as they do."""

    __slots__ = ("__weakref__", "_of", "number")

    def __init__(self, of: OpenGraphs, number: int) -> None:
        self._of, self.number = of, number

    def __call__(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """A hook: the backward of an output begins."""
        self._of.close(self.number)


class OpenGraphs:
    """The graphs of forwards whose backward has not begun and may still come.

    When the next forward begins, a backward that had begun is over. A graph whose outputs are gone cannot have one.
    """

    def __init__(self) -> None:
        self.on_backward: Callable[[], object] = lambda: None
        """Called as the backward of an output begins."""
        self._open: dict[int, weakref.ref[_Graph]] = {}
        self._count = 0

    def add(self, outputs: object) -> None:
        """Take note of the outputs of a forward, and of the graph behind them where there is one."""
        if not torch.is_grad_enabled():
            return
        graph = _Graph(self, self._count)
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(graph)
                self._open[graph.number] = weakref.ref(graph)
        self._count += 1

    def close(self, number: int) -> None:
        """The graph called ``number`` is being differentiated."""
        if self._open.pop(number, None) is not None:
            self.on_backward()
            for other in [other for other in self._open if other < number - ABANDONED]:
                self._open.pop(other, None)

    def any(self) -> bool:
        """Whether a graph may still be differentiated."""
        for number in [number for number, graph in list(self._open.items()) if graph() is None]:
            self._open.pop(number, None)
        return bool(self._open)


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, in containers and in the fields of dataclasses, too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST:
        parts: list[object] = []
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, (list, tuple)):
            parts = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        for part in parts:
            yield from _tensors(part, depth + 1)
