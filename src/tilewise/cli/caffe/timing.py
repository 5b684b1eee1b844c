"""``tilewise caffe time``: how long a net's layers take."""

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
    ("tilewise caffe time -model net.prototxt", "Each layer, forward and backward."),
    ("tilewise caffe time -model net.prototxt -iterations 10 -gpu 0", "Ten times, on a GPU."),
)


@click.command("time", cls=FlagsCommand, examples=EXAMPLES)
@option("model", required=True, help="The net's prototxt file.")
@device_options
@state_options
@option(
    "phase", kind=click.Choice(["", "TRAIN", "TEST"], case_sensitive=False), help="TRAIN or TEST.  [default: TRAIN]"
)
@option("iterations", default=50, kind=int, help="How many times it runs.")
def command(model: str, gpu: str, level: int, stage: str, phase: str, iterations: int) -> None:
    """Run a net forward and backward, and print the mean time of each layer."""
    from tilewise.frontends.caffe.files import filtered, read_net
    from tilewise.frontends.caffe.training.log import LOGGER, show_log
    from tilewise.frontends.caffe.training.solver import caffe_net
    from tilewise.frontends.caffe.training.timing import time_net

    if iterations < 1:
        raise BadInput(f"-iterations={iterations}: 1 or more would do")
    handler = show_log()
    try:
        with caffe_errors():
            (device, *_) = devices_of(gpu)
            set_device(device)
            named = phase.lower() or "train"
            layers = filtered(
                read_net(model), phase=named, level=level or None, stages=stage.split(",") if stage else ()
            )
            time_net(caffe_net(layers, named).to(device), device, iterations)
    finally:
        LOGGER.removeHandler(handler)
