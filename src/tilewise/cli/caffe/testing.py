"""``tilewise caffe test``: scores a net."""

from __future__ import annotations

import click

from tilewise.cli.caffe.flags import (
    FlagsCommand,
    caffe_errors,
    device_options,
    devices_of,
    option,
    set_device,
    state_options,
)
from tilewise.cli.program import BadInput

__all__ = ["command"]


EXAMPLES = (
    (
        "tilewise caffe test -model net.prototxt -weights net.caffemodel",
        "Fifty batches of the net's test data, on the CPU.",
    ),
    ("tilewise caffe test -model net.prototxt -weights net.caffemodel -gpu 0", "The same on a GPU."),
)


@click.command("test", cls=FlagsCommand, examples=EXAMPLES)
@option("model", required=True, help="The net's prototxt file.")
@option("weights", required=True, help="Its weights, files with commas between them.")
@device_options
@state_options
@option("iterations", default=50, kind=int, help="How many batches are tested.")
def command(model: str, weights: str, gpu: str, level: int, stage: str, iterations: int) -> None:
    """Run a net's layers for testing on some batches, and print each batch's outputs and their mean."""
    import torch

    from tilewise.frontends.caffe.files import filtered, read_net, read_weights
    from tilewise.frontends.caffe.training.log import LOGGER, show_log
    from tilewise.frontends.caffe.training.scoring import score
    from tilewise.frontends.caffe.training.solver import caffe_net
    from tilewise.frontends.caffe.training.structure import output_weights

    if iterations < 1:
        raise BadInput(f"-iterations={iterations}: 1 or more would do")
    handler = show_log()
    try:
        with caffe_errors(), torch.no_grad():
            (device, *_) = devices_of(gpu)
            set_device(device)
            layers = filtered(
                read_net(model), phase="test", level=level or None, stages=stage.split(",") if stage else ()
            )
            net = caffe_net(layers, "test").to(device)
            for name in weights.split(","):
                net.load_weights(read_weights(name))
            LOGGER.info("Running for %d iterations.", iterations)
            score(net, output_weights(net), iterations)
    finally:
        LOGGER.removeHandler(handler)
