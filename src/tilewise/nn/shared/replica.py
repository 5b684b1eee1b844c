"""A copy of a model on one device, which shares the model's parameters there and has copies of them elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilewise.nn.shared.captures import Captures, NewRecorder
from tilewise.nn.shared.chain import Chain, Span, pieces_of
from tilewise.nn.shared.mirror import Mirror

__all__ = ["Replica", "ReplicaError", "Stage", "Stages"]

MOST_STAGES = 8
"""Ways to cut the model whose pieces are kept. Each has CUDA graphs of its own."""
MOST_MIRRORS = 64
"""Groups of gradients for which memory is kept."""


class ReplicaError(RuntimeError):
    """What a model raised for one part of a batch. The message names the device and the samples.

    >>> model = tilewise.shared(torch.nn.Linear(4, 2), parts=2)
    >>> try:
    ...     model(torch.randn(6, 5))
    ... except tilewise.nn.ReplicaError as error:
    ...     print("a part of the batch failed")
    a part of the batch failed
    """


@dataclass(frozen=True, eq=False)
class Stages:
    """How a forward is cut: the spans of a chain, each a stage. ``None`` for one stage, the whole model."""

    chain: Chain
    spans: tuple[Span, ...]


@dataclass
class Stage:
    """One piece of a replica. ``leaves`` are the numbers of its parameters that need a gradient, the largest first.

    ``last`` are those of them that no earlier stage has: after the backward of this one their gradients are whole.
    ``layer`` is the path of the linear layer that it consists of, where its outputs are divided.
    """

    module: nn.Module
    captures: Captures | None
    layer: str = ""
    leaves: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture such a call where it is time to; say whether it will be replayed."""
        return self.captures is not None and self.captures.prepare(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the piece returns, by a replay where there is one."""
        if self.captures is not None:
            return self.captures.call(args, kwargs)
        return self.module(*args, **kwargs)


class Replica:
    """A copy of ``model``, which is on ``home``, on ``device``: number ``number`` of those that share a batch.

    ``rows`` are the rows of divided linear layers, by their paths, of which this copy has the weights.

    Where the model is on that device itself, the copy's parameters are the model's memory. Elsewhere they are copies,
    which :meth:`refresh` renews. Buffers are always the copy's own. The copy has no hooks on its parameters and no part
    in autograd's graphs of the model: its gradients are taken by :attr:`leaves`.
    """

    def __init__(
        self,
        model: nn.Module,
        home: torch.device,
        device: torch.device,
        number: int,
        recorder: NewRecorder | None,
        rows: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.device, self.number, self.home, self.rows = device, number, home, dict(rows or {})
        self.originals = list(model.parameters())
        self.ranges: dict[int, tuple[int, int]] = {}
        """The rows of parameters that are divided, by their ids."""
        for path, those in self.rows.items():
            self.ranges |= {id(p): those for p in model.get_submodule(path).parameters()}
        self._mirror = None if home == device else Mirror(self._own(), home, device)
        memory = self._own() if self._mirror is None else self._mirror.copies
        parameters = [nn.Parameter(each, requires_grad=False) for each in memory]
        memo: dict[int, Any] = {id(p): own for p, own in zip(self.originals, parameters, strict=True)}
        buffers = list(model.buffers())
        self._buffer_mirror = Mirror(buffers, home, device, counted=False) if home != device else None
        own_buffers = (
            [b.detach().clone() for b in buffers] if self._buffer_mirror is None else list(self._buffer_mirror.copies)
        )
        memo |= {id(b): own for b, own in zip(buffers, own_buffers, strict=True)}
        self.module: nn.Module = copy.deepcopy(model, memo)
        for path, (start, stop) in self.rows.items():
            self.module.get_submodule(path).out_features = stop - start  # type: ignore[assignment]
        self.buffers = own_buffers
        self._parameters = parameters
        self.leaves: list[nn.Parameter] = []
        self._recorder = recorder
        self._stages: dict[Stages | None, list[Stage]] = {}
        self._gradient_mirrors: dict[tuple[int, ...], Mirror] = {}
        self.take_needs()
        self.buffers_home = Mirror(buffers, device, home, counted=False) if home != device else None
        self._versions: list[int | None] = [None] * len(parameters)
        self._slots = _slots(self.module, own_buffers)
        self._modules = list(self.module.modules())

    @property
    def queues(self) -> bool:
        """Whether the device, or a recording, works on after a call has returned, so that one thread serves all."""
        return self.device.type == "cuda" or self._recorder is not None

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"replica {self.number} on {self.device}"

    def _own(self) -> list[torch.Tensor]:
        """The model's parameters, of divided ones the rows of this copy."""
        own = []
        for p in self.originals:
            start, stop = self.ranges.get(id(p), (0, 0))
            own.append(p.detach()[start:stop] if id(p) in self.ranges else p.detach())
        return own

    def stages(self, how: Stages | None) -> list[Stage]:
        """The pieces of the copy where it is cut so."""
        if how not in self._stages:
            if len(self._stages) >= MOST_STAGES:
                del self._stages[next(iter(self._stages))]
            pieces = [self.module] if how is None else pieces_of(self.module, how.chain, how.spans)
            layers = [""] if how is None else [span.layer for span in how.spans]
            made = []
            for piece, layer in zip(pieces, layers, strict=True):
                captured = self._recorder is not None and not getattr(piece, "empty", False)
                captures = Captures(piece, self.device, self._recorder) if captured and self._recorder else None
                made.append(Stage(piece, captures, layer))
            self._stages[how] = made
            self._find_leaves(made)
        return self._stages[how]

    def _find_leaves(self, stages: Sequence[Stage]) -> None:
        """Say which leaves each stage has."""
        places = {id(leaf): index for index, leaf in enumerate(self.leaves)}
        seen = set[int]()
        for stage in stages:
            own = [places[id(p)] for p in stage.module.parameters() if id(p) in places]
            stage.leaves = sorted(own, key=lambda index: -self.leaves[index].numel())
            stage.last = [index for index in stage.leaves if index not in seen]
            seen |= {*stage.leaves}

    def summary(self) -> str:
        """What became of CUDA graphs, as text."""
        if self._recorder is None:
            return "no graphs"
        stages = list(self._stages.values())[-1] if self._stages else []
        told = dict.fromkeys(s.captures.summary() for s in stages if s.captures is not None)
        return "; ".join(told) or "no call has come twice yet"

    def forget(self) -> None:
        """Let the next :meth:`refresh` copy all parameters."""
        self._versions = [None] * len(self._versions)

    def refresh(self) -> None:
        """Copy parameters that have changed since the last time."""
        if self._mirror is None:
            return
        versions = [p._version for p in self.originals]
        changed = [new != old for new, old in zip(versions, self._versions, strict=True)]
        if any(changed):
            self._mirror.copy(self._own(), changed)
            self._versions = list(versions)

    def take_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Set the values of the buffers to those of the model's."""
        if self._buffer_mirror is not None:
            self._buffer_mirror.copy([b.detach() for b in buffers])
        else:
            with torch.no_grad():
                torch._foreach_copy_([own.data for own in self.buffers], [b.detach() for b in buffers])

    def take_needs(self) -> None:
        """Let those parameters need a gradient that do in the model."""
        for own, original in zip(self._parameters, self.originals, strict=True):
            own.requires_grad_(original.requires_grad)
        self.leaves = [p for p in self._parameters if p.requires_grad]
        self._gradient_mirrors.clear()
        for stages in self._stages.values():
            self._find_leaves(stages)

    def take_modes(self, modes: Sequence[bool]) -> None:
        """Set every module to training or evaluation, as the model's are."""
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training

    def kept_buffers(self) -> list[torch.Tensor]:
        """The buffers after a forward. One that the forward exchanged for another tensor has its values."""
        for (module, name), own in self._slots:
            now = module._buffers[name]
            if now is not own:
                if now is None or now.shape != own.shape:
                    raise ReplicaError(
                        f"{self.name}: its forward made buffer {name} of another shape: buffers of one shape would do"
                    )
                with torch.no_grad():
                    own.data.copy_(now)
                module._buffers[name] = own
        return self.buffers

    def send_gradients(self, leaves: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> Mirror:
        """Send the gradients of some leaves to the model's device, from a copy elsewhere.

        They are in ``copies`` of what is returned, which the next ones overwrite; on a CPU after its ``wait``. The
        current streams of both devices are ordered.
        """
        key = tuple(leaves)
        if key not in self._gradient_mirrors:
            if len(self._gradient_mirrors) >= MOST_MIRRORS:
                del self._gradient_mirrors[next(iter(self._gradient_mirrors))]
            self._gradient_mirrors[key] = Mirror([self.leaves[i] for i in leaves], self.device, self.home)
        mirror = self._gradient_mirrors[key]
        mirror.copy(gradients)
        return mirror

    def wait(self) -> None:
        """Wait until what was copied to a CPU is there."""
        for mirror in (self._mirror, self._buffer_mirror):
            if mirror is not None:
                mirror.wait()


def _slots(module: nn.Module, buffers: Sequence[torch.Tensor]) -> list[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """Where each of the buffers is registered."""
    known = {id(buffer): buffer for buffer in buffers}
    return [
        ((part, name), known[id(buffer)])
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
