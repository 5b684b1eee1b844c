"""``tilewise caffe device_query``: what GPUs are here."""

from __future__ import annotations

import click

from tilewise.cli.caffe.flags import FlagsCommand, device_options, devices_of

__all__ = ["command"]


EXAMPLES = (
    ("tilewise caffe device_query", "All GPUs."),
    ("tilewise caffe device_query -gpu 0", "One of them."),
)


@click.command("device_query", cls=FlagsCommand, examples=EXAMPLES)
@device_options
def command(gpu: str) -> None:
    """Print the properties of GPUs, of all without -gpu."""
    import torch

    from tilewise.frontends.caffe.training.log import LOGGER, show_log

    handler = show_log()
    try:
        LOGGER.info("Querying GPUs %s", gpu or "all")
        if not torch.cuda.device_count():
            devices_of(gpu) if gpu else LOGGER.info("There is no GPU here.")
            return
        for device in devices_of(gpu or "all"):
            found = torch.cuda.get_device_properties(device)
            lines = {
                "Device id": device.index,
                "Major revision number": found.major,
                "Minor revision number": found.minor,
                "Name": found.name,
                "Total global memory": found.total_memory,
                "Number of multiprocessors": found.multi_processor_count,
            }
            for name, value in lines.items():
                LOGGER.info("%-32s%s", f"{name}:", value)
    finally:
        LOGGER.removeHandler(handler)
