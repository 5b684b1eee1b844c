"""Capturing a model: warmed up, recorded, checked, and left as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.check import disagreement
from tilewise.nn.graphs.inputs import Inputs, why_no_copy
from tilewise.nn.graphs.modes import modes
from tilewise.nn.graphs.obstacles import obstacle
from tilewise.nn.graphs.piece import Piece
from tilewise.nn.graphs.random import HostNumbers
from tilewise.nn.graphs.recorder import CannotCapture, Recorder
from tilewise.nn.graphs.replay import Capture, Recorded
from tilewise.nn.graphs.standing import Contents, Standing
from tilewise.nn.graphs.standins import aliased, exchanged
from tilewise.nn.kept_values import values_kept
from tilewise.nn.record import state_kept

__all__ = ["capture"]

WARM_UPS = 3
"""Runs before recording, in which libraries choose algorithms, layers are planned and kernels are compiled."""


def capture(model: nn.Module, plain: Callable[..., Any], recorder: Recorder, inputs: Inputs) -> Capture:
    """Record ``plain``, the forward of ``model``, on arguments like ``inputs``, with the gradients that they need.

    Parameters, buffers, gradients, modes and random states are afterwards as before. Raises :class:`CannotCapture` with
    the reason where a recording would not do what the model does, or fails.
    """
    reason = obstacle(model, recorder.device) or why_no_copy(inputs, recorder.device)
    if reason:
        raise CannotCapture(reason)
    state = modes(recorder.device.type)
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        statics = [_copy(t, needs) for t, needs in zip(inputs.tensors, inputs.needs, strict=True)]
        aliases = aliased(model)
        piece = Piece(plain, inputs, statics, [alias for alias in aliases.values() if alias.requires_grad])
        try:
            with _as_it_was(model), exchanged(model, aliases):
                random = _warm_up(model, recorder, piece)
                recorded = _record(model, recorder, piece, statics, random=random)
                reason = disagreement(model, recorder, piece, recorded)
                if reason:
                    raise CannotCapture(reason)
        except CannotCapture:
            raise
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise CannotCapture(f"{type(error).__name__}: {lines[0]}") from error
        finally:
            piece.forget()
    weights = [parameter for parameter in aliases if parameter.requires_grad]
    return Capture(model, plain, recorder, inputs, state, Standing(model), weights, recorded)


def _warm_up(model: nn.Module, recorder: Recorder, piece: Piece) -> bool:
    """Run the piece without recording it, and say whether it draws random numbers on the device."""
    host = HostNumbers(model.modules(), recorder.generator)
    before = recorder.generator.get_state()
    for _ in range(WARM_UPS):
        recorder.warm_up(piece.step)
    drawn = host.drawn()
    if drawn:
        raise CannotCapture(f"it draws from {drawn}; a replay would repeat the numbers of one call")
    return not torch.equal(before, recorder.generator.get_state())


def _record(
    model: nn.Module, recorder: Recorder, piece: Piece, statics: list[torch.Tensor], *, random: bool
) -> Recorded:
    """Record the forward and the backward, and find what they would not repeat."""
    contents, buffers = Contents(model), list(model.buffers())
    versions = [t._version for t in (*statics, *buffers)]
    forward, outputs = recorder.record(piece.forward)
    foreign = piece.foreign()
    if foreign:
        raise CannotCapture(foreign)
    backward: Callable[[], object] | None = None
    gradients: list[torch.Tensor | None] = []
    if any(piece.requires):
        piece.prepare()
        backward, gradients = recorder.record(piece.backward)
    changed = contents.difference()
    if changed:
        raise CannotCapture(f"{changed} in a run of its forward; a replay would not change it")
    written = [t._version != v for t, v in zip((*statics, *buffers), versions, strict=True)]
    if any(written[: len(statics)]):
        raise CannotCapture("its forward writes into its arguments")
    return Recorded(
        statics=statics,
        forward=forward,
        outputs=[output.detach() for output in outputs],
        requires=piece.requires,
        structure=piece.structure,
        others=piece.others,
        backward=backward,
        output_gradients=piece.output_gradients,
        gradients=[None if gradient is None else gradient.detach() for gradient in gradients],
        written=[b for b, wrote in zip(buffers, written[len(statics) :], strict=True) if wrote],
        random=random,
    )


def _copy(t: torch.Tensor, needs: bool) -> torch.Tensor:
    """A leaf with the values and strides of ``t``."""
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    with torch.no_grad():
        copy.copy_(t)
    return copy.requires_grad_(needs)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers, gradients, modes and random states at the end. Compiled code does not run."""
    with ExitStack() as stack:
        stack.enter_context(state_kept(model, ()))
        stack.enter_context(values_kept(model.parameters(), torch.clone))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
