"""A model's forward and backward on tensors that stay where they are, as it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from tilewise.nn.graphs.inputs import CONSTANTS, Inputs
from tilewise.nn.graphs.recorder import CannotCapture

__all__ = ["Piece", "differentiated"]


class Piece:
    """The forward of ``plain`` on ``statics``, and the gradients of ``statics`` and ``weights`` that it leads to.

    ``statics`` are leaves that take the place of the tensors of ``inputs``. After a forward ``structure`` and
    ``others`` say what it returned beside tensors (``None`` where a tensor stands), ``requires`` which of the tensors
    have a gradient.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        inputs: Inputs,
        statics: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._plain = plain
        self._inputs, self._statics = inputs, statics
        self._leaves = [*statics, *weights]
        self._device = statics[0].device
        self._outputs: list[torch.Tensor] = []
        self.structure: TreeSpec
        self.others: list[tuple[Any] | None] = []
        self.requires: list[bool] = []
        self.output_gradients: list[torch.Tensor] = []
        """Where the gradients of those outputs that have one are read from."""

    def forward(self) -> list[torch.Tensor]:
        """Run the forward and return the tensors among its results."""
        args, kwargs = self._inputs.arguments(self._statics)
        with _uncached(self._device.type):
            results = self._plain(*args, **kwargs)
        leaves, self.structure = tree_flatten(results)
        self.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
                raise CannotCapture(f"it returns a {type(leaf).__name__}, which a replay could not make anew")
            if isinstance(leaf, torch.Tensor) and (leaf.device != self._device or leaf.layout is not torch.strided):
                raise CannotCapture(f"it returns a tensor on {leaf.device} of layout {leaf.layout}")
        self._outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.requires = [output.requires_grad for output in self._outputs]
        return self._outputs

    def prepare(self) -> None:
        """Make the tensors that hold the gradients of the outputs of the last forward."""
        self.output_gradients = [torch.ones_like(output) for output in self._outputs if output.requires_grad]

    def backward(self) -> list[torch.Tensor | None]:
        """The gradient of every static and weight, ``None`` for those without. Each has memory of its own."""
        heads = [output for output in self._outputs if output.requires_grad]
        gradients = differentiated(heads, self._leaves, self.output_gradients)
        seen = {t.untyped_storage().data_ptr() for t in (*self._leaves, *self._outputs, *self.output_gradients)}
        own: list[torch.Tensor | None] = []
        for gradient in gradients:
            if gradient is not None:
                place = gradient.untyped_storage().data_ptr()
                if place in seen or not _is_dense(gradient):
                    gradient = gradient.clone(memory_format=torch.contiguous_format)
                seen.add(place)
            own.append(gradient)
        return own

    def step(self) -> None:
        """Run forward and, where something has a gradient, backward, and keep nothing of it."""
        self.forward()
        if any(self.requires):
            self.prepare()
            self.backward()
        self.forget()

    def forget(self) -> None:
        """Let go of the outputs, and so of what autograd keeps for a backward."""
        self._outputs, self.output_gradients = [], []

    def foreign(self) -> str:
        """What the last forward depends on beside statics and weights, with a gradient; empty where that is nothing."""
        known = {id(leaf) for leaf in self._leaves}
        open_ = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        seen = set(open_)
        while open_:
            node = open_.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                return (
                    f"its forward uses a tensor of shape {tuple(variable.shape)} that requires a gradient and is "
                    "neither a parameter of it nor an argument"
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    open_.append(following)
        return ""


def differentiated(
    heads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor],
    *,
    create_graph: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients of ``leaves``, outside of autocast; ``None`` for those that need none or have none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not heads or not wanted:
        return [None] * len(leaves)
    with torch._C._DisableAutocast():
        found = iter(torch.autograd.grad(heads, wanted, output_gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _uncached(device_type: str) -> Any:
    """Autocast as it is, without its cache.

    A weight that had been cast before would be read by the recording, which then would not cast it anew.
    """
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)


def _is_dense(t: torch.Tensor) -> bool:
    """Whether the elements of ``t`` fill their storage, each once."""
    return t.untyped_storage().nbytes() == t.numel() * t.element_size() and torch._debug_has_internal_overlap(t) == 0
