"""Copies of many tensors of one device on another, which travel in few large pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["BUCKET_BYTES", "Mirror"]

BUCKET_BYTES = 32 << 20
"""Bytes of a piece. While one is added up, the next one travels."""
ALIGNMENT = 512
"""Bytes at which a tensor begins in a piece, as in torch's allocator: kernels choose wider loads there."""


@dataclass
class _Bucket:
    """Some of the tensors, of one dtype: their memory in one piece on either side, and views of it as tensors.

    There is no ``source`` for one large tensor that travels between GPUs as it is.
    """

    indices: list[int]
    source: torch.Tensor | None
    target: torch.Tensor
    source_views: list[torch.Tensor]
    target_views: list[torch.Tensor]
    sent: torch.cuda.Event | None = field(default=None)


class Mirror:
    """Copies tensors like those of ``like`` from ``source`` to ``target``.

    What has been copied is in :attr:`copies`, always the same tensors. With ``counted=False`` a copy does not count as
    a change of them, so that autograd lets a graph be that was made before.
    """

    def __init__(
        self, like: Sequence[torch.Tensor], source: torch.device, target: torch.device, *, counted: bool = True
    ) -> None:
        self._source, self._target, self._counted = source, target, counted
        self._buckets: list[_Bucket] = []
        self.copies: list[torch.Tensor] = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(like)
        for indices in _divided(like):
            self._add(like, indices)

    def _add(self, like: Sequence[torch.Tensor], indices: list[int]) -> None:
        dtype = like[indices[0]].dtype
        starts, total = _places([like[i] for i in indices])
        pinned = "cuda" in (self._source.type, self._target.type)

        def memory(device: torch.device) -> torch.Tensor:
            return torch.empty(total, dtype=dtype, device=device, pin_memory=pinned and device.type == "cpu")

        def views(flat: torch.Tensor) -> list[torch.Tensor]:
            places = zip(indices, starts, strict=True)
            return [flat.as_strided(like[i].shape, _strides(like[i]), start) for i, start in places]

        target = memory(self._target)
        as_it_is = len(indices) == 1 and self._source.type == self._target.type == "cuda"
        source = None if as_it_is else memory(self._source)
        self._buckets.append(_Bucket(indices, source, target, [] if source is None else views(source), views(target)))
        for index, view in zip(indices, self._buckets[-1].target_views, strict=True):
            self.copies[index] = view

    def copy(self, tensors: Sequence[torch.Tensor | None], changed: Sequence[bool] | None = None) -> None:
        """Copy the pieces in which there is a tensor, or only those with one that ``changed`` names.

        The current streams of both devices are ordered. On a CPU the copies are there after :meth:`wait`.
        """
        for bucket in self._buckets:
            there = [(place, tensors[i]) for place, i in enumerate(bucket.indices)]
            present = [(place, tensor) for place, tensor in there if tensor is not None]
            if not present or (changed is not None and not any(changed[i] for i in bucket.indices)):
                continue
            if self._source.type == "cpu" and bucket.sent is not None:
                bucket.sent.synchronize()  # else memory would be written that still travels
            with torch.no_grad():
                if bucket.source is None:
                    source, target = present[0][1], bucket.target_views[0]
                else:
                    views = [bucket.source_views[place] for place, _ in present]
                    torch._foreach_copy_(views, [tensor for _, tensor in present])
                    source, target = bucket.source, bucket.target
                (target if self._counted else target.data).copy_(source, non_blocking=True)
            if "cuda" in (self._source.type, self._target.type):
                device = self._source if self._source.type == "cuda" else self._target
                bucket.sent = torch.cuda.Event()
                bucket.sent.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until what was copied to a CPU is there."""
        if self._target.type == "cpu":
            for bucket in self._buckets:
                if bucket.sent is not None:
                    bucket.sent.synchronize()


def _divided(like: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of the tensors in groups of one dtype, each of :data:`BUCKET_BYTES` or of a single larger tensor."""
    groups: list[list[int]] = []
    last: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(like):
        size = tensor.numel() * tensor.element_size()
        group, before = last.get(tensor.dtype, ([], BUCKET_BYTES))
        if before + size > BUCKET_BYTES:
            group, before = [], 0
            groups.append(group)
        group.append(index)
        last[tensor.dtype] = group, before + size
    return groups


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a piece of memory for all, and the length of that, in elements."""
    unit = max(1, ALIGNMENT // tensors[0].element_size())
    starts, total = [], 0
    for tensor in tensors:
        starts.append(total)
        total += -(-tensor.numel() // unit) * unit
    return starts, total


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy: those of ``tensor`` where it fills its memory, else contiguous ones."""
    return tuple(torch.empty_like(tensor, device="meta", dtype=tensor.dtype).stride())
