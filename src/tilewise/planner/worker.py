"""A process that plans what it is asked on one device, into the wisdom that it shares, until its standard input ends.

It reads lines of JSON: first what to be, ``{"device": ..., "wisdom": path, "threads": n}``, answered by ``{"ready":
process id, "environment": key, "identity": ...}``, then jobs (see ``messages.py``). Each is answered by ``{"done":
seconds}``, or by ``{"failed": reason}``, after which the process ends: what failed may have been its device. Between
them come ``{"at": problem}``, as parts of the problem are met. ``workers.py`` runs it, as
``python -m tilewise.planner.worker PARENT``.
"""

from __future__ import annotations

import _thread
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.planner import Planner

__all__ = ["main"]

LOOK_S = 1.0
"""Seconds between looks whether the parent still exists: a fork of it may hold the pipe open."""
ENDING_S = 3.0
"""Seconds to keep what was measured, once the parent is gone."""
MOST_TEXT = 2000


class _Link:
    """The pipes to the parent: lines in, answers out, and the end of both."""

    def __init__(self, parent: int) -> None:
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.ending = False
        self.status = 0
        self._parent = parent
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what libraries print is no answer
        signal.signal(signal.SIGINT, self._interrupted)  # a terminal sends it to all; the parent decides
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, answer: dict[str, Any]) -> None:
        """Write one answer; end the process where nobody reads any more."""
        try:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
        except OSError:
            raise KeyboardInterrupt from None

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Ignore Ctrl-C, unless this process is ending."""
        if self.ending:
            raise KeyboardInterrupt

    def _read(self) -> None:
        """Collect lines until standard input ends or the parent is gone; then end this process."""
        pending = b""
        while os.getppid() == self._parent:
            if not select.select([0], [], [], LOOK_S)[0]:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self.lines.put(line)
        self.ending = True
        _thread.interrupt_main()  # what was measured is kept on the way out, as after Ctrl-C
        self.lines.put(None)  # after that: whoever waits for a line is interrupted before it leaves
        time.sleep(ENDING_S)
        os._exit(1)


def main() -> None:
    """Serve until standard input ends or the parent is gone; what was measured by then is kept."""
    link: _Link | None = None
    try:
        link = _Link(int(sys.argv[1]))
        first = link.lines.get()
        planner = None if first is None else _begin(link, json.loads(first))
        while not link.status and planner is not None and (line := link.lines.get()) is not None:
            _answer(link, planner, line)
    except KeyboardInterrupt:
        pass
    sys.stderr.flush()
    # Libraries take seconds to let go of a device, which the system does at once.
    os._exit(0 if link is None else link.status)


def _begin(link: _Link, settings: dict[str, Any]) -> Planner:
    """Load what planning needs, start the device, and answer with the environment of measurements made here."""
    import torch

    from tilewise.kernels import compilers
    from tilewise.machine.device import environment, torch_device
    from tilewise.planner.options import Options
    from tilewise.planner.planner import Planner
    from tilewise.planner.processes.places import Place, identity
    from tilewise.planner.search.known import Store
    from tilewise.planner.search.search import Search
    from tilewise.problems.kinds import kinds
    from tilewise.wisdom import Wisdom

    name = settings["device"]
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    device = torch_device(name)
    planner = Planner(Wisdom(Path(settings["wisdom"])))
    planner.measurements.on_load = lambda problem: link.say({"at": problem.key})
    # Every solver is asked, and torch's own is run: libraries are loaded before anything is to be planned.
    for kind in kinds().values():
        small = kind.small_example(name)
        if small is not None:
            Search(small, Options(rigor="estimate"), planner.profile, Store(lambda problem: {})).survey()
    if device.type == "cuda":
        compilers.load()
    place = Place(name, device.index)
    link.say({"ready": os.getpid(), "environment": environment(name).key, "identity": identity(place)})
    return planner


def _answer(link: _Link, planner: Planner, line: bytes) -> None:
    """Do the job in ``line`` and answer. Where it fails, the process ends after it."""
    from tilewise.planner.planner import do_job
    from tilewise.planner.processes.messages import Job

    start = time.perf_counter()
    try:
        do_job(planner, Job.from_json(json.loads(line)))  # the parent tells from wisdom why there is no plan
    except Exception as error:  # whatever a device or a library does: the parent gives the problem to another
        link.status = 1  # before the parent hears of it, and ends this process
        link.say({"failed": f"{type(error).__name__}: {error}"[:MOST_TEXT]})
        return
    link.say({"done": time.perf_counter() - start})


if __name__ == "__main__":
    main()
