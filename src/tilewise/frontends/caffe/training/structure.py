"""The nets of a solver's file: which one is trained, which ones are tested, and what each of them puts out."""

from __future__ import annotations

from typing import Any

from tilewise.frontends.caffe.data.layers import FROM_FILES, source
from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.net import Net

__all__ = ["output_weights", "planned_nets", "share_records"]


def planned_nets(solver: Any, path: str) -> tuple[Any, list[Any]]:
    """The layers of the net that a solver trains, and of those that it tests, each for its phase and state.

    Raises ``CaffeError`` for nets that are missing, wrong or given twice, and for a ``test_iter`` below 0.
    """
    from tilewise.frontends.caffe.files import filtered, solver_nets

    if any(iterations < 0 for iterations in solver.test_iter):
        raise CaffeError(f"test_iter: {min(solver.test_iter)}; 0 or more would do")
    nets = solver_nets(solver, path)
    return filtered(nets.train, phase="train"), [filtered(net, phase="test") for net in nets.tests]


def output_weights(net: Net) -> dict[str, float]:
    """The outputs of a net in Caffe's order, the alphabetical, each with its loss weight, which is 0 for most."""
    weights = {top: weight for node in net.nodes for top, weight in zip(node.tops, node.weights, strict=True)}
    return {name: weights[name] for name in sorted(net.outputs)}


def share_records(net: Net, layers: Any, seed: int, share: tuple[int, int]) -> None:
    """Have the data layers of a net read a share of the records, a rank's of so many."""
    for layer in layers.layer:
        if layer.type in FROM_FILES:
            net.sources[layer.name] = source(layer, "train", seed, share=share)
