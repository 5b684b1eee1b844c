"""``tilewise caffe export``: a network in plain torch, and its weights back as a caffemodel."""

from __future__ import annotations

import click

from tilewise.cli.caffe.flags import FlagsCommand, caffe_errors, option, state_options
from tilewise.cli.program import BadInput

__all__ = ["command"]


EXAMPLES = (
    ("tilewise caffe export -model a.prototxt -weights a.caffemodel -output a", "Write a.py and a.pth."),
    ("tilewise caffe export -model a.prototxt -state a.pth -output a.h5", "The way back."),
)


@click.command("export", cls=FlagsCommand, examples=EXAMPLES)
@option("model", required=True, help="The net's prototxt file.")
@option("weights", help="Its weights, files with commas between them: written for torch.")
@option("state", help="A state_dict that torch.save wrote: written for Caffe.")
@option("phase", default="test", help="The net's phase, test or train.")
@option("output", required=True, help="With -weights the path without its ending, with -state a .caffemodel or .h5.")
@state_options
def command(model: str, weights: str, state: str, phase: str, output: str, level: int, stage: str) -> None:
    """Write a net in plain torch: OUTPUT.py, a module that needs torch alone, and OUTPUT.pth, its state_dict.

    With -state the other way: the weights of a state_dict, of that module or of a net that caffe.load made, as Caffe's
    file OUTPUT.
    """
    if bool(weights) == bool(state):
        raise BadInput("-weights and -state: one of them would do, -weights for torch's files, -state for Caffe's")
    with caffe_errors():
        from tilewise.frontends.caffe.files import filtered, read_net, read_weights, write_weights
        from tilewise.frontends.caffe.training.solver import caffe_net

        layers = filtered(read_net(model), phase, level or None, stage.split(",") if stage else ())
        net = caffe_net(layers, "train" if phase == "train" else "test")
        if state:
            from tilewise.frontends.caffe.export import load_torch_state, read_torch_state

            click.echo(f"{state}: {load_torch_state(net, read_torch_state(state))}", err=True)
            write_weights(output, net.weights(), layers)
            click.echo(f"wrote {output}", err=True)
            return
        from tilewise.frontends.caffe.export import export

        for name in weights.split(","):
            click.echo(f"{name}: {net.load_weights(read_weights(name))}", err=True)
        for path in export(net, output):
            click.echo(f"wrote {path}", err=True)
