"""``caffe time``: how long each layer takes, forward and backward."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.frontends.caffe.net import Net
from tilewise.frontends.caffe.training.log import LOGGER, number

__all__ = ["time_net"]


class Stopwatch:
    """Milliseconds by layer and direction. A layer's backward pass lasts until that of another begins, or all ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forward: dict[str, float] = defaultdict(float)
        self.backward: dict[str, float] = defaultdict(float)
        self._running = ("", 0.0)

    def now(self) -> float:
        """The time in milliseconds, when all that was launched is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3

    def begins(self, name: str) -> None:
        """The backward pass of a layer begins."""
        before, since = self._running
        now = self.now()
        if before:
            self.backward[before] += now - since
        self._running = (name, now)

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch these layers within the block."""
        started: dict[str, float] = {}
        handles = []

        def before(name: str) -> Callable[..., None]:
            def hook(*_: object) -> None:
                started[name] = self.now()

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: object, result: Any) -> None:
                self.forward[name] += self.now() - started[name]
                for each in (result,) if isinstance(result, Tensor) else tuple(result):
                    # A layer that hands its input on has that one's node, whose own layer is asked there.
                    if isinstance(each, Tensor) and each.grad_fn is not None:
                        each.grad_fn.register_prehook(lambda _: self.begins(name))

            return hook

        for name, layer in layers.items():
            handles += [layer.register_forward_pre_hook(before(name)), layer.register_forward_hook(after(name))]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def time_net(net: Net, device: torch.device, iterations: int) -> None:
    """Run a net forward and backward, and show the mean times of its layers and of both passes.

    One pass before is not counted, as it makes what later ones have.
    """
    layers = dict(net.layers)
    watch = Stopwatch(device)
    LOGGER.info("Performing Forward")
    _once(net, watch)
    LOGGER.info("*** Benchmark begins ***")
    LOGGER.info("Testing for %d iterations.", iterations)
    start, forward, backward = watch.now(), 0.0, 0.0
    with watch.watching(layers):
        for iteration in range(iterations):
            ahead, back = _once(net, watch)
            forward, backward = forward + ahead, backward + back
            LOGGER.info("Iteration: %d forward-backward time: %s ms.", iteration + 1, number(ahead + back))
    total = watch.now() - start
    LOGGER.info("Average time per layer: ")
    for name in layers:
        LOGGER.info("%10s\tforward: %s ms.", name, number(watch.forward[name] / iterations))
        LOGGER.info("%10s\tbackward: %s ms.", name, number(watch.backward[name] / iterations))
    LOGGER.info("Average Forward pass: %s ms.", number(forward / iterations))
    LOGGER.info("Average Backward pass: %s ms.", number(backward / iterations))
    LOGGER.info("Average Forward-Backward: %s ms.", number(total / iterations))
    LOGGER.info("Total Time: %s ms.", number(total))
    LOGGER.info("*** Benchmark ends ***")


def _once(net: Net, watch: Stopwatch) -> tuple[float, float]:
    """The times of one forward and one backward pass; where a net has no loss, all it puts out is summed instead."""
    for parameter in net.parameters():
        parameter.grad = None
    start = watch.now()
    result = net()
    loss = net.loss if net.loss is not None and net.loss.requires_grad else _sum(result)
    middle = watch.now()
    if loss is not None:
        loss.backward()
    watch.begins("")
    return middle - start, watch.now() - middle


def _sum(outputs: dict[str, Tensor]) -> Tensor | None:
    """The sum of all values of outputs that have a gradient."""
    sums = [tensor.sum() for tensor in outputs.values() if tensor.requires_grad]
    return torch.stack(sums).sum() if sums else None
