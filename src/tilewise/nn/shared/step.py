"""One call of a shared model: every part's forward, and later its backward, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.machine.threads import at_once
from tilewise.nn.shared.batch import Batch, Results, joined, ranges
from tilewise.nn.shared.clock import Clock
from tilewise.nn.shared.replica import Replica, ReplicaError
from tilewise.nn.shared.sums import Gradients, averaged_into, summed

__all__ = ["Joined", "Modes", "Step"]


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
    """What one replica does of a step: samples ``start`` to ``stop``."""

    replica: Replica
    start: int
    stop: int
    clock: Clock
    inputs: list[torch.Tensor] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    replayed: bool = False
    results: Results | None = None

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"{self.replica.name}, samples {self.start} to {self.stop}"


class Step:
    """One call with the arguments ``batch``, of which each of ``replicas`` takes as many samples as ``sizes`` say.

    ``side`` is a stream on the GPU of the model, on which what other devices need is sent while the GPU computes.
    ``ended(step)`` is called when nothing more is to come of a step: after a forward without gradients, or after its
    backward.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        sizes: Sequence[int],
        batch: Batch,
        modes: Modes,
        side: torch.cuda.Stream | None,
        ended: Callable[[Step], None],
    ) -> None:
        self.batch, self.modes, self._side, self._ended = batch, modes, side, ended
        self.sizes = tuple(sizes)
        self.parts = [
            Part(replica, start, stop, Clock(replica.device))
            for replica, (start, stop) in zip(replicas, ranges(sizes), strict=True)
            if stop > start
        ]
        self.requires: tuple[bool, ...] = ()
        """Which of the tensors that the model returns have a gradient."""

    def forward(self, buffers: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        """What the model returns for the batch, on the device of its first tensor, without autograd.

        With ``keep`` the model's ``buffers`` become the mean of those of the parts. Raises :class:`ReplicaError` where
        a part raised something, and ``ValueError`` for results that cannot be joined.
        """
        self._start()
        try:
            self._send()
            self._compute()
        finally:
            if self._side is not None:  # what comes next may write to what is being sent
                torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        first = self._first()
        for part in self.parts[1:]:
            assert part.results is not None
            first.agree(part.results)
        if keep and buffers:
            averaged_into(buffers, [part.replica for part in self.parts], [part.size for part in self.parts])
        outputs = self._joined()
        if not any(self.requires):
            self._ended(self)
        return outputs

    def _start(self) -> None:
        """Start the clock of each GPU, when those before have done what it will need. It runs while data travels."""
        home, seen = self.parts[0].replica.home, set[torch.device]()
        for part in self.parts:
            device = part.replica.device
            if device.type == "cuda" and device not in seen:
                if home.type == "cuda" and home != device:
                    torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(home))
                part.clock.start()
                seen.add(device)

    def _send(self) -> None:
        """Send every part its parameters and samples."""
        with ExitStack() as stack:
            if self._side is not None:
                self._side.wait_stream(torch.cuda.current_stream(self._side.device))
                stack.enter_context(torch.cuda.stream(self._side))
            for part in self.parts:
                part.replica.refresh()
                self._bring(part)

    def _compute(self) -> None:
        """Run the forward of every part."""
        for part in self.parts:
            if part.replica.captures is not None:
                with self.modes.entered(part.replica.device):
                    part.replayed = part.replica.captures.prepare(*self.batch.arguments(part.inputs))
        for part in self.parts:
            if part.replayed:
                self._run(part)  # queued, and the device works while others begin
        rest = [part for part in self.parts if not part.replayed]
        if rest:
            at_once(lambda index: self._run(rest[index]), len(rest), max(1, self.modes.threads))

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns, with these tensors."""
        return self._first().value(tensors)

    def backward(self, gradients: Sequence[torch.Tensor | None], *, keep: bool) -> tuple[Gradients, Gradients]:
        """The gradients of the batch's tensors, and of the model's parameters that need one.

        ``gradients`` are those of the tensors that the model returned. With ``keep`` the backward can be repeated.
        """
        self._start()
        heads = [self._heads(part, gradients) for part in self.parts]
        found: list[Gradients] = [[] for _ in self.parts]
        gpus = [i for i, part in enumerate(self.parts) if part.replica.device.type == "cuda"]
        hosts = [i for i in range(len(self.parts)) if i not in gpus]
        # One graph for all GPUs: autograd has a thread for each, and this one may be one of them, for which a thread of
        # ours would wait for ever.
        self._differentiate([self.parts[i] for i in gpus], [heads[i] for i in gpus], found, gpus, keep)

        def host(index: int) -> None:
            i = hosts[index]
            with self.modes.entered(self.parts[i].replica.device, backward=True):
                self._differentiate([self.parts[i]], [heads[i]], found, [i], keep)

        if hosts:
            at_once(host, len(hosts), max(1, self.modes.threads))
        return self._gathered(found, gradients)

    def _gathered(self, found: list[Gradients], given: Sequence[torch.Tensor | None]) -> tuple[Gradients, Gradients]:
        """The gradients of tensors and parameters from those of the parts."""
        count = len(self.batch.tensors)
        home = self.parts[0].replica.home
        foreign = {g.untyped_storage().data_ptr() for g in given if g is not None}
        replicas, there = [part.replica for part in self.parts], list[Gradients]()
        for part, each in zip(self.parts, found, strict=True):
            there.append(part.replica.send_gradients(each[count:]))
            part.clock.stop()
        for replica in replicas:
            replica.wait_for_gradients()
        weights = summed(replicas, there, home, foreign)
        sizes = [part.size for part in self.parts]
        inputs = [
            joined([each[i] for each in found], sizes, tensor.device) if tensor.requires_grad else None
            for i, tensor in enumerate(self.batch.tensors)
        ]
        self._ended(self)
        return inputs, weights

    def _bring(self, part: Part) -> None:
        """Copy a part's samples to its device; on a CPU they are there once ``arrived`` has happened."""
        device = part.replica.device
        for tensor in self.batch.tensors:
            with torch.no_grad():
                own = tensor.detach()[part.start : part.stop].to(device, non_blocking=True)
            part.inputs.append(own.requires_grad_(tensor.requires_grad and self.modes.gradients))
        part.arrived = _mark(self.batch.tensors, device)

    def _run(self, part: Part) -> None:
        """A part's forward."""
        try:
            with self.modes.entered(part.replica.device):
                _wait(part)
                args, kwargs = self.batch.arguments(part.inputs)
                if not part.clock.runs:
                    part.clock.start()
                value = part.replica.call(args, kwargs)
                part.clock.stop()
        except Exception as error:
            raise ReplicaError(f"{part.name}: {type(error).__name__}: {error}") from error
        part.results = Results.of(value, part.size)

    def _first(self) -> Results:
        results = self.parts[0].results
        assert results is not None
        return results

    def _joined(self) -> list[torch.Tensor]:
        """The tensors that the model returned, joined."""
        columns = list(zip(*[part.results.tensors for part in self.parts if part.results is not None], strict=True))
        self.requires = tuple(any(t.requires_grad for t in column) for column in columns)
        sizes, device = [part.size for part in self.parts], self.batch.tensors[0].device
        outputs = []
        for column in columns:
            output = joined([t.detach() for t in column], sizes, device)
            assert output is not None
            outputs.append(output)
        return outputs

    def _heads(self, part: Part, gradients: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A part's results that have a gradient, each with that."""
        assert part.results is not None
        device = part.replica.device
        heads = [
            (tensor, gradient.detach()[part.start : part.stop].to(device, non_blocking=True))
            for tensor, gradient in zip(part.results.tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        part.arrived = _mark([gradient for gradient in gradients if gradient is not None], device)
        return heads

    def _differentiate(
        self,
        parts: Sequence[Part],
        heads: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        found: list[Gradients],
        places: Sequence[int],
        keep: bool,
    ) -> None:
        """Put the gradients of the parts' inputs and weights into their places of ``found``."""
        leaves = [[*part.inputs, *part.replica.leaves] for part in parts]
        wanted = [leaf for each in leaves for leaf in each if leaf.requires_grad]
        pairs = [pair for each in heads for pair in each]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            try:
                for part in parts:
                    _wait(part)
                    if not part.clock.runs:
                        part.clock.start()
                gradients = torch.autograd.grad(
                    [head for head, _ in pairs], wanted, [g for _, g in pairs], retain_graph=keep, allow_unused=True
                )
                for part in parts:
                    if part.replica.device.type == "cpu":
                        part.clock.stop()
            except Exception as error:
                names = "; ".join(part.name for part in parts)
                raise ReplicaError(f"backward of {names}: {type(error).__name__}: {error}") from error
        rest = iter(gradients)
        for place, each in zip(places, leaves, strict=True):
            found[place] = [next(rest) if leaf.requires_grad else None for leaf in each]


class Joined(torch.autograd.Function):
    """A step as one node of autograd. Its inputs are the batch's tensors and the model's parameters."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, buffers: Sequence[torch.Tensor], keep: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = step.forward(buffers, keep=keep)
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, requires in zip(outputs, step.requires, strict=True) if not requires])
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        inputs, weights = ctx.step.backward(gradients, keep=keep)
        return None, None, None, *inputs, *weights


def _mark(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.cuda.Event | None:
    """An event after what is queued on the GPU of ``tensors``, where ``device`` is a CPU that has to wait for it."""
    gpus = [tensor.device for tensor in tensors if tensor.device.type == "cuda"]
    if device.type == "cuda" or not gpus:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpus[0]))
    return event


def _wait(part: Part) -> None:
    """Wait for what a part on a CPU reads."""
    if part.arrived is not None:
        part.arrived.synchronize()
    if part.replica.device.type == "cpu":
        part.replica.wait()
