"""Context managers that put a model's tensors back as they were, writing only those that changed.

Tensors that did not change are not written, since they may lie in memory that must not be written: read-only or mapped
memory, or an expanded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = [
    "buffers_kept",
    "examples_kept",
    "gradients_kept",
    "in_inference_mode",
    "modes_kept",
    "tensors_in",
    "values_kept",
]

Copied = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def buffers_kept(model: nn.Module, copied: Copied) -> Iterator[None]:
    """Restore the model's buffers and their values at the end. ``copied`` makes the copies, on a device of its choice.

    Lazy buffers that are initialised meanwhile stay initialised, with their initial values. Buffers that are registered
    meanwhile stay.
    """
    slots = [
        (module, dict(module._buffers.items()), frozenset(module._non_persistent_buffers_set))
        for module in model.modules()
    ]
    initialised = (b for _, buffers, _ in slots for b in buffers.values() if b is not None and _is_there(b))
    with ExitStack() as stack:
        stack.enter_context(values_kept(initialised, copied))
        for module, buffers, _ in slots:
            lazy = [name for name, b in buffers.items() if b is not None and not _is_there(b)]
            if lazy:
                begins = _Begins(lazy, copied, stack)
                stack.callback(module.register_forward_pre_hook(begins).remove)  # after its own, which initialises
        try:
            yield
        finally:
            for module, buffers, transient in slots:
                first = [*module._buffers.items()][: len(buffers)]
                if [(name, id(b)) for name, b in first] != [(name, id(b)) for name, b in buffers.items()]:
                    new = {name: b for name, b in module._buffers.items() if name not in buffers}
                    module._buffers.clear()
                    module._buffers.update(buffers | new)
                module._non_persistent_buffers_set.difference_update(buffers)
                module._non_persistent_buffers_set.update(transient.intersection(buffers))


def _is_there(buffer: torch.Tensor) -> bool:
    """Whether the buffer has memory: lazy buffers have none before they are initialised."""
    return not nn.parameter.is_lazy(buffer)


class _Begins:
    """A hook before a module's first forward that saves the initial values of its lazy buffers, to be restored."""

    def __init__(self, names: list[str], copied: Copied, stack: ExitStack) -> None:
        self._names, self._copied, self._stack = names, copied, stack

    def __call__(self, module: nn.Module, _: object) -> None:
        names, self._names = self._names, []
        begun = (module._buffers.get(name) for name in names)
        self._stack.enter_context(values_kept((b for b in begun if b is not None and _is_there(b)), self._copied))


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module at the end."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            if module.training is not training:
                module.training = training


def tensors_in(examples: object) -> list[torch.Tensor]:
    """Every tensor in ``examples``, nested in lists, dictionaries or other containers that torch's pytrees know."""
    return [leaf for leaf in tree_leaves(examples) if isinstance(leaf, torch.Tensor)]


@contextmanager
def examples_kept(examples: object, copied: Copied) -> Iterator[None]:
    """Restore values, gradients and ``requires_grad`` of the tensors in ``examples`` at the end."""
    tensors = tensors_in(examples)
    with torch._C.DisableTorchFunctionSubclass():
        leaves = [(t, t.requires_grad) for t in tensors if t.is_leaf]
    with gradients_kept((t for t, _ in leaves), copied), values_kept(tensors, copied):
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for tensor, requires_grad in leaves:
                    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
                        tensor.requires_grad_(requires_grad)


@contextmanager
def gradients_kept(tensors: Iterable[torch.Tensor], copied: Copied) -> Iterator[None]:
    """Restore ``grad`` of every tensor at the end: the same gradient with the same values, or none."""
    with torch._C.DisableTorchFunctionSubclass():
        before = [(t, t.grad) for t in tensors]
    with values_kept((grad for _, grad in before if grad is not None), copied):
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for tensor, grad in before:
                    if tensor.grad is not grad:
                        tensor.grad = grad


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor], copied: Copied) -> Iterator[None]:
    """Restore memory and values of every tensor at the end.

    ``copied`` returns a copy of a tensor, on a device of its choice. Where a tensor cannot be restored, the others are
    restored first, and then its error is raised.
    """
    with ExitStack() as stack:
        for tensor in {id(t): t for t in tensors}.values():
            with torch._C.DisableTorchFunctionSubclass():
                meta = tensor.is_meta
            if not meta:
                stack.callback(_Kept(tensor, copied).put_back)
        yield


class _Kept:
    """The state of one tensor: a view of its memory, and a copy of the values there.

    Handlers of tensor subclasses are bypassed, since only the memory matters here.
    """

    def __init__(self, tensor: torch.Tensor, copied: Copied) -> None:
        self._tensor, self._copied = tensor, copied
        with torch._C.DisableTorchFunctionSubclass():
            self._comparable, self._leaf = _is_comparable(tensor), tensor.is_leaf
            self._version = None if tensor.is_inference() else tensor._version
            self._alias = tensor.detach()
            self._memory = _memory(self._alias) if self._comparable else self._alias
            self._value = copied(self._memory)

    def put_back(self) -> None:
        """Restore the tensor's memory, autograd state and values where they have changed."""
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(self._tensor.is_inference()),
            torch.no_grad(),
        ):
            if self._comparable and _place(self._tensor) != _place(self._alias):
                self._tensor.data = self._alias
            if self._leaf and not self._tensor.is_leaf and not self._tensor._is_view():
                self._tensor.detach_()  # it was written in a graph
            if self._changed():
                self._memory.copy_(self._value)

    def _changed(self) -> bool:
        """Whether the values have changed: by comparison where that is possible, else by the version counter."""
        if not self._comparable:
            return self._version is None or self._tensor._version != self._version
        return not torch.equal(_bits(self._copied(self._memory)), _bits(self._value))


def _is_comparable(t: torch.Tensor) -> bool:
    """Whether the tensor is plain strided memory: not sparse, not quantized, no wrapper of other tensors."""
    dispatch: Any = type(t).__torch_dispatch__
    return t.layout is torch.strided and not t.is_quantized and dispatch is torch._C._disabled_torch_dispatch_impl


def _memory(t: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory in which no element stands twice. It may include elements in between."""
    if not t.numel() or torch._debug_has_internal_overlap(t) == 0:
        return t
    extent = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,))


def _place(t: torch.Tensor) -> tuple[object, ...]:
    """Address, shape, strides, dtype and device of a tensor."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    flat = t.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # of one element, too, which counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def in_inference_mode(model: nn.Module) -> bool:
    """Whether the model holds tensors made under ``torch.inference_mode``, of which torch computes no gradients."""
    initialised = (t for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t))
    return any(t.is_inference() for t in initialised)
