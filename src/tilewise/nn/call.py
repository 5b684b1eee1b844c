"""What tells one call of a layer from another: the tensors' descriptions and the flags torch would heed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from tilewise.device import conv_precision
from tilewise.nn.strides import backend_layout
from tilewise.problem import ALIGNMENT, DTYPE_NAMES, dense_strides, layout_of

__all__ = [
    "Call",
    "Operand",
    "OwnMode",
    "autocast_dtype",
    "describe",
    "disturbed",
    "is_plain",
    "is_plain_type",
    "kernel_of",
    "why_torchs",
    "without_dispatch",
]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Operand:
    """Shape, strides in elements and alignment in bytes (at most 16) of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Operand:
        """The description of ``t``."""
        return cls(tuple(t.shape), t.stride(), math.gcd(t.data_ptr(), ALIGNMENT))

    def settled(self, layout: str) -> Operand:
        """The operand as a plan takes it: the same where dense, else as a fresh copy in ``layout``."""
        own = layout_of(self.shape, self.strides)
        if own == "view":
            return Operand(self.shape, dense_strides(self.shape, layout), ALIGNMENT)
        return Operand(self.shape, dense_strides(self.shape, own), self.alignment)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as plans see it.

    ``bias`` is its length; ``needs`` says which of input, weight and bias want gradients; ``autocast`` is the type to
    which autocast brings the operands.
    """

    x: Operand
    w: Operand
    dtype: torch.dtype
    device: torch.device
    bias: int | None
    needs: tuple[bool, bool, bool]
    deterministic: bool
    precision: str
    autocast: torch.dtype | None

    @property
    def backend_layout(self) -> str:
        """The layout by torch's rule, in which operands are brought that are not dense."""
        return backend_layout(self.x.shape, self.x.strides, self.w.shape, self.w.strides)


def without_dispatch(kind: type) -> bool:
    """Whether tensors of this type are computed by torch's operators, and not by a ``__torch_dispatch__``."""
    return getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl


def is_plain_type(kind: type) -> bool:
    """Whether torch computes with tensors of this type as with any: subclasses too that switch handlers off."""
    return kind in PLAIN_TYPES or (
        issubclass(kind, torch.Tensor)
        and kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and without_dispatch(kind)
    )


def kernel_of(w: torch.Tensor) -> torch.Size:
    """The spatial sizes of a weight; a subclass' ``__torch_function__`` is not asked."""
    if type(w) in PLAIN_TYPES:
        return w.shape[2:]
    with torch._C.DisableTorchFunctionSubclass():
        return w.shape[2:]


def why_torchs(tensors: Iterable[object]) -> str:
    """What it is about these operands, or about this moment, that leaves a convolution to torch; empty when nothing."""
    if torch._C._are_functorch_transforms_active():
        return "called within a transform of torch.func (vmap, grad and the like), which torch computes"
    for t in tensors:
        if isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t):
            return "called with a wrapper of torch.func, which torch computes"
        if isinstance(t, torch.Tensor) and not without_dispatch(type(t)):
            return f"called with a {type(t).__name__}, which computes every operator by a __torch_dispatch__ of its own"
    if torch._C._len_torch_dispatch_stack() > 0 or function_mode_watches():
        return "called under a mode that watches torch's functions or operators"
    return ""


def is_plain(t: object) -> bool:
    """Whether ``t`` is a dense tensor and no more: no handler's subclass, no negating view, no batch of gradients."""
    return (
        is_plain_type(type(t))
        and t.layout is torch.strided  # type: ignore[attr-defined]
        and not t.is_neg()  # type: ignore[attr-defined]
        and not torch._C._functorch.is_legacy_batchedtensor(t)  # type: ignore[arg-type]
    )


def disturbed() -> bool:
    """Whether something above torch's operators wants to see them: a transform, a mode, a trace or forward AD."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or function_mode_watches()
    )


class OwnMode(TorchFunctionMode):
    """A mode of tilewise's own, which planned calls need not heed."""


def function_mode_watches() -> bool:
    """Whether a ``__torch_function__`` mode is on that is interested: torch's behind ``set_default_device`` is not."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, (DeviceContext, OwnMode)) for mode in modes)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type to which autocast would bring a convolution's operands on ``device``, ``None`` when it is off."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def describe(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, dims: int) -> Call | None:
    """The call, or ``None`` where it is torch's own affair: other types, devices, layouts and wrong shapes."""
    tensors = (x, w) if b is None else (x, w, b)
    if not all(is_plain(t) for t in tensors):
        return None
    device = x.device
    if device.type not in ("cpu", "cuda") or any(t.device != device for t in tensors):
        return None
    if x.dim() != dims + 2 or w.dim() != dims + 2 or (b is not None and b.dim() != 1):
        return None
    if x.numel() == 0 or w.numel() == 0:
        return None
    autocast = autocast_dtype(device)
    if autocast is None and any(t.dtype is not x.dtype for t in tensors):
        return None
    if any(t.dtype not in DTYPE_NAMES for t in tensors) or (autocast is not None and autocast not in DTYPE_NAMES):
        return None
    grad = torch.is_grad_enabled()
    return Call(
        x=Operand.of(x),
        w=Operand.of(w),
        dtype=x.dtype,
        device=device,
        bias=None if b is None else b.shape[0],
        needs=(grad and x.requires_grad, grad and w.requires_grad, grad and b is not None and b.requires_grad),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=conv_precision() if device.type == "cuda" and x.dtype is torch.float32 else "ieee",
        autocast=autocast,
    )
