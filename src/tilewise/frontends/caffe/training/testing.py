"""One test of a test net, and the lines that show what nets put out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.net import Net
from tilewise.frontends.caffe.training.log import LOGGER, number

__all__ = ["Means", "forward", "mean_outputs", "show_outputs"]

Means = dict[str, list[float]]
"""The values of a net's outputs, by name."""


def forward(net: Net) -> None:
    """Run a net on its next batch. Where that fails, the message says which records it was on."""
    try:
        net()
    except CaffeError as error:
        batches = "; ".join(filter(None, (source.told() for source in net.sources.values())))
        raise CaffeError(f"{error} (on {batches})" if batches else str(error)) from error


def mean_outputs(
    trained: Net,
    net: Net,
    outputs: Mapping[str, float],
    batches: int,
    interrupted: Callable[[], bool],
    with_loss: bool = False,
) -> Means | None:
    """Run ``batches`` batches of a test net that has the trained net's weights; the mean of each value of its outputs.

    ``outputs`` are names with loss weights. Between batches ``interrupted()`` says whether to stop, and then the result
    is ``None``. The means are shown, ``with_loss`` the loss too.
    """
    net.share_weights(trained)
    sums: dict[str, Tensor] = {}
    loss = 0.0
    with torch.no_grad():
        for _ in range(batches):
            if interrupted():
                LOGGER.info("Test interrupted.")
                return None
            forward(net)
            if with_loss and net.loss is not None:
                loss += float(net.loss)
            for name in outputs:
                value = net.blobs[name].detach().flatten().to(torch.float64)
                sums[name] = sums[name] + value if name in sums else value
    if with_loss:
        LOGGER.info("Test loss: %s", number(loss / max(1, batches)))
    means = {name: (value / batches).tolist() for name, value in sums.items()}
    show_outputs("Test", outputs, means)
    return means


def show_outputs(kind: str, outputs: Mapping[str, float], values: Mapping[str, Sequence[float]]) -> None:
    """A line for each value that a net has put out, counted through all outputs; those of losses with their weight."""
    index = 0
    for name, weight in outputs.items():
        for value in values.get(name, ()):
            weighted = f" (* {number(weight)} = {number(weight * value)} loss)" if weight else ""
            LOGGER.info("    %s net output #%d: %s = %s%s", kind, index, name, number(value), weighted)
            index += 1
