"""A model of the time and memory that a training step takes on a mesh of GPUs, from the times of local kernels.

A mesh has ``data`` groups of ranks. Each group has its share of the batch, and every activation of that share is split
along space among the ranks of the group. All ranks hold all weights. The model is of the slowest rank's time and the
fullest rank's memory:

- A convolution's forward pass computes its interior, the outputs that need no halo, while halos travel. It takes
  max(interior, exchange) + boundary, or the sum of all where that is less. In backward the ghost zones of the input's
  gradient are added up while the filter's gradient is computed (Jin et al. 2018, section 2). Pooling and interpolation
  wait for their halos first.
- An exchange takes one latency for each split axis, and its bytes, corners included, divided by the bandwidth.
- Gradients of weights are added up over all ranks during the rest of backward. Those that are complete when the link
  is free travel together. An all-reduce is a ring, which sends 2(n-1)/n of its bytes, or a tree where that is faster.
- Normalization with statistics over space, sums over space and gathers take the time of their messages. Those of
  ``nn.SyncBatchNorm`` go to the ranks of all images.
- Memory follows the step's allocations, each reduced to a rank's share with its ghost zones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tilewise.distributed.mesh.events import Allocated, Array, Event, Freed, Kernel, StepTrace
from tilewise.distributed.parts.ghosts import Ghost, Reader, ghosts, obstacle, received
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import SPACE, ConvProblem, Pass

__all__ = [
    "NVLINK",
    "Clock",
    "Cluster",
    "LinkSpeed",
    "MeshMemory",
    "MeshShape",
    "StepCost",
    "Timed",
    "all_reduce_ms",
    "impossible",
    "step_cost",
]

BUCKET = 25 << 20
"""Bytes of gradients that travel together before the rest of backward is over, as in torch's data parallelism."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast a GPU communicates: ``bandwidth`` in bytes/s each way at once, ``latency`` in seconds a message.

    >>> from tilewise.distributed.mesh import LinkSpeed
    >>> LinkSpeed(bandwidth=1e9, latency=0.0).ms(1e6)
    1.0
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth={self.bandwidth!r}: bytes a second above 0 would do")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency!r}: seconds, 0 or more, would do")

    def ms(self, nbytes: float, messages: int = 1) -> float:
        """Milliseconds for ``nbytes`` in ``messages`` messages, one after the other."""
        return 1e3 * (messages * self.latency + nbytes / self.bandwidth)


NVLINK = LinkSpeed(450e9, 4e-6)
"""NVLink 4 of an H100 or H200 SXM. NVIDIA's data sheet gives 900 GB/s for both ways together. NCCL's send and receive
of a small message takes 3.7 us on a GPU of that kind (github.com/NVIDIA/nccl/issues/1984)."""
INFINIBAND = LinkSpeed(50e9, 10e-6)
"""One 400 Gb/s adapter a GPU, as in the data sheet of a DGX H200. The latency is an assumption."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of ``node`` GPUs each: ``inside`` is the link between GPUs of one node, ``across`` that between nodes.

    >>> from tilewise.distributed.mesh import Cluster, LinkSpeed
    >>> Cluster(inside=LinkSpeed(bandwidth=300e9, latency=10e-6), node=4).link(4).bandwidth
    300000000000.0
    """

    inside: LinkSpeed = NVLINK
    node: int = 8
    across: LinkSpeed = INFINIBAND

    def __post_init__(self) -> None:
        if self.node < 1:
            raise ValueError(f"node={self.node}: GPUs a node, 1 or more, would do")

    def link(self, ranks: int) -> LinkSpeed:
        """The slowest link among ``ranks`` consecutive ranks."""
        return self.inside if ranks <= self.node and self.node % ranks == 0 else self.across


@dataclass(frozen=True, slots=True)
class MeshShape:
    """``data`` groups of ranks, and the parts along each spatial axis: ``MeshShape(2, (("h", 2), ("w", 1)))``.

    >>> from tilewise.distributed.mesh import MeshShape
    >>> MeshShape(2, (("h", 2), ("w", 1))).gpus
    4
    """

    data: int
    space: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks that share an image."""
        return math.prod(self.parts)

    @property
    def gpus(self) -> int:
        """The number of all ranks."""
        return self.data * self.ranks

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of parts along every spatial axis, in the order of the axes."""
        return tuple(n for _, n in self.space)

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the axes that are split."""
        return tuple(name for name, n in self.space if n > 1)

    def __str__(self) -> str:
        names = [f"data={self.data}"] if self.data > 1 or not self.dims else []
        return " ".join([*names, *(f"{name}={n}" for name, n in self.space if n > 1)])


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel's time in milliseconds and workspace in bytes; ``source`` is "measured", "scaled" or "estimated"."""

    ms: float
    workspace: int = 0
    source: str = "estimated"


