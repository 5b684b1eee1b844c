"""A copy of a model on one device, which shares the model's parameters there and has copies of them elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.nn.shared.captures import Captures, NewRecorder
from tilewise.nn.shared.mirror import Mirror

__all__ = ["Replica", "ReplicaError"]


class ReplicaError(RuntimeError):
    """What a model raised for one part of a batch. The message names the device and the samples."""


class Replica:
    """A copy of ``model``, which is on ``home``, on ``device``: number ``number`` of those that share a batch.

    Where the model is on that device itself, the copy's parameters are the model's memory. Elsewhere they are copies,
    which :meth:`refresh` renews. Buffers are always the copy's own. The copy has no hooks on its parameters and no part
    in autograd's graphs of the model: its gradients are taken by :attr:`leaves`.
    """

    def __init__(
        self, model: nn.Module, home: torch.device, device: torch.device, number: int, recorder: NewRecorder | None
    ) -> None:
        self.device, self.number, self.home = device, number, home
        self.originals = list(model.parameters())
        self._mirror = None if home == device else Mirror(self.originals, home, device)
        memory = [p.detach() for p in self.originals] if self._mirror is None else self._mirror.copies
        parameters = [nn.Parameter(each, requires_grad=False) for each in memory]
        memo: dict[int, Any] = {id(p): own for p, own in zip(self.originals, parameters, strict=True)}
        buffers = list(model.buffers())
        self._buffer_mirror = Mirror(buffers, home, device, counted=False) if home != device else None
        own_buffers = (
            [b.detach().clone() for b in buffers] if self._buffer_mirror is None else list(self._buffer_mirror.copies)
        )
        memo |= {id(b): own for b, own in zip(buffers, own_buffers, strict=True)}
        self.module: nn.Module = copy.deepcopy(model, memo)
        self.buffers = own_buffers
        self._parameters = parameters
        self.leaves: list[nn.Parameter] = []
        self._gradient_mirror: Mirror | None = None
        self.take_needs()
        self.buffers_home = Mirror(buffers, device, home, counted=False) if home != device else None
        self._versions: list[int | None] = [None] * len(parameters)
        self._slots = _slots(self.module, own_buffers)
        self._modules = list(self.module.modules())
        self.captures = None if recorder is None else Captures(self.module, device, recorder)

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"replica {self.number} on {self.device}"

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
            self._mirror.copy([p.detach() for p in self.originals], changed)
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
        self._gradient_mirror = Mirror(self.leaves, self.device, self.home) if self.home != self.device else None

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

    def send_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients on the model's device: those of a copy elsewhere in memory that its next ones overwrite.

        On a CPU they are there after :meth:`wait_for_gradients`.
        """
        mirror = self._gradient_mirror
        if mirror is None:
            return list(gradients)
        mirror.copy(gradients)
        return [None if g is None else there for g, there in zip(gradients, mirror.copies, strict=True)]

    def wait_for_gradients(self) -> None:
        """Wait until gradients that were sent to a CPU are there."""
        if self._gradient_mirror is not None:
            self._gradient_mirror.wait()

    def wait(self) -> None:
        """Wait until what was copied to a CPU is there."""
        for mirror in (self._mirror, self._buffer_mirror):
            if mirror is not None:
                mirror.wait()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the copy returns, by a replay where there is one."""
        if self.captures is not None:
            return self.captures.call(args, kwargs)
        return self.module(*args, **kwargs)


def _slots(module: nn.Module, buffers: Sequence[torch.Tensor]) -> list[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """Where each of the buffers is registered."""
    known = {id(buffer): buffer for buffer in buffers}
    return [
        ((part, name), known[id(buffer)])
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
