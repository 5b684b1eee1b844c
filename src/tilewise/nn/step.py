"""One training step of a model that can be run again and again and leaves no trace in the model's state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilewise import random_states
from tilewise.nn.kept_values import buffers_kept, values_kept
from tilewise.nn.record import arguments_of, with_gradients, without_gradients

__all__ = ["Step", "loss_of"]


def loss_of(outputs: object) -> torch.Tensor | None:
    """The mean square of every floating-point tensor in ``outputs`` that has a gradient, summed; ``None``: no such."""
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    terms = [t.float().square().mean() for t in tensors if t.requires_grad]
    return torch.stack(terms).sum() if terms else None


class Step:
    """A step of ``model``: ``own(model)`` where that is given, else forward, :func:`loss_of` and backward.

    Without ``own`` each example is a step of its own that starts from the gradients the model has now. With
    ``training`` off it is a forward without autograd. Raises ``ValueError`` where the model lies on several devices.
    """

    def __init__(
        self, model: nn.Module, examples: list[Any], own: Callable[[Any], object] | None, *, training: bool
    ) -> None:
        self._model, self._examples, self._own, self._training = model, examples, own, training
        inputs = [t for t in tree_leaves(examples) if isinstance(t, torch.Tensor)]
        self._leaves = [t for t in inputs if t.is_leaf and t.requires_grad]
        self._inputs = inputs
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        devices = {d for d in devices if d.type == "cuda"} or devices or {t.device for t in inputs}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"memory_limit: it is of one device, and the model is on several ({names})")
        self.device = devices.pop() if devices else torch.device("cpu")

    def held(self) -> list[torch.Tensor]:
        """What is there before the step: parameters, buffers, gradients and the examples."""
        parameters = list(self._model.parameters())
        grads = [p.grad for p in (*parameters, *self._leaves) if p.grad is not None]
        return [*parameters, *self._model.buffers(), *grads, *self._inputs]

    def __call__(self) -> None:
        """Run it."""
        if self._own is not None:
            self._own(self._model)
            return
        for example in self._examples:
            self._run(example)

    def _run(self, example: object) -> None:
        args, kwargs = arguments_of(example)

        def forward() -> None:
            self._model(*args, **kwargs)

        if not self._training:
            without_gradients(self._model, forward)
            return

        def both() -> None:
            loss = loss_of(self._model(*args, **kwargs))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]

        before = [(t, t.grad) for t in (*self._model.parameters(), *self._leaves)]
        try:
            with_gradients(self._model, both, forward)
        finally:
            for tensor, grad in before:
                if tensor.grad is not grad:
                    tensor.grad = grad

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Buffers, gradients, random states and, where the step is the caller's, parameters come back as they were.

        They wait in the host's memory, where a GPU's limit does not count them. Compiled modules run uncompiled.
        """
        parameters = [p for p in self._model.parameters() if not nn.parameter.is_lazy(p)]
        grads = [(t, t.grad) for t in (*parameters, *self._leaves)]
        values = [*(parameters if self._own is not None else ()), *(grad for _, grad in grads if grad is not None)]
        with ExitStack() as stack:
            stack.enter_context(buffers_kept(self._model, _aside))
            stack.enter_context(values_kept(values, _aside))
            stack.enter_context(random_states.kept(self._model.modules()))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            finally:
                for tensor, grad in grads:
                    if tensor.grad is not grad:
                        tensor.grad = grad


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)
