"""The pass over the joint graph of forward and backward that Inductor compiles for a planned model in training.

It changes what surrounds convolutions: norms and the ReLU behind them, on whose passes over memory such steps wait.
This module imports Inductor, so only what runs while a graph is traced may import it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from tilewise.nn.layers.inductor.norm_sums import sum_by_kernels
from tilewise.nn.layers.inductor.relu_gates import compute_gates_anew
from tilewise.nn.layers.inductor.settings import after, each_pass, settings_of

__all__ = ["TrainingPass", "install"]

SETTING = "joint_custom_post_pass"
"""Inductor's setting for passes over the joint graph, after its own. It sorts the graph afterwards."""
CAPTURED = "triton.cudagraphs"
"""Inductor's setting for CUDA graphs, which ``mode="reduce-overhead"`` and ``mode="max-autotune"`` turn on."""


def install(compiler: Any) -> bool:
    """Have ``compiler``, a backend as Dynamo holds it, run the pass; returns whether it takes passes.

    Sums by kernels of ours are operators, which take a host longer than Inductor's own launches. So they are for
    graphs that a GPU runs by itself.
    """
    settings = settings_of(compiler)
    if settings is None:
        return False
    before = after(settings, SETTING)
    if not isinstance(before, TrainingPass):
        settings[SETTING] = TrainingPass(before, sums=bool(after(settings, CAPTURED)))
    return True


class TrainingPass(CustomGraphPass):
    """What Inductor calls with a joint graph: first the passes ``before`` that the user has set, then this one.

    Graphs without a layer of ours stay as they are. ``sums`` says whether norms on a GPU are summed by our kernels.
    """

    def __init__(self, before: Any = None, *, sums: bool = False) -> None:
        self.before, self.sums = before, sums

    def uuid(self) -> str | None:
        """A digest of the pass, by which Inductor's cache on disk knows it; ``None`` where passes before have none."""
        others = [getattr(each, "uuid", lambda: None)() for each in each_pass(self.before)]
        if None in others:
            return None
        digest = hashlib.sha256(repr((self.sums, others)).encode())
        for file in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def __call__(self, graph: Graph | GraphModule) -> None:
        for each in each_pass(self.before):
            each(graph)
        nodes = graph.graph if isinstance(graph, GraphModule) else graph
        if any(_is_ours(node) for node in nodes.nodes):
            compute_gates_anew(nodes)
            if self.sums and any(_is_on_gpu(node) for node in nodes.find_nodes(op="placeholder")):
                sum_by_kernels(nodes)


def _is_ours(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "tilewise"


def _is_on_gpu(node: Node) -> bool:
    value = node.meta.get("val")
    return getattr(getattr(value, "device", None), "type", "") == "cuda"