class Clock(Protocol):
    """The times of kernels on one GPU."""

    @property
    def launch_ms(self) -> float:
        """Milliseconds to launch one kernel."""
        ...

    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        """The time of ``problem``, which is a rank's part of ``whole``."""
        ...

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        """Milliseconds of a kernel that is no convolution: it moves ``nbytes`` and does ``flops`` in ``dtype``."""
        ...


@dataclass(frozen=True, slots=True)
class MeshMemory:
    """Bytes on the fullest GPU. ``activations`` counts all tensors of the step at its peak, ghost zones included.

    >>> from tilewise.distributed.mesh import MeshMemory
    >>> MeshMemory(parameters=100, gradients=100, activations=500, workspace=50).total
    750
    """

    parameters: int
    gradients: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.parameters + self.gradients + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step on one mesh.

    Communication that runs while kernels compute adds nothing to the step. ``exchange_ms`` is the time that halos add
    all the same, ``reduce_ms`` that of the weights' gradients, and ``sum_ms`` that of sums and gathers. A GPU receives
    ``halo_bytes`` in ``messages`` exchanges. ``sources`` counts the kernels of convolutions by ``Timed.source``.

    >>> from tilewise.distributed.mesh import choose_mesh
    >>> image = torch.empty(1, 3, 64, 64, device="meta")
    >>> cost = choose_mesh(torch.nn.Conv2d(3, 8, 3), image, gpus=2).best.cost
    >>> cost.batch, cost.step_ms > 0
    (1, True)
    """

    mesh: MeshShape
    batch: int
    forward_ms: float
    backward_ms: float
    exchange_ms: float
    sum_ms: float
    reduce_ms: float
    halo_bytes: int
    messages: int
    memory: MeshMemory
    sources: Mapping[str, int]

    @property
    def step_ms(self) -> float:
        """Milliseconds of forward and backward, communication included."""
        return self.forward_ms + self.backward_ms

    @property
    def image_ms(self) -> float:
        """Milliseconds of the step for each image of all ranks' batch."""
        return self.step_ms / self.batch


def all_reduce_ms(nbytes: float, ranks: int, link: LinkSpeed) -> float:
    """Milliseconds until each of ``ranks`` has the sum of all their tensors of ``nbytes``."""
    if ranks == 1 or not nbytes:
        return 0.0
    ring = link.ms(2 * (ranks - 1) / ranks * nbytes, 2 * (ranks - 1))
    steps = 2 * math.ceil(math.log2(ranks))
    return min(ring, link.ms(steps * nbytes, steps))


def impossible(trace: StepTrace, mesh: MeshShape) -> str:
    """Why the step cannot run on ``mesh``, with the first layer whose shards are too small; empty where it can."""
    for kernel in trace.events:
        if isinstance(kernel, Kernel) and not kernel.backward:
            for (name, _), reader, parts in zip(mesh.space, kernel.readers, _parts(kernel, mesh), strict=False):
                reason = obstacle(reader, parts, name) if parts > 1 else ""
                if reason:
                    return f"{kernel.layer or kernel.operator}: {reason}"
    return ""


def _parts(kernel: Kernel, mesh: MeshShape) -> tuple[int, ...]:
    """The number of parts along each axis of a kernel's window; an axis of one position is not split."""
    return tuple(
        parts if max(reader.size, reader.out) > 1 else 1
        for reader, parts in zip(kernel.readers, mesh.parts, strict=False)
    )


