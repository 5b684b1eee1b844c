"""128 bits that stand for a tensor's elements, computed where it lies: equal bits, equal digests, NaN and -0 too.

Sums of mixed integers, exact on every device, so that a CPU and a GPU find the same. It tells weights of other seeds
from each other; it is no guard against somebody who seeks two tensors with one digest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["bytes_of", "digests", "local_parts"]

WORDS = 1 << 20
"""Words of 8 bytes that are mixed at a time."""
OF_WORD, OF_PLACE, FIRST, SECOND = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd numbers whose bits look random (fractions of the golden ratio and others of splitmix64 and xxHash)."""


def digests(tensors: list[list[torch.Tensor]]) -> list[str]:
    """A digest of each list of plain tensors: of their bytes in the order of elements, whatever their strides.

    Tensors stay on their device. Two numbers per tensor are copied to the host, in one copy per device.
    """
    numbers = [[_digest(tensor) for tensor in parts] for parts in tensors]
    all_pairs = [pair for parts in numbers for pair in parts]
    on_host: dict[int, str] = {}
    for device in {pair.device for pair in all_pairs}:
        on_device = [pair for pair in all_pairs if pair.device == device]
        for pair, (a, b) in zip(on_device, torch.stack(on_device).tolist(), strict=True):
            on_host[id(pair)] = f"{a % 2**64:016x}{b % 2**64:016x}"
    return ["+".join(on_host[id(pair)] for pair in parts) for parts in numbers]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two whole numbers of 64 bits that stand for the bytes of ``tensor``, on its device."""
    with torch.no_grad():
        words = _words(tensor)
        total = torch.zeros(2, dtype=torch.int64, device=words.device)
        for first in range(0, words.numel(), WORDS):
            part = words[first : first + WORDS]
            mixed = torch.arange(first, first + part.numel(), dtype=torch.int64, device=words.device).mul_(OF_PLACE)
            mixed.add_(part * OF_WORD)
            mixed.bitwise_xor_(mixed >> 32).mul_(FIRST).bitwise_xor_(mixed >> 29)
            total[0] += mixed.sum()
            mixed.mul_(SECOND).bitwise_xor_(mixed >> 32)
            total[1] += mixed.sum()
        return total


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor in the order of its elements: a view where they lie so in memory, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one element or none any stride is contiguous


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor as integers of 8 bytes, padded with zeros."""
    flat = bytes_of(tensor)
    if flat.numel() % 8:
        flat = F.pad(flat, (0, -flat.numel() % 8))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors here whose bytes are the value of ``tensor``, and which must be equal on all ranks.

    There are none for a tensor without data (on the meta device, or lazy), and none for a ``DTensor`` that is cut, of
    which each rank has another part.
    """
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return []
    if hasattr(tensor, "placements") and hasattr(tensor, "to_local"):  # to ask DTensor itself would be to import it
        is_replicated = all(placement.is_replicate() for placement in tensor.placements)
        return local_parts(tensor.to_local().detach()) if is_replicated else []
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.int_repr() if tensor.is_quantized else tensor]
