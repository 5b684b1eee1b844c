"""Whether a replay computes what the model computes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from tilewise.nn.graphs.piece import Piece
from tilewise.nn.graphs.recorder import Recorder
from tilewise.nn.graphs.replay import Recorded
from tilewise.nn.kept_values import values_kept

__all__ = ["disagreement"]

TOLERANCE = 0.1
"""Relative L2 distance of all results, and of all gradients, that is taken for the order of sums in a deep network.
A replay that reads or writes the wrong memory is further off."""

Values = list[torch.Tensor | None]


def disagreement(model: nn.Module, recorder: Recorder, piece: Piece, recorded: Recorded) -> str:
    """How a replay differs from a run of the piece on the same arguments, as text; empty where it does not.

    Models that draw random numbers are not compared.
    """
    if recorded.random:
        return ""
    outputs: Values = []
    gradients: Values = []

    def run() -> None:
        """Run the piece and keep what it computes."""
        outputs.extend(t.detach().clone() for t in piece.forward())
        if any(piece.requires):
            piece.prepare()
            gradients.extend(piece.backward())
        piece.forget()

    with values_kept(model.buffers(), torch.clone):
        recorder.warm_up(run)
    with values_kept(model.buffers(), torch.clone):
        recorder.ordered()
        recorded.forward()
        if recorded.backward is not None:
            recorded.backward()
        recorder.synchronize()
    for what, wanted, got in (("results", outputs, recorded.outputs), ("gradients", gradients, recorded.gradients)):
        distance = _distance(wanted, got)
        if distance > TOLERANCE:
            return f"{what} of a replay are off by {distance:.2g} (relative L2) from those of the model"
    return ""


def _distance(wanted: Iterable[torch.Tensor | None], got: Iterable[torch.Tensor | None]) -> float:
    """The relative L2 distance over all floating-point tensors; 0 where what is wanted is not finite."""
    off = size = 0.0
    for w, g in zip(wanted, got, strict=True):
        if w is not None and g is not None and w.is_floating_point() and w.numel():
            off += float((w.double() - g.double()).square().sum())
            size += float(w.double().square().sum())
    if not math.isfinite(size) or (size == 0.0 and off == 0.0):
        return 0.0
    return math.sqrt(off / size) if size and math.isfinite(off) else math.inf
