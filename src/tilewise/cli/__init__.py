"""The ``tilewise`` command: plans, times and explains networks and single layers."""

from __future__ import annotations

import click

from tilewise.cli.program import Program
from tilewise.version import VERSION

__all__ = ["cli", "main"]


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="tilewise")
def cli() -> None:
    """Plan the layers of networks the way FFTW plans Fourier transforms.

    For every layer and pass, tilewise finds the fastest exact way to compute it on a device within a memory limit, and
    remembers it: convolutions, matrix products and linear layers, recurrent layers, pooling, and local response
    normalization. NET is a built-in network, torchvision:NAME, timm:NAME or module.path:factory; LAYER is text in
    oneDNN benchdnn's notation, such as mb256ic64ih27oc192oh27kh5ph2, or names its kind, as lstm:t512n16i768h768 does.

    In Python, tilewise.optimize plans a model, tilewise.shared trains one on several devices at once, and
    tilewise.distributed splits images over ranks.
    """


def main() -> None:
    """Run the command line and exit: 0 done, 1 some layer has no plan, 2 bad input, 130 interrupted."""
    cli.main(prog_name="tilewise")
