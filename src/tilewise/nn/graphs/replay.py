"""Replays of a recorded model as one node of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from tilewise.nn.graphs.inputs import Inputs
from tilewise.nn.graphs.piece import differentiated
from tilewise.nn.graphs.recorder import Recorder
from tilewise.nn.graphs.standing import Standing
from tilewise.nn.graphs.standins import buffers_aside
from tilewise.nn.layers.call import disturbed

__all__ = ["Capture", "Recorded"]

_version = attrgetter("_version")
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


@dataclass(frozen=True)
class Recorded:
    """The recordings of one forward and backward, with the tensors that they read and write.

    ``statics`` are the arguments and ``outputs`` the results of the forward, of which those that ``requires`` names
    have a gradient. ``output_gradients`` are theirs, ``gradients`` those of the statics and then of the weights, with
    ``None`` for what has none; ``backward`` is ``None`` where nothing has. ``structure`` and ``others`` say how the
    model returns its tensors. ``written`` are the buffers that a forward writes to. ``random`` says whether it draws.
    """

    statics: Sequence[torch.Tensor]
    forward: Callable[[], object]
    outputs: Sequence[torch.Tensor]
    requires: Sequence[bool]
    structure: TreeSpec
    others: Sequence[tuple[Any] | None]
    backward: Callable[[], object] | None
    output_gradients: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    written: Sequence[torch.Tensor]
    random: bool


class Ticket:
    """One forward that was replayed. Lives as long as autograd may ask for its backward."""

    __slots__ = ("__weakref__", "done", "versions")

    def __init__(self, versions: list[int]) -> None:
        self.done = False
        self.versions = versions


class Capture:
    """A recorded forward and backward of ``model`` for arguments like ``inputs`` under the flags ``state``.

    ``weights`` are the parameters that need a gradient. A call copies its arguments to where the recording reads them,
    replays, and returns copies of the results, so that a later replay does not change what the caller has.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: Callable[..., Any],
        recorder: Recorder,
        inputs: Inputs,
        state: tuple[object, ...],
        standing: Standing,
        weights: Sequence[nn.Parameter],
        recorded: Recorded,
    ) -> None:
        self._model, self._plain, self._recorder = model, plain, recorder
        self.shape, self.needs, self.state, self.standing = inputs.shape, inputs.needs, state, standing
        self._inputs = Inputs((), inputs.shape, inputs.needs)
        self._recorded = recorded
        count = len(recorded.statics)
        self._gradients = recorded.gradients[:count]
        # A weight without gradient is no input of the node: wrappers look there for the weights that a step uses.
        of_weights = recorded.gradients[count:]
        self._weights = [w for w, g in zip(weights, of_weights, strict=False) if g is not None]
        self._gradients = [*self._gradients, *[g for g in of_weights if g is not None]]
        self._own = [g for g in self._gradients if g is not None]
        self._storages = [g.untyped_storage()._cdata for g in self._own]
        self._unlent = [*map(_use_count, self._storages)]
        self._parameters = list(model.parameters())
        self._ticket: weakref.ref[Ticket] | None = None
        self.words = f"{inputs.in_words()}, {'train' if model.training else 'eval'}" + (
            ", with gradients" if recorded.backward is not None else ""
        )

    @property
    def bytes(self) -> int:
        """The bytes on the device that the recordings hold."""
        return self._recorder.bytes()

    def pending(self) -> bool:
        """Whether the backward of a replayed forward may still come. Another replay would overwrite what it needs."""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is not None and not ticket.done

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns for arguments with ``tensors``."""
        recorded = self._recorded
        if recorded.backward is None:
            outputs = self.forward(tensors)
        else:
            apply: Any = Replay.apply
            outputs = apply(self, *tensors, *self._weights)
        return self._returned(outputs)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Replay the forward and return copies of its outputs."""
        recorded = self._recorded
        self._recorder.ordered()
        with torch.no_grad():
            for static, tensor in zip(recorded.statics, tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
            recorded.forward()
            if recorded.written:
                torch.autograd.graph.increment_version(recorded.written)  # as operators that write do
            return tuple([output.clone() for output in recorded.outputs])

    def _returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The tensors in the structure that the model returns."""
        recorded = self._recorded
        rest = iter(outputs)
        leaves = [next(rest) if other is None else other[0] for other in recorded.others]
        return tree_unflatten(leaves, recorded.structure)

    def issue(self) -> Ticket:
        """A ticket for the forward that is being replayed."""
        ticket = Ticket([*map(_version, self._parameters)])
        self._ticket = weakref.ref(ticket)
        return ticket

    def current(self, ticket: Ticket) -> bool:
        """Whether the recording still holds what the backward of this forward needs: it runs once."""
        return self._ticket is not None and self._ticket() is ticket and not ticket.done

    def backward(self, ticket: Ticket, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward. Raises ``RuntimeError`` where a parameter was written since the forward."""
        recorded = self._recorded
        assert recorded.backward is not None
        self._unwritten(ticket)
        ticket.done = True
        self._recorder.ordered()
        with torch.no_grad():
            given = [g for g, requires in zip(gradients, recorded.requires, strict=True) if requires]
            for static, gradient in zip(recorded.output_gradients, given, strict=True):
                if gradient is None:
                    static.zero_()
                else:
                    static.copy_(gradient, non_blocking=True)
            if [*map(_use_count, self._storages)] == self._unlent:
                recorded.backward()
                # New tensors in the recording's memory, which become .grad as they are: nothing is copied.
                return [None if g is None else g.detach() for g in self._gradients]
            # Somebody has gradients of an earlier replay, .grad most often, to which these will be added.
            lent = [g.clone() for g in self._own]
            recorded.backward()
            new = iter([g.clone() for g in self._own])
            torch._foreach_copy_(self._own, lent)
            return [None if g is None else next(new) for g in self._gradients]

    def _unwritten(self, ticket: Ticket) -> None:
        """Raise ``RuntimeError`` where a parameter was written to between a forward and its backward, as torch does."""
        for tensor, version in zip(self._parameters, ticket.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a parameter of shape {tuple(tensor.shape)} of a model replayed from a CUDA graph; backward "
                    "before it is written would do"
                )

    def again(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients by torch itself, from a second run of the forward, for what a replay of it cannot give.

        That is a backward that is repeated or differentiated. Raises ``RuntimeError`` where a second run would not
        compute the same, as the model draws random numbers or has changed.
        """
        reason = "it draws random numbers" if self._recorded.random else self.standing.difference()
        if reason:
            raise RuntimeError(
                "a second backward, or one to be differentiated, through a model that was replayed from a CUDA graph "
                f"needs its forward again, which is not the same now: {reason}. "
                "tilewise.nn.ungraphed(model) before the forward would do"
            )
        count = len(self._recorded.statics)
        create = torch.is_grad_enabled()
        args, kwargs = self._inputs.arguments(tensors[:count])
        with buffers_aside(self._model), torch.enable_grad(), self._autocast():
            results = self._plain(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        heads = [output for output, requires in zip(outputs, self._recorded.requires, strict=True) if requires]
        given = [g for g, requires in zip(gradients, self._recorded.requires, strict=True) if requires]
        filled = [torch.zeros_like(o) if g is None else g for o, g in zip(heads, given, strict=True)]
        return differentiated(heads, tensors, filled, create_graph=create)

    def _autocast(self) -> Any:
        """Autocast as it was at the capture."""
        dtype: Any = self.state[-1]
        device_type = self._recorder.device.type
        return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


class Replay(torch.autograd.Function):
    """One replay of a capture. Its inputs are the call's tensors and the weights."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorded = capture._recorded
        ctx.capture, ctx.ticket = capture, capture.issue()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        outputs = capture.forward(tensors[: len(recorded.statics)])
        ctx.mark_non_differentiable(
            *[o for o, requires in zip(outputs, recorded.requires, strict=True) if not requires]
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        capture: Capture = ctx.capture
        if not capture.current(ctx.ticket) or torch.is_grad_enabled() or disturbed():
            ctx.ticket.done = True
            return None, *capture.again(ctx.saved_tensors, gradients)
        return None, *capture.backward(ctx.ticket, gradients)
