"""What a solver takes from a snapshot and gives to one: places in the data, weights and histories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.net import Net
from tilewise.frontends.caffe.training.snapshots import Resumed
from tilewise.frontends.caffe.training.update import Update

__all__ = ["learned_weights", "losses_of", "places", "put_history", "put_places"]


def places(nets: Sequence[Net]) -> list[dict[str, dict[str, int]]]:
    """For each net the places of its data layers, by name."""
    return [{name: source.place() for name, source in net.sources.items()} for net in nets]


def put_places(nets: Sequence[Net], given: Any, path: Path, all_nets: bool = True) -> None:
    """Go to places that :func:`places` gave. Without ``all_nets`` they may be of further nets too.

    Raises ``CaffeError`` where they are not those of these nets.
    """
    if not isinstance(given, list) or len(given) < len(nets) or (all_nets and len(given) != len(nets)):
        raise CaffeError(f"{path}: its sidecar knows other nets than this solver has; the solver's own would do")
    for net, known in zip(nets, given, strict=False):
        if not isinstance(known, dict) or known.keys() != net.sources.keys():
            raise CaffeError(f"{path}: its sidecar knows other data layers than {sorted(net.sources)}")
        for name, source in net.sources.items():
            if not isinstance(known[name], dict):
                raise CaffeError(f"{path}: its sidecar has no place for layer {name!r}")
            source.go_to(known[name])


def learned_weights(found: Resumed) -> Path:
    """The file of weights that belongs to a state: where the state says, else beside it."""
    there = Path(found.learned_net)
    beside = found.path.parent / there.name
    for path in (there, beside):
        if path.is_file():
            return path
    raise CaffeError(f"{found.path}: its weights {there} are not there, nor {beside}; either would do")


@torch.no_grad()
def put_history(update: Update, found: Resumed) -> None:
    """Take the histories of a state. Raises ``CaffeError`` where they are not of this net and solver."""
    if len(found.history) != len(update.histories):
        text = f"{found.path}: has {len(found.history)} histories"
        raise CaffeError(f"{text}, but {update.rule.name} has {len(update.histories)} for this net; the same would do")
    for number, (own, given) in enumerate(zip(update.histories, found.history, strict=True)):
        if given.size != own.numel():
            name = update.learnable[number % len(update.learnable)].name
            sizes = f"{given.size} values, the parameter {own.numel()}"
            raise CaffeError(f"{found.path}: history {number} of {name!r} has {sizes}; equal numbers would do")
        own.copy_(torch.from_numpy(np.array(given)).reshape(own.shape))  # a copy, since files are mapped for reading


def losses_of(told: dict[str, Any], path: Path) -> list[float]:
    """The last losses, for the mean that is shown."""
    losses = told.get("losses", [])
    if not isinstance(losses, list) or not all(isinstance(loss, (int, float)) for loss in losses):
        raise CaffeError(f"{path}: its sidecar has no list of losses")
    return [float(loss) for loss in losses]
