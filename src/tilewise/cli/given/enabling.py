"""``tilewise.enable()`` in a process that ``tilewise run`` started, before its program."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from typing import Any

__all__ = ["enable"]

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def enable(options: dict[str, Any], tell: bool) -> None:
    """Enable planning; with ``tell`` what was planned is printed to stderr when the process ends.

    Ends the process with one line on stderr where an option or a variable makes no sense.
    """
    try:
        from tilewise.nn.script.session import enable

        session = enable(**options)
    except ValueError as error:
        _end(f"tilewise: {' '.join(str(error).split())}\n", BAD_INPUT)
    except KeyboardInterrupt:
        _end("tilewise: interrupted\n", INTERRUPTED)
    except BaseException:
        _end(traceback.format_exc(), FAILED)
    if tell:
        atexit.register(_tell, os.getpid(), session)


def _end(text: str, status: int) -> None:
    """At once: nothing of the program has begun, and what imported this would go on."""
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(status)


def _tell(process: int, session: object) -> None:
    """Write the session's report at the end of the program, but not in a process forked from it."""
    if os.getpid() == process:  # not in a forked child
        sys.stderr.write(f"{session}\n")
