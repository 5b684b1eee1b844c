"""One call of a shared model: every part's forward, and later its backward, at once.

The model runs in stages, often a single one. Where a linear layer is divided by its outputs, the stage before it ends
on all devices, what they made is exchanged, and so it is after the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tilewise.machine.threads import at_once
from tilewise.nn.shared import exchange
from tilewise.nn.shared.backward import Backward
from tilewise.nn.shared.batch import Batch, Results, joined, ranges
from tilewise.nn.shared.clock import Clock
from tilewise.nn.shared.part import Modes, Part, mark
from tilewise.nn.shared.replica import Replica, ReplicaError, Stages
from tilewise.nn.shared.sums import Gradients, Sums, averaged_into, in_order

__all__ = ["Joined", "Step"]


class Step:
    """One call with the arguments ``batch``, of which each of ``replicas`` takes as many samples as ``sizes`` say.

    ``how`` says in which stages. ``side`` has a stream on GPUs, on which what other devices need is sent while they
    compute; ``early`` says that gradients are, too. ``ended(step)`` is called when nothing more is to come of a step:
    after a forward without gradients, or after its backward.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        sizes: Sequence[int],
        batch: Batch,
        modes: Modes,
        how: Stages | None,
        side: Mapping[torch.device, torch.cuda.Stream],
        early: bool,
        ended: Callable[[Step], None],
    ) -> None:
        self.batch, self.modes, self._ended = batch, modes, ended
        self.home = replicas[0].home
        self.sizes = tuple(sizes)
        self.parts: list[Part] = []
        """Those with samples, and those with rows of a divided layer."""
        for replica, (start, stop) in zip(replicas, ranges(sizes), strict=True):
            if stop > start or (how is not None and any(first < last for first, last in replica.rows.values())):
                self.parts.append(Part(replica, start, stop, replica.stages(how), Clock(replica.device)))
        self._own = [part for part in self.parts if part.size]
        queued = sorted(self.parts, key=lambda part: in_order(part.replica, self.home))
        self._gpus = [part for part in queued if part.replica.queues]
        self._hosts = [part for part in queued if not part.replica.queues]
        self._blocks = _blocks([stage.layer for stage in self.parts[0].stages])
        elsewhere = any(part.replica.device != self.home for part in self.parts)
        self._sender = side.get(self.home) if elsewhere else None
        self._side = side if early and elsewhere else None
        self.clock = Clock(self.home)
        """Times the whole step, on the model's device."""
        self._over = False
        self.requires: tuple[bool, ...] = ()
        """Which of the tensors that the model returns have a gradient."""

    @property
    def clocks(self) -> list[Clock]:
        """Those of the parts, and that of the step."""
        return [*(part.clock for part in self.parts), self.clock]

    def forward(self, buffers: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        """What the model returns for the batch, on the device of its first tensor, without autograd.

        With ``keep`` the model's ``buffers`` become the mean of those of the parts. Raises :class:`ReplicaError` where
        a part raised something, and ``ValueError`` for results that cannot be joined.
        """
        self._start()
        try:
            self._send()
            for block in self._blocks:
                self._compute(block)
        finally:
            if self._sender is not None:  # what comes next may write to what is being sent
                torch.cuda.current_stream(self._sender.device).wait_stream(self._sender)
        first = self._first()
        for part in self._own[1:]:
            assert part.results is not None
            first.agree(part.results)
        if keep and buffers:
            averaged_into(buffers, [part.replica for part in self._own], [part.size for part in self._own])
        outputs = self._joined()
        self.clock.stop()
        if not any(self.requires):
            self._end()
            self._ended(self)
        return outputs

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns, with these tensors."""
        return self._first().value(tensors)

    def backward(
        self, gradients: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor], *, keep: bool
    ) -> tuple[Gradients, Gradients]:
        """The gradients of the batch's tensors, and of the model's parameters ``weights``, which need one.

        ``gradients`` are those of the tensors that the model returned. With ``keep`` the backward can be repeated.
        """
        if self._over:
            raise RuntimeError(
                "a shared model is asked for the backward of one forward a second time: "
                "backward(retain_graph=True) would do the first time"
            )
        self._start()
        for part in self.parts:
            part.clear()
            if part.size:
                self._give_heads(part, gradients)
        foreign = {g.untyped_storage().data_ptr() for g in gradients if g is not None}
        sums = Sums(weights, self.home, foreign, self._side)
        backward = Backward(self._gpus, self._hosts, self.modes, sums, keep=keep)
        for block in reversed(self._blocks):
            backward.run(block)
        found = self._gathered(sums)
        self.clock.stop()
        if not keep:
            self._end()
        self._ended(self)
        return found

    def _end(self) -> None:
        """Let go of tensors."""
        self._over = True
        for part in self.parts:
            part.release()

    def _start(self) -> None:
        """Start the clock of each GPU, when those before have done what it will need. It runs while data travels."""
        seen = set[torch.device]()
        self.clock.start()
        for part in self.parts:
            device = part.replica.device
            if device.type == "cuda" and device not in seen:
                if self.home.type == "cuda" and self.home != device:
                    torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(self.home))
                part.clock.start()
                seen.add(device)

    def _send(self) -> None:
        """Send every part its parameters and samples."""
        with ExitStack() as stack:
            if self._sender is not None:
                self._sender.wait_stream(torch.cuda.current_stream(self._sender.device))
                stack.enter_context(torch.cuda.stream(self._sender))
            for part in self.parts:
                part.replica.refresh()
                self._bring(part)

    def _bring(self, part: Part) -> None:
        """Copy a part's samples to its device; on a CPU they are there once ``arrived`` has happened."""
        device = part.replica.device
        for tensor in self.batch.tensors:
            with torch.no_grad():
                own = tensor.detach()[part.start : part.stop].to(device, non_blocking=True)
            part.inputs.append(own.requires_grad_(tensor.requires_grad and self.modes.gradients))
        part.given[0] = part.inputs
        part.arrived = mark(self.batch.tensors, device)

    def _compute(self, block: range) -> None:
        """Run stages of every part's forward, with no exchange between them. A divided layer is a block of its own."""
        layer = bool(self.parts[0].stages[block[0]].layer)
        if layer:
            exchange.gather(self.parts, block[0], gradients=self.modes.gradients)
        hosts = [part for part in self._hosts if part.has(block[0])]
        for stage in block:
            gpus, rest = [part for part in self._gpus if part.has(stage)], list[tuple[Part, range]]()
            for part in gpus:
                with self.modes.entered(part.replica.device):
                    args, kwargs = self._arguments(part, stage)
                    if not part.stages[stage].prepare(args, kwargs):
                        rest.append((part, range(stage, stage + 1)))
            for part in gpus:
                if all(part is not other for other, _ in rest):
                    self._run(part, range(stage, stage + 1))  # queued, and the device works while others begin
            rest += [(part, block) for part in hosts if stage == block[-1]]
            if rest:
                at_once(lambda index, rest=rest: self._run(*rest[index]), len(rest), max(1, self.modes.threads))  # type: ignore[misc]
        if layer:
            exchange.scatter(self.parts, block[0], gradients=self.modes.gradients)

    def _arguments(self, part: Part, stage: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of one stage of a part."""
        return (tuple(part.given[stage]), {}) if stage else self.batch.arguments(part.inputs)

    def _run(self, part: Part, stages: range) -> None:
        """Stages of a part's forward."""
        try:
            with self.modes.entered(part.replica.device):
                part.wait()
                if not part.clock.runs:
                    part.clock.start()
                for stage in stages:
                    args, kwargs = self._arguments(part, stage)
                    value = part.stages[stage].call(args, kwargs)
                    last = stage == len(part.stages) - 1
                    if not last:
                        part.made[stage] = [value]
                        if not part.stages[stage].layer and not part.stages[stage + 1].layer:
                            part.given[stage + 1] = [value.detach().requires_grad_(value.requires_grad)]
                part.clock.stop()
        except Exception as error:
            raise ReplicaError(f"{part.name}: {type(error).__name__}: {error}") from error
        if last:
            part.results = Results.of(value, part.size)
            part.made[-1] = list(part.results.tensors)

    def _first(self) -> Results:
        results = self._own[0].results
        assert results is not None
        return results

    def _joined(self) -> list[torch.Tensor]:
        """The tensors that the model returned, joined."""
        columns = list(zip(*[part.results.tensors for part in self._own if part.results is not None], strict=True))
        self.requires = tuple(any(t.requires_grad for t in column) for column in columns)
        sizes, device = [part.size for part in self._own], self.batch.tensors[0].device
        outputs = []
        for column in columns:
            output = joined([t.detach() for t in column], sizes, device)
            assert output is not None
            outputs.append(output)
        return outputs

    def _give_heads(self, part: Part, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note a part's results that have a gradient, each with that."""
        device = part.replica.device
        part.heads[-1] = [
            (tensor, gradient.detach()[part.start : part.stop].to(device, non_blocking=True))
            for tensor, gradient in zip(part.made[-1], gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        part.arrived = mark([gradient for gradient in gradients if gradient is not None], device)

    def _gathered(self, sums: Sums) -> tuple[Gradients, Gradients]:
        """The gradients of tensors and parameters from those of the parts."""
        for part in self.parts:
            if part.replica.device == self.home:
                part.clock.stop()
        weights = sums.finish()
        for part in self.parts:
            part.clock.stop()
        sizes = [part.size for part in self._own]
        inputs = [
            joined([part.gradients[i] for part in self._own], sizes, tensor.device) if tensor.requires_grad else None
            for i, tensor in enumerate(self.batch.tensors)
        ]
        return inputs, weights


class Joined(torch.autograd.Function):
    """A step as one node of autograd. Its inputs are the batch's tensors and the model's parameters."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, buffers: Sequence[torch.Tensor], keep: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = step.forward(buffers, keep=keep)
        ctx.step = step
        ctx.weights = tensors[len(step.batch.tensors) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, requires in zip(outputs, step.requires, strict=True) if not requires])
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        inputs, weights = ctx.step.backward(gradients, ctx.weights, keep=keep)
        return None, None, None, *inputs, *weights


def _blocks(layers: Sequence[str]) -> list[range]:
    """The stages between exchanges; a divided layer, which has a name, is a block of its own."""
    blocks, first = list[range](), 0
    for index, layer in enumerate(layers):
        if layer:
            blocks += [range(first, index)] * (index > first) + [range(index, index + 1)]
            first = index + 1
    return [*blocks, range(first, len(layers))] if first < len(layers) else blocks
