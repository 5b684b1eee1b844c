"""How an error within a region grows until its results: where plans must be exact, and where they need not be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilewise.nn.regions import fused
from tilewise.nn.regions.trace import Traced

__all__ = ["gains_of"]

PRODUCTS = (fused.convolution, fused.linear)
PROBES = 2
"""Random directions of the results along which is derived, where no other number is asked for."""
SEED = 20


def gains_of(
    traced: Traced, nodes: Collection[fx.Node], tensors: Sequence[Tensor], probes: int = PROBES
) -> Mapping[fx.Node, float] | None:
    """By how much a relative L2 error in the result of each of ``nodes`` grows in the results of the whole.

    ``traced`` may be rewritten; ``tensors`` are its inputs. Errors of rounding point in all directions alike. So the
    expected square is the squared Frobenius norm of the Jacobian from a node to the results, times the square of the
    node's norm, over its elements and the square of the results' norm. The Jacobian's norm is estimated without it:
    it is the mean of the squares of derivatives along ``probes`` random directions of the results (Hutchinson 1990).
    One backward pass gives those of all nodes at once. Directions have elements of 1 and -1, so that one probe is exact
    for a single result. All nodes share the directions, so the ratio of two gains is known better than each gain.

    Returns ``None`` where torch cannot derive the results, or where gains are not finite.

    >>> from torch import nn
    >>> from tilewise.nn.regions.trace import trace
    >>> x = torch.ones(1, 4, dtype=torch.float32, device="cpu")
    >>> with torch.no_grad():
    ...     traced = trace(nn.Sequential(nn.Tanh(), nn.ReLU()).eval(), (x,), {})
    >>> *_, relu = (node for node in traced.graph.nodes if node.op == "call_function")
    >>> f"{gains_of(traced, [relu], [x])[relu]:.0f}"
    '1'
    """
    with torch.inference_mode(False), torch.enable_grad():
        watched = _Watched(traced, nodes)
        try:
            results = [t for t in watched.run(*(t.detach() for t in tensors)) if t.requires_grad]
            squares = _derived(results, watched.seen, probes)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # operators without derivative, no memory
            return None
    gains = {
        node: math.sqrt(squares[node] / probes / seen.numel()) * float(seen.detach().double().norm())
        for node, seen in watched.seen.items()
    }
    return gains if all(map(math.isfinite, gains.values())) else None


class _Watched(fx.Interpreter):
    """Runs a graph, from the watched nodes on with derivatives. No constant is derived."""

    def __init__(self, traced: Traced, nodes: Collection[fx.Node]) -> None:
        super().__init__(traced.module, graph=traced.graph)
        self._sources, self._nodes = traced.sources, set(nodes)
        self.seen: dict[fx.Node, Tensor] = {}
        """Results of the watched nodes."""

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer, as a constant."""
        return self._sources[target].detach()

    def run_node(self, n: fx.Node) -> Any:
        """The result of one node. A watched one is where derivatives are asked for."""
        result = self._product(n) if n.target in PRODUCTS else super().run_node(n)
        if n in self._nodes:
            self.seen[n] = result = result if result.requires_grad else result.detach().requires_grad_()
        return result

    def _product(self, n: fx.Node) -> Tensor:
        """The result of a fused layer. Its folded weight and bias come in float64 and are rounded."""
        (x, w, b, *rest), _ = self.fetch_args_kwargs_from_env(n)
        target = n.target
        assert callable(target)
        return target(x, w.to(x.dtype), None if b is None else b.to(x.dtype), *rest)  # type: ignore[no-any-return]


def _derived(results: Sequence[Tensor], seen: Mapping[fx.Node, Tensor], probes: int) -> dict[fx.Node, float]:
    """Sums over the probes of the squared norms of derivatives, along directions in units of each result's norm."""
    sums = dict.fromkeys(seen, 0.0)
    norms = [float(result.detach().double().norm()) or 1.0 for result in results]
    for probe in range(probes):
        generator = torch.Generator(device=results[0].device).manual_seed(SEED + probe)
        directions = [
            torch.randn(result.shape, generator=generator, dtype=result.dtype, device=result.device).sgn() / norm
            for result, norm in zip(results, norms, strict=True)
        ]
        found = torch.autograd.grad(
            results, list(seen.values()), directions, retain_graph=probe + 1 < probes, allow_unused=True
        )
        for node, derivative in zip(seen, found, strict=True):
            if derivative is not None:
                sums[node] += float(derivative.double().square().sum())
    return sums
