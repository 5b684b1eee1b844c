"""What distinguishes one call of a layer from another: descriptions of its tensors, and the flags that torch reads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from tilewise.machine.device import conv_precision
from tilewise.nn.layers.strides import backend_layout
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES, dense_strides, layout_of

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
    "libraries",
    "why_not_described",
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
        """The operand that describes ``t``."""
        return cls(tuple(t.shape), t.stride(), math.gcd(t.data_ptr(), ALIGNMENT))

    def dense(self, layout: str) -> Operand:
        """The operand as a plan takes it: unchanged where it is dense, else as a fresh copy in ``layout``."""
        own_layout = layout_of(self.shape, self.strides)
        if own_layout == "view":
            return Operand(self.shape, dense_strides(self.shape, layout), ALIGNMENT)
        return Operand(self.shape, dense_strides(self.shape, own_layout), self.alignment)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer, as far as plans depend on it.

    ``bias`` is the bias' length, ``None`` without one. ``needs`` says which of input, weight and bias need gradients.
    ``autocast`` is the dtype to which autocast casts the operands. ``libraries`` is what :func:`libraries` gives,
    ``None`` where that makes no difference.
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
    libraries: tuple[bool, bool] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input."""
        return self.x.shape

    @property
    def backend_layout(self) -> str:
        """The layout that torch chooses for the call, into which operands are copied that are not dense."""
        return backend_layout(self.x.shape, self.x.strides, self.w.shape, self.w.strides)


def without_dispatch(kind: type) -> bool:
    """Whether torch's own operators compute tensors of this type, with no ``__torch_dispatch__`` of the type."""
    return getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl


def is_plain_type(kind: type) -> bool:
    """Whether torch handles this type as any tensor: its own types, and subclasses that switch handlers off."""
    return kind in PLAIN_TYPES or (
        issubclass(kind, torch.Tensor)
        and kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and without_dispatch(kind)
    )


def kernel_of(w: torch.Tensor) -> torch.Size:
    """The spatial sizes of a weight, read without the ``__torch_function__`` of a subclass."""
    if type(w) in PLAIN_TYPES:
        return w.shape[2:]
    with torch._C.DisableTorchFunctionSubclass():
        return w.shape[2:]


def why_torchs(tensors: Iterable[object]) -> str:
    """Why a convolution of these operands, at this moment, must be left to torch; empty where it need not."""
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


def why_not_described(x: torch.Tensor, *others: torch.Tensor | None) -> str:
    """Why a layer cannot be planned for its input ``x`` and its ``others``, in words; empty for another reason."""
    tensors = [t for t in (x, *others) if t is not None]
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
        return "called with something else than dense tensors"
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        return f"called with tensors on several devices ({', '.join(devices)})"
    if x.device.type not in ("cpu", "cuda"):
        return f"called on the device {x.device}: a CPU, or a GPU of CUDA, would do"
    if x.numel() == 0:
        return f"called with an empty tensor of shape {tuple(x.shape)}: at least one element would do"
    dtypes = sorted({str(t.dtype) for t in tensors})
    if any(t.dtype not in DTYPE_NAMES for t in tensors):
        wanted = ", ".join(map(str, DTYPE_NAMES))
        return f"computes in {' and '.join(dtypes)}: one of {wanted} would do"
    if len(dtypes) > 1 and autocast_dtype(x.device) is None:
        return f"computes in several types ({', '.join(dtypes)}): one of them would do"
    return ""


def is_plain(t: object) -> bool:
    """Whether ``t`` is a plain dense tensor: no subclass with a handler, no negated view, no batched gradient."""
    return (
        is_plain_type(type(t))
        and t.layout is torch.strided  # type: ignore[attr-defined]
        and not t.is_neg()  # type: ignore[attr-defined]
        and not torch._C._functorch.is_legacy_batchedtensor(t)  # type: ignore[arg-type]
    )


def disturbed() -> bool:
    """Whether something needs to see torch's operators: a transform, a mode, a trace, or forward-mode autograd."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or function_mode_watches()
    )


class OwnMode(TorchFunctionMode):
    """A ``__torch_function__`` mode of tilewise's own, which planned calls may ignore."""


def function_mode_watches() -> bool:
    """Whether a ``__torch_function__`` mode is active that must see calls; that of ``set_default_device`` need not."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, (DeviceContext, OwnMode)) for mode in modes)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts a convolution's operands on ``device``; ``None`` where autocast is off."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def libraries() -> tuple[bool, bool]:
    """Whether oneDNN is enabled, and whether torch has several threads.

    On a CPU these decide whether torch's own kernels or oneDNN's compute, and so the strides of results.
    """
    return torch._C._get_mkldnn_enabled(), torch.get_num_threads() > 1


def describe(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, dims: int) -> Call | None:
    """The call of these operands; ``None`` where it is left to torch, for its dtypes, devices, layouts or shapes."""
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
    differs = device.type == "cpu" and backend_layout(x.shape, x.stride(), w.shape, w.stride()) == "channels_last"
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
        libraries=libraries() if differs else None,
    )
