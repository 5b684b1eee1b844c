"""The lines of ``caffe test``: the outputs of each batch, and their means."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.frontends.caffe.net import Net
from tilewise.frontends.caffe.training.log import LOGGER, number
from tilewise.frontends.caffe.training.testing import Means, forward

__all__ = ["score"]


def score(net: Net, outputs: Mapping[str, float], batches: int) -> Means:
    """Run ``batches`` batches and show each output, then the mean loss and the mean of each value of each output."""
    sums: Means = {}
    loss = 0.0
    for batch in range(batches):
        forward(net)
        loss += 0.0 if net.loss is None else float(net.loss)
        for name in outputs:
            values = net.blobs[name].detach().flatten().tolist()
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * len(values)), values, strict=True)]
            for value in values:
                LOGGER.info("Batch %d, %s = %s", batch, name, number(value))
    LOGGER.info("Loss: %s", number(loss / batches))
    means = {name: [value / batches for value in values] for name, values in sums.items()}
    for name, values in means.items():
        weight = outputs[name]
        for value in values:
            weighted = f" (* {number(weight)} = {number(weight * value)} loss)" if weight else ""
            LOGGER.info("%s = %s%s", name, number(value), weighted)
    return means
