"""What one replica does of a step, and under which modes of torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewise.nn.shared.batch import Results
from tilewise.nn.shared.clock import Clock
from tilewise.nn.shared.replica import Replica, Stage

__all__ = ["Modes", "Part", "mark"]

Heads = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Modes:
    """What of the caller's thread other threads do not know.

    That is whether there are ``gradients``, autocast by kind of device, whether the caller has set a default device,
    the current streams, and the number of threads.
    """

    gradients: bool
    autocast: dict[str, torch.dtype | None]
    cache: bool
    default_device: bool
    streams: tuple[Any, ...]
    threads: int

    @classmethod
    def now(cls, devices: Sequence[torch.device], *, gradients: bool) -> Modes:
        """Those of this thread for work on ``devices``."""
        kinds = {device.type for device in devices}
        autocast = {kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds}
        streams = tuple(torch.cuda.current_stream(device) for device in devices if device.type == "cuda")
        default_device = torch._C._is_torch_function_mode_enabled()
        cache, threads = torch.is_autocast_cache_enabled(), torch.get_num_threads()
        return cls(gradients, autocast, cache, default_device, streams, threads)

    def entered(self, device: torch.device, *, backward: bool = False) -> ExitStack:
        """A context in which a thread works on ``device`` under these modes; a ``backward`` without autocast."""
        stack = ExitStack()
        for stream in self.streams:
            stack.enter_context(torch.cuda.stream(stream))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if self.default_device:
            stack.enter_context(device)
        stack.enter_context(torch.set_grad_enabled(self.gradients and not backward))
        for kind, dtype in self.autocast.items():
            enabled = dtype is not None and not backward
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
        return stack


@dataclass
class Part:
    """What one replica does of a step: samples ``start`` to ``stop``, and its rows of divided layers.

    ``given`` and ``made`` are the tensors that each stage reads and returns, ``heads`` those of ``made`` that have a
    gradient, each with that, and ``back`` the gradient of what a later stage than the first was given. ``gradients``
    are those of the batch's tensors, and then of the replica's leaves.
    """

    replica: Replica
    start: int
    stop: int
    stages: Sequence[Stage]
    clock: Clock
    inputs: list[torch.Tensor] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    results: Results | None = None
    given: list[list[torch.Tensor]] = field(default_factory=list)
    made: list[list[torch.Tensor]] = field(default_factory=list)
    heads: list[Heads] = field(default_factory=list)
    back: list[torch.Tensor | None] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given, self.made, self.heads = ([], [], [])
        for _ in self.stages:
            self.given.append([])
            self.made.append([])

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"{self.replica.name}, samples {self.start} to {self.stop}"

    def has(self, stage: int) -> bool:
        """Whether it computes something in a stage: its samples, or its rows of a layer's outputs."""
        layer = self.stages[stage].layer
        return self.replica.rows[layer][0] < self.replica.rows[layer][1] if layer else self.size > 0

    def wait(self) -> None:
        """Wait for what a part on a CPU reads."""
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.replica.device.type == "cpu":
            self.replica.wait()

    def clear(self) -> None:
        """Forget all gradients, before a backward."""
        self.heads = [[] for _ in self.stages]
        self.back = [None] * len(self.stages)
        self.gradients = [None] * (len(self.inputs) + len(self.replica.leaves))

    def release(self) -> None:
        """Let go of all tensors, when nothing more is to come."""
        self.inputs, self.gradients = [], []
        if self.results is not None:
            self.results = replace(self.results, tensors=())
        self.given, self.made, self.heads, self.back = [], [], [], []

    def leaves(self, stage: int) -> list[torch.Tensor]:
        """Of what a stage's gradients are taken: what it was given, and its parameters."""
        return [*self.given[stage], *(self.replica.leaves[leaf] for leaf in self.stages[stage].leaves)]

    def take(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of the :meth:`leaves` of a stage. Those of a parameter of two stages add up."""
        given, count = len(self.given[stage]), len(self.inputs)
        if stage:
            self.back[stage] = gradients[0]
        else:
            self.gradients[:count] = gradients[:given]
        for leaf, gradient in zip(self.stages[stage].leaves, gradients[given:], strict=True):
            before = self.gradients[count + leaf]
            if before is None:
                self.gradients[count + leaf] = gradient
            elif gradient is not None:
                self.gradients[count + leaf] = before + gradient


def mark(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.cuda.Event | None:
    """An event after what is queued on the GPU of ``tensors``, where ``device`` is a CPU that has to wait for it."""
    gpus = [tensor.device for tensor in tensors if tensor.device.type == "cuda"]
    if device.type == "cuda" or not gpus:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpus[0]))
    return event
