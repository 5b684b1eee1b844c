"""A built-in network's convolution kernels: every pass of every layer, equal ones once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.cli.target import layers_of
from tilewise.frontends.networks import load_network
from tilewise.problems.conv.problem import ConvProblem


@dataclass(frozen=True)
class Kernel:
    """One pass of a layer and how many of the network's layers are equal to it."""

    name: str
    problem: ConvProblem
    count: int


def kernels_of(network: str, batch: int, device: torch.device, most: int = 0) -> list[Kernel]:
    """What a training step of ``network`` in true fp32 computes, in the order of the layers; nothing is allocated.

    The last ``most`` of them, all where that is 0.
    """
    loaded = load_network(network)
    loaded.module.to(device)
    inputs = loaded.example_inputs(batch, device)
    layers = layers_of(loaded.module.train(), inputs, "ieee", ())
    found = [
        Kernel(f"{layer.title} {problem.pass_.value}", problem, len(layer.names))
        for layer in layers
        for problem in layer.problems
    ]
    return found[-most:]
