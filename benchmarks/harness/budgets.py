"""The networks of mu-cuDNN's section IV-D as kernels, and one workspace budget divided among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.layers import ALEXNET, PASSES, by_name, convolution
from harness.settings import BadInput, Settings
from tilewise.axis import Axis
from tilewise.frontends.layers import convolution_layers
from tilewise.frontends.networks import load_network
from tilewise.nn.budget import Budget, divide
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problem import ConvProblem, Pass

NETWORKS = {"alexnet": 256, "resnet50": 32}
"""The paper's batches."""
Names = Mapping[ConvProblem, Sequence[str]]


@dataclass(frozen=True)
class Division:
    """A budget divided among a network's kernels, and the plan of each within its limit."""

    network: str
    total: str
    policy: str
    plans: Mapping[ConvProblem, Plan]
    facts: Mapping[str, Any]

    @property
    def group(self) -> str:
        """Names its rows."""
        return f"{self.network} {self.total} {self.policy}"


def kernels_of(network: str, settings: Settings) -> dict[ConvProblem, list[str]]:
    """Every layer in all three passes, as the paper counts them: the layers that pose each problem.

    The options ``layers`` and ``passes`` choose some, ``batch`` replaces the paper's.
    """
    batch = settings.integer("batch") or NETWORKS[network]
    passes = settings.chosen("passes", PASSES)
    found: dict[ConvProblem, list[str]] = {}
    layers = _alexnet(settings, batch) if network == "alexnet" else _built_in(network, settings, batch)
    for name, by_pass in layers.items():
        for pass_ in passes:
            found.setdefault(by_pass[pass_], []).append(name)
    return found


def _alexnet(settings: Settings, batch: int) -> dict[str, dict[Pass, ConvProblem]]:
    return {
        layer.name: {pass_: layer.problem(pass_, settings.device, batch=batch) for pass_ in Pass}
        for layer in settings.chosen("layers", by_name(ALEXNET))
    }


def _built_in(network: str, settings: Settings, batch: int) -> dict[str, dict[Pass, ConvProblem]]:
    loaded, wanted = load_network(network), settings.words("layers")
    found = {}
    for call in convolution_layers(loaded.module, loaded.example_inputs(batch, torch.device("cpu"), torch.float32)):
        if wanted and call.name not in wanted:
            continue
        conv: Any = call.module
        rows = zip(call.input_shape[2:], conv.kernel_size, conv.stride, conv.padding, strict=True)
        axes = tuple(Axis(size, kernel, stride, before=pad, after=pad) for size, kernel, stride, pad in rows)
        shape = settings.device, batch, conv.in_channels, conv.out_channels, axes
        found[call.name] = {pass_: convolution(pass_, *shape) for pass_ in Pass}
    if not found:
        raise BadInput(f"layers={settings.text('layers')!r}: {network} has none of these")
    return found


def options_of(settings: Settings) -> Options:
    """Planning options of the benchmark, without a limit."""
    sizes = settings.policies("batch_sizes")
    if len(sizes) != 1:
        raise BadInput(f"batch_sizes={settings.text('batch_sizes')!r}: one of them would do")
    return settings.planning(None, sizes[0])


def divided(
    network: str, names: Names, total: str, size: int, policy: str, planner: Planner, options: Options
) -> Division:
    """Fronts, division and plans. Raises ``NoPlanError`` with the least budget that works."""
    found = divide(planner, names, options, Budget(size, policy))
    plans = {
        problem: planner.plan(problem, replace(options, workspace=limit)) for problem, limit in found.limits.items()
    }
    return Division(network, total, policy, plans, found.facts["budget"])
