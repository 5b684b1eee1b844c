"""``tilewise caffe compute-mean``: the mean image of a database."""

from __future__ import annotations

import click

from tilewise.cli.caffe.convert_imageset import check_backend
from tilewise.cli.caffe.flags import FlagsCommand, caffe_errors, option

__all__ = ["command"]


EXAMPLES = (
    (
        "tilewise caffe compute-mean train_lmdb mean.binaryproto",
        "The mean image of a database, as transform_param wants it.",
    ),
    ("tilewise caffe compute-mean train_lmdb", "Print the mean of each channel alone."),
)


@click.command("compute-mean", cls=FlagsCommand, examples=EXAMPLES)
@option("backend", default="lmdb", help="The kind of database; only lmdb is read.")
@click.argument("input_db")
@click.argument("output_file", required=False)
def command(backend: str, input_db: str, output_file: str | None) -> None:
    """Compute the mean image of the database INPUT_DB, and write it to OUTPUT_FILE where that is given."""
    from tilewise.frontends.caffe.data.writing import mean_image
    from tilewise.frontends.caffe.files import write_mean
    from tilewise.frontends.caffe.training.log import LOGGER, number, show_log

    def told(count: int) -> None:
        if not count % 10000:
            LOGGER.info("Processed %d files.", count)

    check_backend(backend)
    handler = show_log()
    try:
        with caffe_errors():
            LOGGER.info("Starting iteration")
            mean = mean_image(input_db, told)
            if output_file is not None:
                LOGGER.info("Write to %s", output_file)
                write_mean(output_file, mean)
            LOGGER.info("Number of channels: %d", len(mean))
            for channel, values in enumerate(mean):
                LOGGER.info("mean_value channel [%d]: %s", channel, number(float(values.mean())))
    finally:
        LOGGER.removeHandler(handler)
