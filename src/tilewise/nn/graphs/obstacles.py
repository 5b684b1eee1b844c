"""Why a model cannot be captured, told before anything is tried."""

from __future__ import annotations

import torch
from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.nn.graphs.standing import hooks_of
from tilewise.nn.layers.kinds import kind_of
from tilewise.nn.layers.swaps import swapped

__all__ = ["REGION", "obstacle", "region_in"]

REGION = "_tilewise_region"
"""The mark of the ``forward`` of a module that runs by programs."""

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_TENSORS = (torch.Tensor, nn.Parameter)


def obstacle(model: nn.Module, device: torch.device) -> str:
    """Why ``model`` cannot be captured on ``device``; empty where it may be tried."""
    return _of_root(model) or _of_hooks(model) or _of_modules(model) or _of_tensors(model, device)


def region_in(model: nn.Module) -> str:
    """Which part of ``model`` runs by a program and so has a graph of its own; empty where none does."""
    for name, module in model.named_modules():
        if hasattr(module.__dict__.get("forward"), REGION):
            return f"{name or 'the model'} runs as a region, which has a graph of its own"
    return ""


def _of_root(model: nn.Module) -> str:
    """Why the model as a whole cannot be captured, or its ``forward`` not be replaced."""
    if kind_of(model) is not None or swapped(model) is not None:
        return "the model is itself a layer that runs by plan; nn.Sequential(model) would do"
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        return "the model has lazy parts that are not initialised yet; a run of the model would do"
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "the model is compiled by TorchScript; the module that it was made of would do"
    for name in ("__copy__", "__reduce__", "__reduce_ex__"):
        if getattr(type(model), name, None) is not getattr(nn.Module, name, None):
            return f"{type(model).__name__} has a {name} of its own, so that a copy could replay this one's graphs"
    return ""


def _of_hooks(model: nn.Module) -> str:
    """Which hooks would not run in a replay."""
    for what, hooks in hooks_of(model):
        if hooks:
            return (
                f"{what}: a replay calls no hooks of a model's parts. Hooks on the model itself and on its parameters "
                "work"
            )
    return ""


def _of_modules(model: nn.Module) -> str:
    """Which part of the model does what a replay cannot."""
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS) or hasattr(module, "_fsdp_wrapped_module"):
            return f"{name or 'the model'} is a {type(module).__name__}; capture the module inside, then wrap it"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled; torch.compile(mode='reduce-overhead') has graphs of its own"
        if isinstance(module, nn.SyncBatchNorm) and several_ranks():
            return f"{name} is a SyncBatchNorm, which waits for other ranks inside the model"
    return ""


def _of_tensors(model: nn.Module, device: torch.device) -> str:
    """Which parameter or buffer cannot be read by a graph."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t) not in _TENSORS:
            return f"{name} is a {type(t).__name__}, which computes by code of its own (fully_shard makes such)"
        if t.layout is not torch.strided:
            return f"{name} is not a strided tensor"
        if t.device != device:
            return f"{name} is on {t.device}; all must be on {device}"
        if t.is_inference():
            return f"{name} was made under torch.inference_mode"
    for name, buffer in model.named_buffers():
        if buffer.requires_grad:
            return f"{name} is a buffer that requires a gradient; a parameter would do"
    return ""