def _share(array: Array, mesh: MeshShape, buffers: Sequence[Sequence[Ghost]] = ()) -> float:
    """The fraction of a tensor that the fullest rank holds.

    ``buffers`` has the ranks' ghost zones along each axis where they are to be counted.
    """
    share = 1.0
    for axis, size in enumerate(array.sizes):
        if size > 1 and mesh.parts[axis] > 1:
            length = -(-size // mesh.parts[axis])
            share *= max([length, *(ghost.buffer for ghost in buffers[axis])] if buffers else [length]) / size
    return share


def _nbytes(memory: Allocated, mesh: MeshShape) -> int:
    """The bytes of an allocation on the fullest rank, with the ghost zones of the window that needs the widest ones."""
    shares = [
        _share(memory.array, mesh, [ghosts(reader, parts) for reader, parts in zip(readers, mesh.parts, strict=True)])
        for readers in memory.readers
        if all(reader.size == size for reader, size in zip(readers, memory.array.sizes, strict=False))
    ]
    return math.ceil(memory.nbytes * max([_share(memory.array, mesh), *shares]))


def step_cost(trace: StepTrace, mesh: MeshShape, cluster: Cluster, clock: Clock, batch: int) -> StepCost:
    """The cost of a step on ``mesh``, where ``trace`` is that of one group's share of ``batch`` images.

    Raises ``ValueError`` where the axes of the mesh are not those of the trace.
    """
    names = SPACE[trace.space]
    if tuple(name for name, _ in mesh.space) != names:
        raise ValueError(f"mesh={mesh}: the network's space is {', '.join(names)}")
    run = _Run(mesh, cluster, clock)
    for event in trace.events:
        run.take(event)
    forward, backward = run.finish()
    memory = MeshMemory(trace.parameters, trace.gradients, run.peak - run.peak_workspace, run.peak_workspace)
    return StepCost(
        mesh, batch, forward, backward, run.exchange_ms, run.sum_ms, run.reduce_ms, run.halo_bytes, run.messages,
        memory, dict(sorted(run.sources.items())),
    )  # fmt: skip


@dataclass
class _Run:
    """The state of a simulated step: its time, the time of the link that adds up gradients, and the living memory."""

    mesh: MeshShape
    cluster: Cluster
    clock: Clock
    now: float = 0.0
    """Milliseconds since the step began."""
    forward: float | None = None
    """Milliseconds of the forward pass, once it is over."""
    busy: float = 0.0
    """When the link is done with the gradients that it was given, in milliseconds since the step began."""
    pending: int = 0
    """Bytes of gradients that wait to be sent."""
    exchange_ms: float = 0.0
    sum_ms: float = 0.0
    reduce_ms: float = 0.0
    halo_bytes: int = 0
    messages: int = 0
    alive: int = 0
    peak: int = 0
    peak_workspace: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Simulate the next event of the step."""
        if isinstance(event, Kernel):
            if event.backward and self.forward is None:
                self.forward = self.now
            self._compute(event)
        elif isinstance(event, Allocated):
            self.held[event.index] = _nbytes(event, self.mesh)
            self.alive += self.held[event.index]
            self._reached(0)
        elif isinstance(event, Freed):
            self.alive -= self.held.pop(event.index, 0)
        else:
            self.pending += event.nbytes
            if self.pending >= BUCKET:
                self._send()

    def finish(self) -> tuple[float, float]:
        """Wait for the last gradients; returns the milliseconds of forward and of backward."""
        self._send()
        self.reduce_ms = max(self.busy - self.now, 0.0)
        end = max(self.busy, self.now)
        forward = end if self.forward is None else self.forward
        return forward, end - forward

    def _send(self) -> None:
        """Give the pending gradients to the link."""
        cost = all_reduce_ms(self.pending, self.mesh.gpus, self.cluster.link(self.mesh.gpus))
        if cost:
            self.busy = max(self.busy, self.now) + cost
        self.pending = 0

    def _reached(self, workspace: int) -> None:
        """Update the peak with the living memory and the ``workspace`` of the kernel that runs."""
        if self.alive + workspace > self.peak:
            self.peak, self.peak_workspace = self.alive + workspace, workspace

    def _compute(self, kernel: Kernel) -> None:
        """Add the time of a kernel and of the communication that it needs."""
        if kernel.problems:
            self._convolution(kernel)
        elif kernel.arrays:
            moved = sum(array.nbytes * _share(array, self.mesh) for array in kernel.arrays)
            fraction = moved / max(sum(array.nbytes for array in kernel.arrays), 1)
            local = self.clock.other_ms(moved, kernel.flops * fraction, kernel.dtype)
            exchange = self._exchange(kernel)
            self.exchange_ms += exchange
            self.now += local + exchange
        link, ranks = self.cluster.link(self.mesh.ranks), self.mesh.ranks
        if kernel.sums:
            summing_ranks = self.mesh.gpus if kernel.over_all else ranks
            self._wait_for_sum(all_reduce_ms(kernel.sums, summing_ranks, self.cluster.link(summing_ranks)))
        if kernel.gathered is not None and ranks > 1:
            missing = kernel.gathered.nbytes * (1 - _share(kernel.gathered, self.mesh))
            self._wait_for_sum(link.ms(missing, math.ceil(math.log2(ranks))))

    def _wait_for_sum(self, ms: float) -> None:
        """Add the time of a sum or a gather, which nothing hides."""
        self.sum_ms += ms
        self.now += ms

    def _exchange(self, kernel: Kernel) -> float:
        """Milliseconds to receive the halos of the kernel's window, or in backward to add up its ghost zones."""
        if kernel.halo is None:
            return 0.0
        axes = [ghosts(reader, parts) for reader, parts in zip(kernel.readers, _parts(kernel, self.mesh), strict=True)]
        position_bytes = kernel.halo.itemsize * math.prod(
            kernel.halo.shape[: len(kernel.halo.shape) - kernel.halo.space]
        )
        moved = received(axes) * position_bytes
        if not moved:
            return 0.0
        steps = sum(any(ghost.read > ghost.kept for ghost in axis) for axis in axes)
        self.halo_bytes += moved
        self.messages += steps
        return self.cluster.link(self.mesh.ranks).ms(moved, steps)

    def _convolution(self, kernel: Kernel) -> None:
        """Add the time of a convolution, part of which hides the exchange of its halos."""
        parts = _parts(kernel, self.mesh) if kernel.readers else ()
        times = {problem.pass_: self._timed(problem, kernel.readers, parts) for problem in kernel.problems}
        exchange = self._exchange(kernel)
        local = sum(timed.ms for timed in times.values())
        if not exchange:
            self.now += local
            return
        if kernel.backward:
            beside = times[Pass.WGRAD].ms if Pass.WGRAD in times else 0.0
            total = local - beside + max(beside, exchange)
        else:
            interior, pieces = _interior(kernel.readers, parts)
            boundary = local * (1 - interior) + pieces * self.clock.launch_ms
            total = min(local + exchange, max(local * interior, exchange) + boundary)
        self.exchange_ms += total - local
        self.now += total

    def _timed(self, problem: ConvProblem, readers: Sequence[Reader], parts: Sequence[int]) -> Timed:
        """The time of a rank's part of ``problem``."""
        local = local_problem(problem, readers, parts)
        if local is None:
            return Timed(0.0)
        timed = self.clock.problem(local, problem)
        self.sources[timed.source] = self.sources.get(timed.source, 0) + 1
        self._reached(timed.workspace)
        return timed


def local_problem(problem: ConvProblem, readers: Sequence[Reader], parts: Sequence[int]) -> ConvProblem | None:
    """The problem of the rank that has the largest part of ``problem``; ``None`` where no rank computes anything.

    ``readers`` has the window along each axis, ``parts`` the number of parts along each.
    """
    axes: list[Axis] = []
    for reader, count, whole in zip(readers, parts, problem.axes, strict=False):
        local_axes = [ghost.axis for ghost in ghosts(reader, count) if ghost.axis is not None] if count > 1 else [whole]
        if not local_axes:
            return None
        axes.append(max(local_axes, key=lambda axis: (axis.out, axis.size)))
    return replace(problem, axes=tuple(axes)) if axes else problem


def _interior(readers: Sequence[Reader], parts: Sequence[int]) -> tuple[float, int]:
    """The smallest fraction of outputs on any rank that need no halo, and the number of pieces of the other outputs."""
    share, pieces = 1.0, 0
    for reader, count in zip(readers, parts, strict=True):
        least = min((ghost.interior / ghost.outs for ghost in ghosts(reader, count) if ghost.outs), default=1.0)
        share *= least
        pieces += 2 if least < 1 else 0
    return share, pieces


def meshes(gpus: int, space: int) -> tuple[MeshShape, ...]:
    """Every mesh of ``gpus`` with ``space`` spatial axes, pure data parallelism first.

    Raises ``ValueError`` for less than one GPU.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: 1 or more would do")
    names = SPACE[space]
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    shapes = [
        MeshShape(gpus // math.prod(parts), tuple(zip(names, parts, strict=True)))
        for parts in itertools.product(divisors, repeat=space)
        if gpus % math.prod(parts) == 0
    ]
    return tuple(sorted(shapes, key=lambda mesh: (-mesh.data, len(mesh.dims), [-count for count in mesh.parts])))
