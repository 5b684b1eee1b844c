"""Flags of torch, of the process or the thread, that change what a model's forward computes or how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise.machine.torch_state import read_precision
from tilewise.nn.layers.call import disturbed

__all__ = ["entered", "in_words", "modes", "undisturbed", "watched"]

_FLAGS: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "deterministic algorithms": torch._C._get_deterministic_algorithms,
    "deterministic algorithms (warn only)": torch._C._get_deterministic_algorithms_warn_only,
    "the default dtype": torch.get_default_dtype,
    "oneDNN": torch._C._get_mkldnn_enabled,
    "cuDNN": torch._C._get_cudnn_enabled,
    "cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "the precision of fp32 convolutions": functools.partial(read_precision, "cuda", "conv"),
    "the precision of fp32 recurrent layers": functools.partial(read_precision, "cuda", "rnn"),
    "the precision of fp32 products": functools.partial(read_precision, "cuda", "matmul"),
    "the precision of fp32 convolutions on a CPU": functools.partial(read_precision, "mkldnn", "conv"),
    "the precision of fp32 products on a CPU": functools.partial(read_precision, "mkldnn", "matmul"),
    "reduced precision of fp16 sums": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "reduced precision of bf16 sums": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "fp16 accumulation": torch._C._get_cublas_allow_fp16_accumulation,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "plain attention": torch._C._get_math_sdp_enabled,
    "cuDNN's attention": torch._C._get_cudnn_sdp_enabled,
}
_READERS = tuple(_FLAGS.values())
_WATCHERS: dict[Callable[[], object], object] = {
    torch._C._are_functorch_transforms_active: False,
    torch._C._len_torch_dispatch_stack: 0,
    torch._C._get_tracing_state: None,
    torch._C._is_torch_function_mode_enabled: False,
    functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True): None,
    torch.is_anomaly_enabled: False,
    torch._C._is_any_autocast_enabled: False,
}
"""What functions return where nothing watches: no trace, transform, mode, hook on saved tensors, check or autocast."""
_NAMES = (*_FLAGS, "autocast")


def modes(device_type: str) -> tuple[object, ...]:
    """The value of every flag; the last is the dtype of autocast on such devices, ``None`` where it is off."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return (*[read() for read in _READERS], autocast)


def undisturbed(state: tuple[object, ...]) -> tuple[tuple[Callable[[], object], ...], tuple[object, ...]]:
    """Functions, and what they return where a call may run by a recording made under the modes ``state``.

    They are sure of that but for :func:`entered`, and some calls that may do so they leave out: under a mode that need
    not see operators, for example. Under ``state`` autocast must be off.
    """
    return (*_WATCHERS, *_READERS), (*_WATCHERS.values(), *state[:-1])


def entered() -> bool:
    """Whether forward-mode autograd is on in this thread."""
    return forward_ad._current_level >= 0


def in_words(before: tuple[object, ...], now: tuple[object, ...]) -> str:
    """Which flags differ, as text."""
    return ", ".join(
        f"{name} ({new}, captured with {old})" for name, old, new in zip(_NAMES, before, now, strict=True) if old != new
    )


def watched() -> str:
    """Why this thread must run a model's own operators at this moment; empty where a replay would do."""
    if disturbed():
        return "called in a trace, a transform of torch.func, forward-mode autograd, or a mode that watches operators"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "called under hooks on saved tensors, such as those of a checkpoint or of save_on_cpu"
    if torch.is_anomaly_enabled():
        return "called while autograd's anomaly detection is on"
    return ""
