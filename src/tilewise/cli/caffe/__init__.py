"""``tilewise caffe``: Caffe's commands, with Caffe's flags."""

from __future__ import annotations

import importlib

import click

from tilewise.cli.helped import HelpedGroup

__all__ = ["command"]

COMMANDS = {
    "train": "train",
    "test": "testing",
    "time": "timing",
    "export": "export",
    "device_query": "device_query",
    "convert-imageset": "convert_imageset",
    "compute-mean": "compute_mean",
}
"""Each is ``command`` in the module of this name, in the order ``--help`` lists them."""
OTHER_NAMES = {
    "convert_imageset": "convert-imageset",
    "compute_image_mean": "compute-mean",
    "compute_mean": "compute-mean",
    "device-query": "device_query",
}
"""What scripts call them that know Caffe's own programs."""


class Commands(HelpedGroup):
    """A group that imports a command's module only when asked for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; ``None`` where there is none."""
        name = OTHER_NAMES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"tilewise.cli.caffe.{COMMANDS[name]}").command
        return found


@click.group("caffe", cls=Commands, short_help="Train, test and time Caffe's networks, and make their data.")
def command() -> None:
    """Caffe's commands: train, test and time its networks, and make its data.

    Flags are Caffe's: -solver FILE, --solver FILE and --solver=FILE are the same. Lines are written to stderr as Caffe
    writes them.
    """
