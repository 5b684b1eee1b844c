"""A process that compiles Triton kernels into Triton's cache, until its standard input ends.

It reads jobs (see ``jobs.py``), one line of JSON each, and answers each with a line: ``{"hash": ...}`` of the entry,
``{"failed": reason}`` where the kernel does not compile, ``{"refused": reason}`` for what is no job. Before all others
comes ``{"ready": process id}``. Run as ``python -m tilewise.kernels.building.worker``; ``workers.py`` does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

MOST_TEXT = 2000
"""Most characters of a reason."""


def main() -> None:
    """Answer jobs until standard input ends, even while one is being compiled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides what it means
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what compilers print is no answer
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()

    from tilewise.kernels.building.jobs import compile_job, read_compiler

    read_compiler()
    _say(answers, {"ready": os.getpid()})
    while True:
        _say(answers, _answer(jobs.get(), compile_job))


def _read(jobs: queue.SimpleQueue[bytes]) -> None:
    """Queue lines of standard input, and end the process with it: a parent that was killed closes it too."""
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)


def _answer(line: bytes, work: Callable[[Any], str]) -> dict[str, str]:
    """Do one job and return the answer: the hash of what was compiled, or why it was not."""
    from tilewise.kernels.building.jobs import UnknownJob

    try:
        return {"hash": work(json.loads(line))}
    except (UnknownJob, json.JSONDecodeError) as error:
        return {"refused": str(error)[:MOST_TEXT]}
    except Exception as error:  # Triton raises errors of many kinds when a kernel does not compile
        return {"failed": f"{type(error).__name__}: {error}"[:MOST_TEXT]}


def _say(answers: Any, answer: dict[str, Any]) -> None:
    """Write one answer as a line of JSON, and end the process where nobody reads it."""
    try:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    except OSError:  # nobody reads any more
        os._exit(0)


if __name__ == "__main__":
    main()
