"""Tensors that a run may change, put back afterwards: only what was changed is written.

What was not changed may lie where nobody may write: in read-only or mapped memory, or expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["buffers_kept", "in_inference_mode", "values_kept"]

Copied = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def buffers_kept(model: nn.Module, copied: Copied) -> Iterator[None]:
    """The same buffers, with their values, come back; ``copied`` says where those wait. Lazy ones stay initialised."""
    slots = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is None or not nn.parameter.is_lazy(buffer)
    ]
    with values_kept((buffer for *_, buffer in slots if buffer is not None), copied):
        try:
            yield
        finally:
            for module, name, buffer in slots:
                if module._buffers.get(name, module) is not buffer:
                    module._buffers[name] = buffer


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor], copied: Copied) -> Iterator[None]:
    """``tensors`` have the memory and the values that they have now when it ends; each is put back by itself.

    ``copied`` returns a copy of a tensor, on whatever device. Raises what kept a tensor from being put back, after all
    others have been.
    """
    with ExitStack() as stack:
        for tensor in {id(t): t for t in tensors}.values():
            if not tensor.is_meta:
                stack.callback(_Kept(tensor, copied).put_back)
        yield


class _Kept:
    """One tensor as it is now: ``memory`` is a view of where it lies, ``value`` a copy of what stands there."""

    def __init__(self, tensor: torch.Tensor, copied: Copied) -> None:
        self._tensor, self._copied = tensor, copied
        self._comparable = _is_comparable(tensor)
        self._version = None if tensor.is_inference() else tensor._version
        self._alias = tensor.detach()
        self._memory = _memory(self._alias) if self._comparable else self._alias
        self._value = copied(self._memory)

    def put_back(self) -> None:
        """Undo what was done to the tensor since."""
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            if self._comparable and _place(self._tensor) != _place(self._alias):
                self._tensor.data = self._alias
            if self._changed():
                self._memory.copy_(self._value)

    def _changed(self) -> bool:
        if not self._comparable:
            return self._version is None or self._tensor._version != self._version
        return not torch.equal(_bits(self._copied(self._memory)), _bits(self._value))


def _is_comparable(t: torch.Tensor) -> bool:
    """Whether the tensor is its elements in memory: not sparse, quantized or a wrapper of others."""
    dispatch: Any = type(t).__torch_dispatch__
    return t.layout is torch.strided and not t.is_quantized and dispatch is torch._C._disabled_torch_dispatch_impl


def _memory(t: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory that has no element twice, though it may have some of those between."""
    if not t.numel() or torch._debug_has_internal_overlap(t) == 0:
        return t
    extent = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,))


def _place(t: torch.Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The elements as bytes: NaN is what it was, and a zero's sign counts."""
    flat = t.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # of one element, too, which counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def in_inference_mode(model: nn.Module) -> bool:
    """Whether the model holds tensors made under ``torch.inference_mode``, with which torch has no gradients."""
    held = (t for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t))
    return any(t.is_inference() for t in held)
