"""What a training step costs on a mesh of GPUs: a pure model of time and memory, fed with times of local kernels.

A mesh has ``data`` groups of ranks; each group holds its share of the batch, every activation of it split along space.
All ranks hold all weights. The model, for the slowest rank and the fullest:

- A convolution forward computes its interior while halos travel: max(interior, exchange) + boundary, or one after the
  other where that is faster. Backward, ghost zones of the input's gradient are added up beside the filter's gradient
  (Jin et al. 2018, section 2). Pooling and interpolation exchange first.
- An exchange takes one latency for each split axis and its bytes by the bandwidth; corners are counted.
- Gradients of weights are added up over all ranks beside the rest of backward: what is ready when the link is free goes
  together. An all-reduce is a ring, 2(n-1)/n of its bytes, or a tree where that is faster.
- Normalization with statistics over space, sums over space and gathers cost their messages; ``nn.SyncBatchNorm``'s go
  to the ranks of all images.
- Memory is replayed from the step's allocations, each cut to a rank's share with its ghost zones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tilewise.axis import Axis
from tilewise.distributed.ghosts import Ghost, Reader, ghosts, obstacle, received
from tilewise.distributed.step_trace import Allocated, Array, Freed, Gradient, Kernel, StepTrace
from tilewise.problem import SPACE, ConvProblem, Pass

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
    """How fast a GPU talks to others: ``bandwidth`` in bytes/s each way at once, ``latency`` in seconds a message."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth={self.bandwidth!r}: bytes a second above 0 would do")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency!r}: seconds, 0 or more, would do")

    def ms(self, nbytes: float, messages: int = 1) -> float:
        """Milliseconds for ``nbytes`` in so many messages, one after the other."""
        return 1e3 * (messages * self.latency + nbytes / self.bandwidth)


NVLINK = LinkSpeed(450e9, 4e-6)
"""NVLink 4 of an H100 or H200 SXM: 900 GB/s both ways together by NVIDIA's data sheet; NCCL's send and receive of a
small message takes 3.7 us on a GPU of that kind (github.com/NVIDIA/nccl/issues/1984)."""
INFINIBAND = LinkSpeed(50e9, 10e-6)
"""One 400 Gb/s adapter a GPU, as a DGX H200's data sheet has it; the latency is an assumption."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of ``node`` GPUs: ``inside`` a node one link, ``across`` nodes another."""

    inside: LinkSpeed = NVLINK
    node: int = 8
    across: LinkSpeed = INFINIBAND

    def __post_init__(self) -> None:
        if self.node < 1:
            raise ValueError(f"node={self.node}: GPUs a node, 1 or more, would do")

    def link(self, ranks: int) -> LinkSpeed:
        """The slowest link among so many ranks in a row."""
        return self.inside if ranks <= self.node and self.node % ranks == 0 else self.across


@dataclass(frozen=True, slots=True)
class MeshShape:
    """``data`` groups of ranks, and the parts along each spatial axis: ``MeshShape(2, (("h", 2), ("w", 1)))``."""

    data: int
    space: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        """Ranks that share an image."""
        return math.prod(self.parts)

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.data * self.ranks

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts along every spatial axis, in their order."""
        return tuple(n for _, n in self.space)

    @property
    def dims(self) -> tuple[str, ...]:
        """Axes that are split."""
        return tuple(name for name, n in self.space if n > 1)

    def __str__(self) -> str:
        names = [f"data={self.data}"] if self.data > 1 or not self.dims else []
        return " ".join([*names, *(f"{name}={n}" for name, n in self.space if n > 1)])


@dataclass(frozen=True, slots=True)
class Timed:
    """What a kernel takes: ``ms``, ``workspace`` in bytes, and how that is known: measured, scaled or estimated."""

    ms: float
    workspace: int = 0
    source: str = "estimated"


class Clock(Protocol):
    """Times of kernels on one GPU."""

    @property
    def launch_ms(self) -> float: ...
    def problem(self, problem: ConvProblem, whole: ConvProblem) -> Timed:
        """A rank's part of ``whole``."""
        ...

    def other_ms(self, nbytes: float, flops: float, dtype: str) -> float:
        """Any other kernel, by what it moves and computes."""
        ...


