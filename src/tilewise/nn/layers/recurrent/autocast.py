"""The type in which recurrent layers compute under autocast. torch says: its rules differ by cell and by device.

cuDNN's layers compute in fp16 whatever type autocast is asked for. oneDNN's LSTM computes in that type. Where neither
computes, autocast casts the products of each step by itself, and a GRU then keeps its states in fp32, as does an LSTM
with a projection its c.

On a processor whose oneDNN has no LSTM of that type torch refuses one of fp32 tensors. Where input and states have the
type already torch does not ask oneDNN, and all results have that type.
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


def lower_type(
    cell: str, device: torch.device, *, projected: bool = False, lowered: bool = False
) -> torch.dtype | None:
    """The 16-bit type in which torch computes a layer of fp32 tensors under autocast as it is now.

    ``projected`` says that it is an LSTM with a projection, ``lowered`` that input and states have autocast's type
    already: some processors compute only such a layer. ``None`` where torch computes in several types, where it cannot
    compute the layer, and where it cannot be asked: a layer of a unit or two is computed for the answer, which no
    capture of a CUDA graph should hold.
    """
    autocast = autocast_dtype(device)
    key = (cell, projected, lowered, device, autocast, torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled())
    if key in _answers:
        return _answers[key]
    if is_capturing(device):
        return None
    types = _types(cell, device, projected, torch.float32)
    if types is None and lowered and autocast is not None:
        types = _types(cell, device, projected, autocast)
    answer = _answers[key] = types[0] if types and len(set(types)) == 1 and types[0] in LOWER else None
    return answer


def _types(cell: str, device: torch.device, projected: bool, inputs: torch.dtype) -> list[torch.dtype] | None:
    """The types of the results of torch's operator, of fp32 weights; ``None`` where it refuses the layer."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        units = 2 if projected else 1  # a projection is to fewer numbers
        ones = torch.ones((1, 1, units), dtype=inputs, device=device)
        x = h = ones[..., :1].contiguous()
        weight = torch.ones((GATES[cell] * units, 1), dtype=torch.float32, device=device)
        weights = [weight, weight, *([weight[:units].view(1, units)] if projected else [])]
        state = (h, ones) if cell == "lstm" else h
        try:
            results = OPERATORS[cell](x, state, weights, False, 1, 0.0, False, False, False)
        except RuntimeError:  # as oneDNN's of some types on some processors: the caller's own call says why
            return None
    return [result.dtype for result in results]
