"""Plans for the convolutions of a model on split images: :func:`optimize`, the counterpart of ``tilewise.optimize``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tilewise.comm.link import Noted
from tilewise.distributed.norm_choice import choose_norms
from tilewise.distributed.parallel import SpatialParallel
from tilewise.distributed.peer_choice import choose_peers
from tilewise.distributed.planned import PlannedPasses
from tilewise.distributed.shard import Shard
from tilewise.nn.book import Book, make_options
from tilewise.nn.record import arguments_of, state_kept
from tilewise.planner import Planner
from tilewise.planner.planner import MEASURING

__all__ = ["optimize"]


def optimize(
    parallel: SpatialParallel,
    example: Any,
    *,
    training: bool = True,
    workspace: int | str | None = None,
    batch_sizes: str = "powers_of_two",
    rigor: str = "measure",
    deterministic: bool = False,
    error_limit: float | None = None,
    strict: bool = False,
    cuda_graphs: bool = False,
    exclude: Sequence[str] = (),
    planner: Planner | None = None,
) -> SpatialParallel:
    """Plan each rank's own convolutions of ``parallel`` for inputs like ``example``, and run them from now on.

    ``example`` is an input of the model, or a tuple of several: shards, as :meth:`SpatialParallel.scatter` makes them.
    One step is run (with ``training`` forward and backward; gradients, buffers and random numbers are put back), then
    each rank measures a share of all ranks' problems, rank 0 decides, and all compare their plans. Other shapes stay
    torch's until they are planned as well. Every rank of the job calls it, with the same arguments; the others are
    those of :func:`tilewise.optimize`, and ``workspace`` is a limit for each kernel on each rank.

    Raises ``ValueError`` naming the argument at fault, ``NoPlanError`` where nothing keeps the limit, and
    :class:`~tilewise.comm.agreement.RankMismatch` on every rank where any two differ.
    """
    options = make_options(workspace, batch_sizes, rigor, deterministic, error_limit, strict, cuda_graphs, exclude)
    positional, named = arguments_of(example)
    positional = tuple(map(_apart, positional))
    named = {name: _apart(value) for name, value in named.items()}
    passes = parallel.space.passes
    if not isinstance(passes, PlannedPasses) or (passes.book.options, planner) != (options, None):
        passes = PlannedPasses(Book(options, "torch", planner))
    now = torch.are_deterministic_algorithms_enabled()

    def step() -> None:
        with state_kept(parallel.module), _gradients_kept(parallel), torch.set_grad_enabled(training):
            found = parallel(*positional, **named)
            if training:
                _backward(found)

    space, link = parallel.space, parallel.space.link
    space.passes, space.norms = passes, None
    link.noted = Noted()
    try:
        passes.record(step)
    finally:
        noted, link.noted = link.noted, None
    passes.plan(now)
    if rigor in MEASURING:
        device = _device(parallel, positional)
        passes.exchanges = choose_peers(link, noted, device, graphs=options.cuda_graphs)
        space.norms, passes.norms = choose_norms(link, noted, device, graphs=options.cuda_graphs)
    return parallel


def _device(parallel: SpatialParallel, inputs: tuple[Any, ...]) -> torch.device:
    tensors = [value.local if isinstance(value, Shard) else value for value in inputs]
    found = [t for t in (*tensors, *parallel.parameters()) if isinstance(t, torch.Tensor)]
    return found[0].device if found else torch.device("cpu")


def _apart(value: Any) -> Any:
    """The same input, whose gradient goes nowhere."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    part = value.local if isinstance(value, Shard) else value
    own = part.detach().requires_grad_(part.requires_grad)
    return value.like(own) if isinstance(value, Shard) else own


@contextmanager
def _gradients_kept(parallel: SpatialParallel) -> Iterator[None]:
    parameters = list(parallel.module.parameters())
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _backward(found: Any) -> None:
    """Gradients of one for everything that has any."""
    outputs = [found] if isinstance(found, torch.Tensor) else _tensors(found)
    parts = [t.local if isinstance(t, Shard) else t for t in outputs]
    parts = [part for part in parts if part.requires_grad]
    if parts:
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for entry in entries for t in _tensors(entry)]
