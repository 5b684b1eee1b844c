"""Planning on several devices at once (Oyama et al. 2018, III-D): a process for each, fed one job at a time.

This process plans on its own device meanwhile. Workers write into the same wisdom, from which the plans are then read.
A worker that is lost, fails or is silent for too long is done without, and its problem goes to another, or to this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tilewise.device import environment
from tilewise.planner.board import Board
from tilewise.planner.messages import Job
from tilewise.planner.places import Devices, Place, environment_of, find_places, identity
from tilewise.problem import ConvProblem

__all__ = ["Workers", "WorkersWarning"]

PATIENCE_S = 300.0
"""A worker that says nothing for so long is given up: starting, or between two parts of a problem."""
IDLE_S = 10.0
"""Workers hold memory of their devices, so they end when there was nothing to plan for so long."""
ENDING_S = 5.0
"""For a worker to keep what it measured before it is killed."""
GOING_S = 1.0
"""For a worker that failed to be gone by itself, so that its exit status is its own."""
LOOK_S = 0.2
LONGEST_LINE = 1 << 20


class WorkersWarning(UserWarning):
    """A device was planned without, or a problem was planned elsewhere than was begun; the message says why."""


class Workers:
    """The processes that plan beside this one, started when first needed, ended when idle for ten seconds.

    ``devices`` as in :func:`find_places`, which raises ``ValueError``; ``path`` is the wisdom that all share.
    """

    def __init__(self, devices: Devices, path: Path) -> None:
        self.places = find_places(devices)
        self._path = path
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.RLock()
        self._closing: threading.Timer | None = None
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """The name, as problems have it, of the devices."""
        return self.places[0].name

    def start(self) -> int:
        """Start all and wait until they can plan; how many can, this process among them."""
        board = Board((), len(self.places))
        with self._used():
            threads = [self._helper(number, board) for number in self.others]
            for thread in threads:
                thread.join()
            self._tell(board.heard(helping=True)[1])
            return len(self._workers) + self.places[0].own

    def plan(self, jobs: Iterable[Job], own: Callable[[Job], None], told: Callable[[ConvProblem], None]) -> None:
        """Have ``jobs`` done by all, some of them by ``own`` where this process's device is one of them.

        ``told`` hears of each problem that is finished, in the calling thread. What could not be done is left to the
        caller, and a :class:`WorkersWarning` says what was lost. Whatever is raised here ends the workers, which keep
        what they measured.
        """
        board = Board(jobs, len(self.places))
        helping = self.places[0].own
        with self._used():
            threads = [self._helper(number, board) for number in self.others[: board.width]]
            try:
                while True:
                    news, faults = board.heard(helping=helping)
                    self._tell(faults)
                    for problem in news:
                        told(problem)
                    job = board.take(block=False) if helping else None
                    if job is not None:
                        own(job)
                        board.finish(job)
                    elif not (news or faults) and (board.over or not (helping or board.helpers)):
                        break
            except BaseException:
                _end(board, threads)
                self.close()
                raise
            _end(board, threads)

    def close(self) -> None:
        """End all workers now, which keep what they measured."""
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
            if os.getpid() != self._owner:
                return  # of a fork: they are the parent's
            for worker in workers:
                worker.ask_to_end()
            deadline = time.monotonic() + ENDING_S
            for worker in workers:
                worker.end(max(0.0, deadline - time.monotonic()))

    @property
    def others(self) -> list[int]:
        """Numbers of the places that need a worker."""
        return [i for i, place in enumerate(self.places) if not place.own]

    @contextlib.contextmanager
    def _used(self) -> Any:
        """Workers are not idle meanwhile."""
        with self._lock:
            if os.getpid() != self._owner:
                self._workers, self._owner = {}, os.getpid()
            if self._closing is not None:
                self._closing.cancel()
            try:
                yield
            finally:
                self._closing = threading.Timer(IDLE_S, self.close)
                self._closing.daemon = True
                self._closing.start()

    def _helper(self, number: int, board: Board) -> threading.Thread:
        board.join()
        thread = threading.Thread(target=self._serve, args=(number, board), daemon=True)
        thread.start()
        return thread

    def _serve(self, number: int, board: Board) -> None:
        """Hand jobs to a worker until there are none."""
        job, worker, place = None, self._workers.get(number), self.places[number]
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._workers[number] = _Worker(place, len(self.places), self._path)
            worker.wait_ready(board)
            while (job := board.take()) is not None:
                worker.do(job, board)
                board.finish(job)
        except _Stopped:
            pass
        except (Lost, OSError) as error:
            self._workers.pop(number, None)
            status = None if worker is None else worker.end(GOING_S)
            fault = f"the worker on {place.title} was lost ({error}; exit status {status})"
            if job is None:
                board.complain(f"{fault}: planned without it")
            else:
                board.give_back(job, f"{fault} while it planned {job.problem.key}, which is planned elsewhere")
        finally:
            board.leave()

    def _tell(self, faults: Iterable[str]) -> None:
        for fault in faults:
            warnings.warn(fault, WorkersWarning, stacklevel=5)


def _end(board: Board, threads: Iterable[threading.Thread]) -> None:
    board.stop()
    for thread in threads:
        thread.join()


class Lost(Exception):
    """A worker that is of no more use."""


class _Stopped(Exception):
    """The work was over, or given up, while a worker was waited for."""


class _Worker:
    """One process and the pipes to it, used by one thread at a time."""

    def __init__(self, place: Place, processes: int, path: Path) -> None:
        self._place, self._ready, self._read = place, False, b""
        self._expected = {"environment": environment(place.name).key, "identity": identity(place)}
        own = environment_of(place, processes)
        places = (os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
        self._part_of_gpu = own.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewise.planner.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **own},
        )
        # On a CPU the number of threads is part of what a measurement depends on.
        threads = torch.get_num_threads() if place.index is None else None
        self._tell({"device": place.name, "wisdom": str(path), "threads": threads})

    def wait_ready(self, board: Board) -> None:
        """Raises :class:`Lost` where it does not start, or would measure something else."""
        if self._ready:
            return
        found = self._line(board)
        names = ["environment"] if self._part_of_gpu else ["environment", "identity"]
        for name in names:
            if found.get(name) != self._expected[name]:
                raise Lost(f"its {name} is {found.get(name)!r} and not {self._expected[name]!r}")
        self._ready = True

    def do(self, job: Job, board: Board) -> None:
        """Raises :class:`Lost` where it fails, ends, or is silent for too long."""
        self._tell(job.to_json())
        while True:
            found = self._line(board)
            if "failed" in found:
                raise Lost(str(found["failed"]))
            if "done" in found:
                return

    def _tell(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        rest = memoryview((json.dumps(what) + "\n").encode())
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer then tells
            while rest:
                rest = rest[self.process.stdin.write(rest) :]

    def _line(self, board: Board) -> dict[str, Any]:
        assert self.process.stdout is not None
        silent_since = time.monotonic()
        while b"\n" not in self._read:
            if board.stopped:
                raise _Stopped
            if time.monotonic() - silent_since > PATIENCE_S:
                raise Lost(f"it has said nothing for {PATIENCE_S:g} s")
            if select.select([self.process.stdout], [], [], LOOK_S)[0]:
                more = self.process.stdout.read(1 << 16)
                if not more:
                    raise Lost("it ended")
                self._read += more
            if len(self._read) > LONGEST_LINE:
                raise Lost(f"it answered more than {LONGEST_LINE} bytes")
        line, _, self._read = self._read.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Lost(f"it answered {line[:200]!r}")
        return found

    def ask_to_end(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, patience_s: float) -> int:
        """Kill it where it still runs after ``patience_s``; its exit status, less than 0 a signal's number."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        status = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
