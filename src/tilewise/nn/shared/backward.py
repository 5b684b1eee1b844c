"""The backward of a step: stage by stage, all parts at once, while gradients of the stages before travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.machine.threads import at_once
from tilewise.nn.shared import exchange
from tilewise.nn.shared.part import Modes, Part
from tilewise.nn.shared.replica import ReplicaError
from tilewise.nn.shared.sums import Sums

__all__ = ["Backward"]


class Backward:
    """The backward of parts whose work is queued (``gpus``) and of those that threads run (``hosts``).

    Each gives ``sums`` the gradients of its parameters. With ``keep`` it can be repeated.
    """

    def __init__(self, gpus: Sequence[Part], hosts: Sequence[Part], modes: Modes, sums: Sums, *, keep: bool) -> None:
        self._gpus, self._hosts, self._modes, self._sums, self._keep = gpus, hosts, modes, sums, keep
        self._parts = sorted([*gpus, *hosts], key=lambda part: part.replica.number)
        self._divided = any(stage.layer for stage in self._parts[0].stages)

    def run(self, block: range) -> None:
        """Run the backward of stages with no exchange between them, and give ``sums`` what they lead to."""
        layer = bool(self._parts[0].stages[block[0]].layer)
        if layer:
            exchange.gather_gradients(self._parts, block[0])
        gpus, hosts = ([part for part in parts if part.has(block[0])] for parts in (self._gpus, self._hosts))
        for stage in reversed(block):
            # One graph for all GPUs: autograd has a thread for each, and this one may be one of them, for which a
            # thread of ours would wait for ever.
            self._gradients(gpus, stage)
            for part in gpus:
                self._sum(part, stage)
        if self._divided:
            for part in gpus:  # what follows includes waiting for other devices
                part.clock.stop()

        def host(index: int) -> None:
            with self._modes.entered(hosts[index].replica.device, backward=True):
                for stage in reversed(block):
                    self._gradients([hosts[index]], stage)

        if hosts:
            at_once(host, len(hosts), max(1, self._modes.threads))
            for part in hosts:
                for stage in reversed(block):
                    self._sum(part, stage)
        if layer:
            exchange.scatter_gradients(self._parts, block[0])

    def _gradients(self, parts: Sequence[Part], stage: int) -> None:
        """Take the gradients of one stage of some parts."""
        for part in parts:
            following = None if stage == len(part.stages) - 1 or part.stages[stage].layer else part.back[stage + 1]
            if following is not None and not part.stages[stage + 1].layer:
                part.heads[stage] = [(part.made[stage][0], following)]
        leaves = [part.leaves(stage) for part in parts]
        wanted = [leaf for each in leaves for leaf in each if leaf.requires_grad]
        pairs = [pair for part in parts for pair in part.heads[stage] if pair[0].requires_grad]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            try:
                for part in parts:
                    part.wait()
                    if not part.clock.runs:
                        part.clock.start()
                gradients = torch.autograd.grad(
                    [head for head, _ in pairs],
                    wanted,
                    [g for _, g in pairs],
                    retain_graph=self._keep,
                    allow_unused=True,
                )
                for part in parts:
                    if part.replica.device.type == "cpu":
                        part.clock.stop()
            except Exception as error:
                names = "; ".join(part.name for part in parts)
                raise ReplicaError(f"backward of {names}: {type(error).__name__}: {error}") from error
        rest = iter(gradients)
        for part, each in zip(parts, leaves, strict=True):
            part.take(stage, [next(rest) if leaf.requires_grad else None for leaf in each])

    def _sum(self, part: Part, stage: int) -> None:
        """Hand over the gradients that a part has after the backward of a stage."""
        leaves, count = part.stages[stage].last, len(part.inputs)
        self._sums.ready(part.replica, leaves, [part.gradients[count + leaf] for leaf in leaves])
