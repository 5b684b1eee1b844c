"""A training step of a model that can be repeated and leaves the model's state as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilewise.nn.kept_values import tensors_in
from tilewise.nn.record import arguments_of, state_kept, with_gradients, without_gradients
from tilewise.nn.step.optimizers import optimizers_kept

__all__ = ["Step", "loss_of"]


def loss_of(outputs: object) -> torch.Tensor | None:
    """The sum of the mean squares of all floating-point tensors in ``outputs`` with a gradient; ``None`` for none."""
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    terms = [t.float().square().mean() for t in tensors if t.requires_grad]
    return torch.stack(terms).sum() if terms else None


class Step:
    """A step of ``model``: ``own(model)`` where that is given, else forward, :func:`loss_of` and backward.

    Without ``own`` each example is a step by itself, which starts from the gradients that the model has now. Without
    ``training`` a step is a forward without autograd. Raises ``ValueError`` where the model is on several devices.
    """

    def __init__(
        self, model: nn.Module, examples: list[Any], own: Callable[[Any], object] | None, *, training: bool
    ) -> None:
        self._model, self._examples, self._own, self._training = model, examples, own, training
        inputs = tensors_in(examples)
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        self.way = "compiled" if compiled else "eager"
        """How the step runs: compiled where ``torch.compile`` has the model or a part of it."""
        self._leaves = [t for t in inputs if t.is_leaf and t.requires_grad]
        self._inputs = inputs
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        devices = {d for d in devices if d.type == "cuda"} or devices or {t.device for t in inputs}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"memory_limit: it is of one device, and the model is on several ({names})")
        self.device = devices.pop() if devices else torch.device("cpu")

    def held(self) -> list[torch.Tensor]:
        """The tensors that exist before the step: parameters, buffers, gradients and the examples."""
        parameters = list(self._model.parameters())
        grads = [p.grad for p in (*parameters, *self._leaves) if p.grad is not None]
        return [*parameters, *self._model.buffers(), *grads, *self._inputs]

    def __call__(self) -> None:
        """Run the step once."""
        if self._own is not None:
            self._own(self._model)
            return
        for example in self._examples:
            self._run(example)

    def _run(self, example: object) -> None:
        """Run the default step on one example."""
        args, kwargs = arguments_of(example)

        def forward() -> None:
            """Call the model on the example."""
            self._model(*args, **kwargs)

        if not self._training:
            without_gradients(self._model, forward)
            return

        def both() -> None:
            """Forward and backward."""
            loss = loss_of(self._model(*args, **kwargs))
            if loss is not None:
                loss.backward()

        before = [(t, t.grad) for t in (*self._model.parameters(), *self._leaves)]
        try:
            with_gradients(self._model, both, forward)
        finally:
            for tensor, grad in before:
                if tensor.grad is not grad:
                    tensor.grad = grad

    @contextmanager
    def repeatable(self, *, compiled: bool = False) -> Iterator[None]:
        """Restore at the end what :func:`state_kept` names.

        Where the step is the caller's, parameters are restored too, and what :func:`optimizers_kept` names: the state
        of their optimizers, learning rate schedulers and gradient scalers.

        The copies wait in the host's memory, so that they do not count on a GPU. Compiled modules run uncompiled,
        unless ``compiled``.
        """
        parameters = [p for p in self._model.parameters() if not nn.parameter.is_lazy(p)]
        with ExitStack() as stack:
            stack.enter_context(state_kept(self._model, self._examples, _aside))
            if self._own is not None:
                stack.enter_context(optimizers_kept(parameters, _aside))
            if not compiled and "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)
