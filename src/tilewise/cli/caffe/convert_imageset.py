"""``tilewise caffe convert-imageset``: a list of images becomes an LMDB database."""

from __future__ import annotations

import click

from tilewise.cli.caffe.flags import FlagsCommand, caffe_errors, flag, option
from tilewise.cli.program import BadInput

__all__ = ["check_backend", "command"]


EXAMPLES = (
    (
        "tilewise caffe convert-imageset images/ train.txt train_lmdb -shuffle",
        "A database of the images that a list names.",
    ),
    ("tilewise caffe convert-imageset images/ test.txt test_lmdb -gray", "Another one, of gray images."),
)


@click.command("convert-imageset", cls=FlagsCommand, examples=EXAMPLES)
@flag("gray", help="Read images as gray ones.")
@flag("shuffle", help="Shuffle the list.")
@option("backend", default="lmdb", help="The kind of database; only lmdb is written.")
@option("resize_width", default=0, kind=int, help="The width that images are resized to.")
@option("resize_height", default=0, kind=int, help="The height that images are resized to.")
@flag("check_size", help="Check that all images have the same size.")
@flag("encoded", help="Write images as files, not as pixels.")
@option("encode_type", help="The kind of these files, as png or jpg.  [default: what each file is]")
@click.argument("rootfolder")
@click.argument("listfile")
@click.argument("db_name")
def command(
    gray: bool,
    shuffle: bool,
    backend: str,
    resize_width: int,
    resize_height: int,
    check_size: bool,
    encoded: bool,
    encode_type: str,
    rootfolder: str,
    listfile: str,
    db_name: str,
) -> None:
    """Write the images that LISTFILE names, a name and a label in each line, to the new database DB_NAME.

    ROOTFOLDER is put before each name, so it ends with a slash.
    """
    import random

    from tilewise.frontends.caffe.data.image_list import read_list
    from tilewise.frontends.caffe.data.writing import Conversion, convert
    from tilewise.frontends.caffe.training.log import LOGGER, show_log

    check_backend(backend)
    handler = show_log()
    try:
        with caffe_errors():
            lines = read_list(listfile, "LISTFILE")
            if shuffle:
                LOGGER.info("Shuffling data")
                random.SystemRandom().shuffle(lines)
            LOGGER.info("A total of %d images.", len(lines))
            how = Conversion(gray, resize_height, resize_width, encoded or bool(encode_type), encode_type, check_size)
            count = convert(rootfolder, lines, db_name, how, LOGGER.warning, _told)
            LOGGER.info("Processed %d files.", count)
    finally:
        LOGGER.removeHandler(handler)


def _told(count: int) -> None:
    """Say how many files are written, now and then."""
    from tilewise.frontends.caffe.training.log import LOGGER

    if not count % 1000:
        LOGGER.info("Processed %d files.", count)


def check_backend(backend: str) -> None:
    """Raise ``BadInput`` for another kind of database than LMDB."""
    if backend.lower() != "lmdb":
        raise BadInput(f"-backend={backend!r}: lmdb would do; LevelDB is neither read nor written")
