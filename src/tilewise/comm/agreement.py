"""Agreement between ranks: a difference is an error on every rank, before any rank waits for another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankMismatch", "agree", "difference", "gather", "named_ranks", "receive", "send", "several_ranks"]


class RankMismatch(RuntimeError):
    """Ranks would compute different things; the message says which rank differs, and how.

    Every rank raises it, so that none waits for another.

    In each of several ranks, whose models should be the same:

    >>> try:  # doctest: +SKIP
    ...     tilewise.optimize(model, images)
    ... except tilewise.nn.RankMismatch as error:
    ...     print(error)
    """


def several_ranks() -> bool:
    """Whether this process is one of several in ``torch.distributed``."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def named_ranks(ranks: Iterable[int]) -> str:
    """The ranks in words, such as ``rank 0 and rank 2``."""
    return " and ".join(f"rank {rank}" for rank in ranks)


def agree(text: str, what: str) -> None:
    """Compare ``text`` among all ranks, which all call this. ``what`` names the text in the error.

    Raises :class:`RankMismatch` on every rank where any two differ.
    """
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(_device())
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    if all(bool((other == digests[0]).all()) for other in digests):
        return
    lines = [other.splitlines() for other in _gather_text(text)]
    rank = next(i for i, other in enumerate(digests) if not bool((other == digests[0]).all()))
    raise RankMismatch(difference(what, lines[0], lines[rank], 0, rank))


def difference(what: str, own: list[str], others: list[str], rank: int, other: int) -> str:
    """The first line in which the lines of two ranks differ, in words."""
    index = next((i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), min(len(own), len(others)))
    a, b = (lines[index] if index < len(lines) else "nothing more" for lines in (own, others))
    return f"ranks differ in {what}: rank {rank} has {a!r} where rank {other} has {b!r}"


def send(data: object) -> None:
    """Send ``data`` as JSON from rank 0 to all other ranks, which call :func:`receive`."""
    payload = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8).to(_device())
    dist.broadcast(torch.tensor([payload.numel()], dtype=torch.int64, device=payload.device), 0)
    dist.broadcast(payload, 0)


def receive() -> object:
    """The value that rank 0 gave to :func:`send`."""
    size = torch.zeros(1, dtype=torch.int64, device=_device())
    dist.broadcast(size, 0)
    payload = torch.empty(int(size.item()), dtype=torch.uint8, device=size.device)
    dist.broadcast(payload, 0)
    return json.loads(_text(payload))


def gather(data: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The ``data`` of all ranks of ``group``, in the group's order, sent as JSON. Every one of them calls this."""
    return [json.loads(text) for text in _gather_text(json.dumps(data), group)]


def _gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The texts of all ranks of ``group``, padded to one length on the way."""
    data = torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8).to(_device(group))
    size = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(n.item()) for n in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [_text(t[: int(n.item())]) for t, n in zip(texts, sizes, strict=True)]


def _text(data: torch.Tensor) -> str:
    """The text whose bytes a tensor holds."""
    return data.cpu().numpy().tobytes().decode()


def _device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of tensors that the group sends."""
    on_gpu = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
