"""Plans for the convolutions of a model on split images: :func:`optimize`, the counterpart of ``tilewise.optimize``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch

from tilewise.comm.link import Link, Noted
from tilewise.comm.peer_choice import choose_peers
from tilewise.distributed.norms.choice import choose_norms
from tilewise.distributed.parallel import SpatialParallel
from tilewise.distributed.planned import PlannedPasses
from tilewise.distributed.shards.shard import Shard
from tilewise.nn.arguments import in_line, settings_of, takes
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.record import arguments_of, state_kept
from tilewise.planner import Planner
from tilewise.planner.options import MEASURING
from tilewise.settings import Settings, StepOptions

__all__ = ["optimize"]


EXAMPLE = """\
In each of several ranks, after which steps run as before:

>>> parallel = tilewise.distributed.SpatialParallel(model, mesh)  # doctest: +SKIP
>>> parallel = tilewise.distributed.optimize(parallel, parallel.scatter(images), workspace="64MiB")  # doctest: +SKIP
"""


@takes(StepOptions, EXAMPLE)
def optimize(
    parallel: SpatialParallel,
    example: Any,
    *,
    settings: Settings | None = None,
    planner: Planner | None = None,
    **options: Unpack[StepOptions],
) -> SpatialParallel:
    """Plan each rank's own convolutions of ``parallel`` for inputs like ``example``, and run them from now on.

    ``example`` is an input of the model, or a tuple of several: shards, as :meth:`SpatialParallel.scatter` makes them.
    One step is run (with ``training`` forward and backward; gradients, buffers and random numbers are put back), then
    each rank measures a share of all ranks' problems, rank 0 decides, and all compare their plans. Other shapes stay
    torch's until they are planned as well. Every rank of the job calls it, with the same arguments, and
    ``workspace`` is a limit for each kernel on each rank.

    {arguments}

    Options, each by keyword:

    {options}

    Raises ``ValueError`` naming the argument at fault, ``NoPlanError`` where nothing keeps the limit, and
    :class:`~tilewise.comm.agreement.RankMismatch` on every rank where any two differ.
    """
    if not isinstance(parallel, SpatialParallel):
        raise ValueError(f"parallel={in_line(parallel)}: a tilewise.distributed.SpatialParallel would do")
    merged = settings_of("optimize", StepOptions, settings, options)
    training, planning = merged.training, merged.options()
    positional, named = arguments_of(example)
    positional = tuple(map(_apart, positional))
    named = {name: _apart(value) for name, value in named.items()}
    passes = parallel.space.passes
    if not isinstance(passes, PlannedPasses) or (passes.plan_table.options, planner) != (planning, None):
        passes = PlannedPasses(PlanTable(planning, "torch", planner))
    deterministic = torch.are_deterministic_algorithms_enabled()

    def step() -> None:
        """Run one step and restore the model's state."""
        with (
            state_kept(parallel.module, (positional, named)),
            _gradients_kept(parallel),
            torch.set_grad_enabled(training),
        ):
            outputs = parallel(*positional, **named)
            if training:
                _backward(outputs)

    space, link = parallel.space, parallel.space.link
    space.passes, space.norms = passes, None
    noted = _messages_of(link, passes, step)
    passes.plan(deterministic)
    if planning.rigor in MEASURING:
        device = _device(parallel, positional)
        passes.exchanges = choose_peers(link, noted, device, graphs=planning.cuda_graphs)
        space.norms, passes.norms = choose_norms(link, noted, device, graphs=planning.cuda_graphs)
    return parallel


def _messages_of(link: Link, passes: PlannedPasses, step: Callable[[], object]) -> Noted:
    """What ``link`` sends in one ``step``, whose problems ``passes`` record."""
    noted = link.noted = Noted()
    try:
        passes.record(step)
    finally:
        link.noted = None
    return noted


def _device(parallel: SpatialParallel, inputs: tuple[Any, ...]) -> torch.device:
    """The device of the first input or, without tensors, parameter; a CPU where there is none."""
    tensors = [value.local if isinstance(value, Shard) else value for value in inputs]
    tensors_and_parameters = [value for value in (*tensors, *parallel.parameters()) if isinstance(value, torch.Tensor)]
    return tensors_and_parameters[0].device if tensors_and_parameters else torch.device("cpu")


def _apart(value: Any) -> Any:
    """The same input, detached, so that its gradient reaches nothing else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    part = value.local if isinstance(value, Shard) else value
    detached = part.detach().requires_grad_(part.requires_grad)
    return value.like(detached) if isinstance(value, Shard) else detached


@contextmanager
def _gradients_kept(parallel: SpatialParallel) -> Iterator[None]:
    """Begin with no gradients of parameters, and restore those from before at the end."""
    parameters = list(parallel.module.parameters())
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _backward(results: Any) -> None:
    """Run backward from every tensor in ``results`` that has a gradient, starting from ones."""
    outputs = [results] if isinstance(results, torch.Tensor) else _tensors(results)
    parts = [output.local if isinstance(output, Shard) else output for output in outputs]
    parts = [part for part in parts if part.requires_grad]
    if parts:
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, nested in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]
