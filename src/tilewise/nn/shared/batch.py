"""The arguments of a call cut along the batch, and results of parts joined along it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["CONSTANTS", "Batch", "Results", "joined", "ranges"]

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types of arguments and results that are the same for every part."""


_ONE = tree_flatten(((0,), {}))[1]


def ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first sample of each part, and the one after its last."""
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


@dataclass(frozen=True)
class Batch:
    """The arguments of one call: ``tensors`` whose first axis has ``size`` samples, and constants."""

    tensors: tuple[torch.Tensor, ...]
    size: int
    _leaves: tuple[Any, ...]
    _structure: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """The arguments ``args`` and ``kwargs``.

        Raises ``ValueError`` where there is no tensor, where tensors differ in their first axis or have none, and for
        anything that is neither a tensor nor a constant.
        """
        leaves, structure = tree_flatten((args, dict(kwargs)))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
                raise ValueError(
                    f"the model was called with a {type(leaf).__name__}, which cannot be cut into parts: tensors "
                    "with the samples along their first axis, numbers and text would do, also in tuples and dicts"
                )
        if not tensors:
            raise ValueError(
                "the model was called without a tensor: one with the samples along its first axis would do"
            )
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise ValueError(f"the model was called with a tensor of layout {tensor.layout}: a dense one would do")
            if not tensor.dim() or tensor.shape[0] != tensors[0].shape[0]:
                shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
                raise ValueError(
                    f"the model was called with tensors of shapes {shapes}: all must have the samples along their "
                    "first axis; a number, or a buffer of the model, would do for what all samples share"
                )
        if not tensors[0].shape[0]:
            raise ValueError("the model was called with a batch of 0 samples: one or more would do")
        return cls(tensors, tensors[0].shape[0], tuple(leaves), structure)

    @property
    def single(self) -> bool:
        """Whether the call has one plain tensor as its only argument."""
        return len(self._leaves) == 1 and type(self.tensors[0]) is torch.Tensor and self._structure == _ONE

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like these, with ``tensors`` in place of their own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


@dataclass(frozen=True)
class Results:
    """What the model returned for one part: its tensors, and its other values where ``None`` does not stand."""

    tensors: tuple[torch.Tensor, ...]
    others: tuple[tuple[Any] | None, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, value: Any, size: int) -> Results:
        """The result ``value`` for ``size`` samples. Raises ``ValueError`` where it cannot be joined with others."""
        leaves, structure = tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
                raise ValueError(
                    f"the model returns a {type(leaf).__name__}, which cannot be joined from parts of a batch: "
                    "tensors with the samples along their first axis would do, also in tuples and dicts"
                )
            if isinstance(leaf, torch.Tensor) and (not leaf.dim() or leaf.shape[0] != size):
                raise ValueError(
                    f"the model returns a tensor of shape {tuple(leaf.shape)} for {size} samples: one with the samples "
                    "along its first axis would do, such as a loss for each sample, whose mean the caller takes"
                )
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        others = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves)
        return cls(tensors, others, structure)

    def agree(self, other: Results) -> None:
        """Raise ``ValueError`` where another part returned something of another structure."""
        if self.structure != other.structure or self.others != other.others:
            raise ValueError(
                f"parts of one batch returned {self.structure} with {self._values()} and {other.structure} with "
                f"{other._values()}: the same structure, and the same values beside tensors, would do"
            )

    def _values(self) -> list[Any]:
        return [other[0] for other in self.others if other is not None]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns, with ``tensors`` in place of those of the part."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if each is None else each[0] for each in self.others], self.structure)


def joined(parts: Sequence[torch.Tensor | None], sizes: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Parts of ``sizes`` samples one after the other on ``device``; zeros for one that is ``None``.

    ``None`` where all are.
    """
    there = [part for part in parts if part is not None]
    if not there:
        return None
    queued = device.type == "cuda"  # what is on a CPU is read at once, so that it has to be there
    if len(parts) == 1:
        return there[0].to(device, non_blocking=queued)
    first = there[0]
    whole = torch.empty((sum(sizes), *first.shape[1:]), dtype=first.dtype, device=device)
    if first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last) and not first.is_contiguous():
        whole = whole.to(memory_format=torch.channels_last)
    for part, (start, stop) in zip(parts, ranges(sizes), strict=True):
        if part is None:
            whole[start:stop].zero_()
        else:
            whole[start:stop].copy_(part, non_blocking=queued)
    return whole
