"""The type in which recurrent layers compute under autocast. torch says: its rules differ by cell and by device.

cuDNN's layers compute in fp16 whatever type autocast is asked for. oneDNN's LSTM computes in that type. Where neither
computes, autocast casts the products of each step by itself, and a GRU then keeps its states in fp32, as does an LSTM
with a projection its c.
"""

from __future__ import annotations

import torch

from tilewise.machine.device import is_capturing
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import autocast_dtype
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["OPERATORS", "is_on", "lower_type"]

OPERATORS = {cell: getattr(torch._C._VariableFunctions, cell) for cell in GATES}
"""torch's own functions, whatever stands in their place in ``torch._VF``."""
LOWER = (torch.float16, torch.bfloat16)
MOST_ANSWERS = 64
"""Cells, devices and settings for which torch's answer is kept."""
_answers: Recent[tuple[object, ...], torch.dtype | None] = Recent(MOST_ANSWERS)


def is_on(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device_type)


def lower_type(cell: str, device: torch.device, *, projected: bool = False) -> torch.dtype | None:
    """The 16-bit type in which torch computes a layer of fp32 tensors under autocast as it is now.

    ``projected`` says that it is an LSTM with a projection. ``None`` where torch computes in several types, where it
    cannot compute the layer, and where it cannot be asked: a layer of a unit or two is computed for the answer, which
    no capture of a CUDA graph should hold.
    """
    key = (
        cell,
        projected,
        device,
        autocast_dtype(device),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
    )
    if key in _answers:
        return _answers[key]
    if is_capturing(device):
        return None
    answer = _answers[key] = _asked(cell, device, projected)
    return answer


def _asked(cell: str, device: torch.device, projected: bool) -> torch.dtype | None:
    """The type of a result of torch's operator, where that is a 16-bit type."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        units = 2 if projected else 1  # a projection is to fewer numbers
        ones = torch.ones((1, 1, units), dtype=torch.float32, device=device)
        x = h = ones[..., :1].contiguous()
        weight = torch.ones((GATES[cell] * units, 1), dtype=torch.float32, device=device)
        weights = [weight, weight, *([ones[0]] if projected else [])]
        state = (h, ones) if cell == "lstm" else h
        try:
            results = OPERATORS[cell](x, state, weights, False, 1, 0.0, False, False, False)
        except RuntimeError:  # as oneDNN's of some types on some processors: the caller's own call says why
            return None
    types = {result.dtype for result in results}
    return results[0].dtype if len(types) == 1 and types.issubset(LOWER) else None