@dataclass(frozen=True, slots=True)
class MeshMemory:
    """Bytes on the fullest GPU. ``activations`` are all tensors of the step at its peak, ghost zones included."""

    parameters: int
    gradients: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step on one mesh. ``exchange_ms``, ``reduce_ms`` and ``sum_ms`` are what shows of halos, of the weights'
    gradients and of sums and gathers; the first two are what neither arithmetic nor backward hides.

    ``halo_bytes`` a GPU receives in a step, in ``messages`` exchanges. ``sources`` counts convolutions' kernels by how
    their time is known.
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
        """Forward and backward, with all that shows of communication."""
        return self.forward_ms + self.backward_ms

    @property
    def image_ms(self) -> float:
        """The step's time by the images of all ranks."""
        return self.step_ms / self.batch


def all_reduce_ms(nbytes: float, ranks: int, link: LinkSpeed) -> float:
    """Milliseconds to add ``nbytes`` up on every one of ``ranks``."""
    if ranks == 1 or not nbytes:
        return 0.0
    ring = link.ms(2 * (ranks - 1) / ranks * nbytes, 2 * (ranks - 1))
    steps = 2 * math.ceil(math.log2(ranks))
    return min(ring, link.ms(steps * nbytes, steps))


def impossible(trace: StepTrace, mesh: MeshShape) -> str:
    """Why the step cannot run on ``mesh``: the first layer whose shards are too small; empty where it can."""
    for kernel in trace.events:
        if isinstance(kernel, Kernel) and not kernel.backward:
            for (name, _), reader, parts in zip(mesh.space, kernel.readers, _parts(kernel, mesh), strict=False):
                reason = obstacle(reader, parts, name) if parts > 1 else ""
                if reason:
                    return f"{kernel.layer or kernel.operator}: {reason}"
    return ""


def _parts(kernel: Kernel, mesh: MeshShape) -> tuple[int, ...]:
    """Parts along each of a window's axes: what has one position there is on every rank."""
    return tuple(
        n if max(reader.size, reader.out) > 1 else 1 for reader, n in zip(kernel.readers, mesh.parts, strict=False)
    )


