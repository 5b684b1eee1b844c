"""Log lines as Caffe writes them, by Python's ``logging``: programs that plot a training read these lines."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

__all__ = ["LOGGER", "GlogFormatter", "number", "show_log"]

LOGGER = logging.getLogger("tilewise.caffe")
"""Where training tells what it does. It says nothing until a handler is added or :func:`show_log` is called."""


class GlogFormatter(logging.Formatter):
    """Lines with the head that Google's logging library gives them, as in Caffe's logs.

    ``I0604 10:00:00.123456  4711 solver.py:88] Iteration 0, lr = 0.01``: severity with month and day, time, process,
    and the place in the code.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line's end."""
        day = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micro = int(record.created % 1 * 1e6)
        place = f"{record.filename}:{record.lineno}"
        return f"{record.levelname[0]}{day}.{micro:06d} {record.process or 0:5d} {place}] {record.getMessage()}"


def show_log(stream: TextIO | None = None) -> logging.Handler:
    """Write what training tells to ``stream``, stderr by default. Returns the handler, for ``LOGGER.removeHandler``."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(GlogFormatter())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    return handler


def number(value: float) -> str:
    """A number as a C++ stream writes it: six digits."""
    return f"{value:g}"
