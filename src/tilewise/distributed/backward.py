"""Telling the ranks that wait for this one of errors in backward, whichever code raised them.

A forward is called through the wrapped model, but nothing of this package surrounds ``loss.backward()``: hooks, losses
and layers behind a gather run between its nodes, and their errors leave autograd's engine without passing them. So the
engine through which torch starts every backward is replaced by one that does the same, and tells of errors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from tilewise.comm.link import Link
from tilewise.distributed.parts.names import failed_backward

__all__ = ["have_errors_told"]

OURS = __name__.rpartition(".")[0]


@functools.cache
def have_errors_told() -> None:
    """From now on, tell the ranks of a graph of an error in its backward. Calls after the first do nothing."""

    class Engine(type(Variable._execution_engine)):  # type: ignore[misc]
        def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().run_backward(outputs, *args, **kwargs)
            except BaseException as error:
                for link in _links(outputs):
                    link.tell(failed_backward(error), error)
                raise

    Variable._execution_engine = Engine()


def _links(outputs: Iterable[torch.Tensor | GradientEdge]) -> list[Link]:
    """The links that nodes of the graph of ``outputs`` use, each once."""
    todo = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    visited: set[Any] = set()
    links: dict[int, Link] = {}
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        todo += [following for following, _ in node.next_functions]
        links |= {id(link): link for link in _of_node(node)}
    return list(links.values())


def _of_node(node: Any) -> Iterator[Link]:
    """The links that a function of this package keeps on its context, directly or in another object."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not function.__module__.startswith(OURS):
        return
    for value in vars(node).values():
        for candidate in (value, *(getattr(value, name, None) for name in ("link", "home"))):
            if isinstance(candidate, Link):
                yield candidate