def _share(array: Array, mesh: MeshShape, buffers: Sequence[Sequence[Ghost]] = ()) -> float:
    """The part of a tensor that the fullest rank holds, with ghost zones along the axes of ``buffers``."""
    share = 1.0
    for k, size in enumerate(array.sizes):
        if size > 1 and mesh.parts[k] > 1:
            length = -(-size // mesh.parts[k])
            share *= max([length, *(g.buffer for g in buffers[k])] if buffers else [length]) / size
    return share


def _nbytes(memory: Allocated, mesh: MeshShape) -> int:
    """A rank's bytes of it; what several windows read has the widest ghost zones of all."""
    shares = [
        _share(memory.array, mesh, [ghosts(r, n) for r, n in zip(readers, mesh.parts, strict=True)])
        for readers in memory.readers
        if all(r.size == n for r, n in zip(readers, memory.array.sizes, strict=False))
    ]
    return math.ceil(memory.nbytes * max([_share(memory.array, mesh), *shares]))


def step_cost(trace: StepTrace, mesh: MeshShape, cluster: Cluster, clock: Clock, batch: int) -> StepCost:
    """What the step takes on ``mesh``, where ``trace`` is of one group's share of ``batch`` images.

    Raises ``ValueError`` where the mesh is not one of the trace's space.
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
    """The step as it goes on: two clocks, of kernels and of the link that adds up gradients, and memory alive."""

    mesh: MeshShape
    cluster: Cluster
    clock: Clock
    now: float = 0.0
    forward: float | None = None
    busy: float = 0.0
    """When the link is done with the gradients that it was given."""
    pending: int = 0
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

    def take(self, event: Kernel | Allocated | Freed | Gradient) -> None:
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
        """Forward's time and backward's."""
        self._send()
        self.reduce_ms = max(self.busy - self.now, 0.0)
        end = max(self.busy, self.now)
        forward = end if self.forward is None else self.forward
        return forward, end - forward

    def _send(self) -> None:
        cost = all_reduce_ms(self.pending, self.mesh.gpus, self.cluster.link(self.mesh.gpus))
        if cost:
            self.busy = max(self.busy, self.now) + cost
        self.pending = 0

    def _reached(self, workspace: int) -> None:
        if self.alive + workspace > self.peak:
            self.peak, self.peak_workspace = self.alive + workspace, workspace

    def _compute(self, kernel: Kernel) -> None:
        if kernel.problems:
            self._convolution(kernel)
        elif kernel.arrays:
            moved = sum(a.nbytes * _share(a, self.mesh) for a in kernel.arrays)
            part = moved / max(sum(a.nbytes for a in kernel.arrays), 1)
            local = self.clock.other_ms(moved, kernel.flops * part, kernel.dtype)
            exchange = self._exchange(kernel)
            self.exchange_ms += exchange
            self.now += local + exchange
        link, ranks = self.cluster.link(self.mesh.ranks), self.mesh.ranks
        if kernel.sums:
            over = self.mesh.gpus if kernel.over_all else ranks
            self._tell(all_reduce_ms(kernel.sums, over, self.cluster.link(over)))
        if kernel.gathered is not None and ranks > 1:
            rest = kernel.gathered.nbytes * (1 - _share(kernel.gathered, self.mesh))
            self._tell(link.ms(rest, math.ceil(math.log2(ranks))))

    def _tell(self, ms: float) -> None:
        self.sum_ms += ms
        self.now += ms

    def _exchange(self, kernel: Kernel) -> float:
        """Milliseconds to exchange what the kernel's window reads of other ranks, or to add it up there."""
        if kernel.halo is None:
            return 0.0
        axes = [ghosts(r, n) for r, n in zip(kernel.readers, _parts(kernel, self.mesh), strict=True)]
        across = math.prod(kernel.halo.shape[: len(kernel.halo.shape) - kernel.halo.space]) * kernel.halo.itemsize
        moved = received(axes) * across
        if not moved:
            return 0.0
        steps = sum(any(g.read > g.kept for g in axis) for axis in axes)
        self.halo_bytes += moved
        self.messages += steps
        return self.cluster.link(self.mesh.ranks).ms(moved, steps)

    def _convolution(self, kernel: Kernel) -> None:
        parts = _parts(kernel, self.mesh) if kernel.readers else ()
        times = {p.pass_: self._timed(p, kernel.readers, parts) for p in kernel.problems}
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
        local = local_problem(problem, readers, parts)
        if local is None:
            return Timed(0.0)
        timed = self.clock.problem(local, problem)
        self.sources[timed.source] = self.sources.get(timed.source, 0) + 1
        self._reached(timed.workspace)
        return timed


def local_problem(problem: ConvProblem, readers: Sequence[Reader], parts: Sequence[int]) -> ConvProblem | None:
    """The largest of the problems that ranks have of ``problem``; ``None`` where none computes anything."""
    axes: list[Axis] = []
    for reader, n, whole in zip(readers, parts, problem.axes, strict=False):
        found = [g.axis for g in ghosts(reader, n) if g.axis is not None] if n > 1 else [whole]
        if not found:
            return None
        axes.append(max(found, key=lambda a: (a.out, a.size)))
    return replace(problem, axes=tuple(axes)) if axes else problem


def _interior(readers: Sequence[Reader], parts: Sequence[int]) -> tuple[float, int]:
    """The least share of outputs that need no halo on any rank, and into how many pieces the others fall."""
    share, pieces = 1.0, 0
    for reader, n in zip(readers, parts, strict=True):
        found = [g for g in ghosts(reader, n) if g.outs]
        least = min((g.interior / g.outs for g in found), default=1.0)
        share *= least
        pieces += 2 if least < 1 else 0
    return share, pieces


def meshes(gpus: int, space: int) -> tuple[MeshShape, ...]:
    """Every way to write ``gpus`` as data groups by parts along each of ``space`` axes; pure data parallelism first.

    Raises ``ValueError`` for less than one GPU.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: 1 or more would do")
    names = SPACE[space]
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    found = [
        MeshShape(gpus // math.prod(parts), tuple(zip(names, parts, strict=True)))
        for parts in itertools.product(divisors, repeat=space)
        if gpus % math.prod(parts) == 0
    ]
    return tuple(sorted(found, key=lambda m: (-m.data, len(m.dims), [-n for n in m.parts])))
