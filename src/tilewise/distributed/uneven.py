"""Gradients averaged over the samples of all ranks, of which each may have another number, or none.

``DistributedDataParallel`` averages over ranks: each rank's mean counts the same, however many samples it is of. What
is computed here is the mean over samples, as one process with the whole batch has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["UnevenMean", "uneven_mean"]

BUCKET_BYTES = 32 << 20
"""Bytes that are summed over ranks at a time."""


def uneven_mean(model: nn.Module, count: int, group: dist.ProcessGroup | None = None) -> int:
    """Make the gradients of ``model`` the mean over the samples of all ranks; return how many samples these are.

    Each rank calls it after ``backward()`` of the mean loss of its own ``count`` samples. A rank without samples calls
    it with 0, without a backward; whatever its gradients are, they do not count. The result is 0 when no rank has had
    samples, and gradients are then left alone: so ranks whose data ends early take part until all have ended. In each
    of several ranks:

    >>> batches = iter(loader)  # doctest: +SKIP
    >>> while True:  # doctest: +SKIP
    ...     images, labels = next(batches, (None, ()))
    ...     optimizer.zero_grad()
    ...     if len(labels):
    ...         F.cross_entropy(model(images), labels).backward()
    ...     if not tilewise.distributed.uneven_mean(model, len(labels)):
    ...         break
    ...     optimizer.step()

    All ranks of ``group``, by default of all processes, must have the same parameters. A parameter without a gradient
    on every rank stays without; one that has one somewhere gets one everywhere. Sums are in the gradients' dtype.
    Raises ``ValueError`` for a count that is no whole number of 0 or more, for a model inside
    ``DistributedDataParallel``, which :class:`UnevenMean` is for, and for sparse gradients; and ``RuntimeError``
    without an initialised process group.
    """
    _check_count(count)
    if not isinstance(model, nn.Module) or isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"model={type(model).__name__}: a module that is not wrapped would do; "
            "tilewise.distributed.UnevenMean is for DistributedDataParallel"
        )
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: torch.distributed.init_process_group would do")
    parameters = [p for p in model.parameters() if p.requires_grad]
    sparse = next((p for p in parameters if p.grad is not None and p.grad.layout is not torch.strided), None)
    if sparse is not None and count:
        raise ValueError(f"model: a gradient of shape {tuple(sparse.shape)} is sparse: a dense one would do")
    device = parameters[0].device if parameters else torch.device("cpu")
    # How many samples, and which parameters have a gradient anywhere, in one exchange.
    facts = torch.zeros(1 + len(parameters), dtype=torch.int64, device="cpu")
    facts[0] = count
    if count:
        facts[1:] = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64, device="cpu")
    facts = facts.to(device)
    dist.all_reduce(facts, group=group)
    total, *having = facts.tolist()
    if not total:
        return 0
    with torch.no_grad():
        for bucket in _buckets([p for p, ranks in zip(parameters, having, strict=True) if ranks]):
            _average(bucket, count, total, group)
    return int(total)


def _average(parameters: Sequence[nn.Parameter], count: int, total: int, group: dist.ProcessGroup | None) -> None:
    """Make the gradients of some parameters the mean over ``total`` samples, ``count`` of which are this rank's."""
    size = sum(p.numel() for p in parameters)
    flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
    views = [view.view_as(p) for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    if count:  # else what is in .grad may be anything, not a number included
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        flat.mul_(count / total)
    dist.all_reduce(flat, group=group)
    for view, parameter in zip(views, parameters, strict=True):
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(view)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups of one dtype and device, of :data:`BUCKET_BYTES` or one larger parameter."""
    groups: list[list[nn.Parameter]] = []
    last: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        group, before = last.get(key, ([], BUCKET_BYTES))
        if before + size > BUCKET_BYTES:
            group, before = [], 0
            groups.append(group)
        group.append(parameter)
        last[key] = group, before + size
    return groups


class UnevenMean:
    """Lets a ``DistributedDataParallel`` model average over the samples of all ranks instead of over ranks.

    It registers itself as the model's communication hook. Each rank says before every ``backward()`` how many samples
    its mean loss is of. A rank without samples says 0 and runs the backward of any loss of the model, say of zeros, as
    ``DistributedDataParallel`` waits for all ranks; its gradients do not count, not even ``nan``. For ranks whose data
    ends early there is torch's ``Join``. In each of several ranks:

    >>> model = torch.nn.parallel.DistributedDataParallel(model)  # doctest: +SKIP
    >>> mean = tilewise.distributed.UnevenMean(model)  # doctest: +SKIP
    >>> with torch.distributed.algorithms.Join([model]):  # doctest: +SKIP
    ...     for images, labels in batches:
    ...         optimizer.zero_grad()
    ...         loss = F.cross_entropy(model(images), labels)
    ...         mean.count(len(labels))
    ...         loss.backward()
    ...         optimizer.step()

    Raises ``ValueError`` for anything but a ``DistributedDataParallel`` model, and what its ``register_comm_hook``
    raises, as where the model has another hook. A backward without a :meth:`count` before it counts as one of no
    samples, which is what a rank that has joined contributes.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel) -> None:
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(f"model={type(model).__name__}: a DistributedDataParallel model would do")
        self._group = model.process_group
        self._count = 0
        self._total: torch.Tensor | None = None
        # DistributedDataParallel refuses annotations that are text, as all are here: hence a function without any.
        model.register_comm_hook(self, lambda state, bucket: _weighted(state, bucket))

    def count(self, samples: int) -> None:
        """Say that the next backward of this rank is of the mean over so many samples.

        Raises ``ValueError`` for anything but a whole number of 0 or more.
        """
        _check_count(samples)
        self._count = samples

    def _begin(self, device: torch.device) -> None:
        """Sum the counts of all ranks, and let this rank's hold for one backward alone."""
        self._total = torch.full((1,), self._count, dtype=torch.float64, device=device)
        dist.all_reduce(self._total, group=self._group)


def _weighted(state: UnevenMean, bucket: Any) -> Any:
    """The sum over ranks of a bucket of gradients, each weighted by its rank's part of all samples."""
    buffer: torch.Tensor = bucket.buffer()
    if bucket.index() == 0:
        state._begin(buffer.device)
    assert state._total is not None
    if state._count:
        buffer.mul_((state._count / state._total).to(buffer.dtype))
    else:
        buffer.zero_()
    if bucket.is_last():
        state._count = 0  # a rank that has joined has no samples
    work = dist.all_reduce(buffer, group=state._group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _check_count(count: object) -> None:
    """Raise ``ValueError`` for anything but a whole number of 0 or more."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count={count!r}: a whole number of 0 or more, this rank's samples, would do")
