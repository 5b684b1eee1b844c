"""The channel by which tilewise says what it did: Python's ``logging``, and stderr where a program has none.

A library must be silenceable, and a program that logs wants every line in its own log. So each line goes to the logger
``tilewise``. A program that has set up logging decides by its handlers and levels, as for any library. But a script
without logging would see nothing: Python shows only warnings then. There the line is written to stderr, since a call
of minutes that says nothing looks as if it had done nothing. No handler is added to any logger.
"""

from __future__ import annotations

import logging
import sys
import warnings

__all__ = ["LOGGER", "NothingPlannedWarning", "say", "warn"]

LOGGER = logging.getLogger("tilewise")


class NothingPlannedWarning(UserWarning):
    """Nothing in a model could be planned, for the reason that it names. The model computes as it did.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as found:
    ...     warnings.simplefilter("always")
    ...     model = tilewise.optimize(torch.nn.ReLU(), torch.randn(2, 3))
    >>> found[0].category.__name__
    'NothingPlannedWarning'
    """


def say(text: str, *, shown: bool = True, level: int = logging.INFO) -> None:
    """Say ``text`` at ``level``: to the program's logging, or on stderr where it has none and it is to be ``shown``.

    ``logging.getLogger("tilewise").setLevel(logging.WARNING)`` leaves out what is no warning, in both places.
    """
    if LOGGER.hasHandlers():
        LOGGER.log(level, "%s", text)
    elif shown and not LOGGER.disabled and level >= LOGGER.level and level > LOGGER.manager.disable:
        sys.stderr.write(f"tilewise: {text}\n")


def warn(text: str, category: type[Warning]) -> None:
    """Give a warning that points at the line of the program that called tilewise."""
    warnings.warn(f"tilewise: {text}", category, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The ``stacklevel``, seen from :func:`warn`, of the first frame that is not of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_own(module: str) -> bool:
    """Whether a module of this name is of this package."""
    return module == "tilewise" or module.startswith("tilewise.")
