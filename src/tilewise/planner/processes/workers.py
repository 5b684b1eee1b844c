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

from tilewise.machine.device import environment
from tilewise.planner.processes.job_queue import JobQueue
from tilewise.planner.processes.messages import Job
from tilewise.planner.processes.places import Devices, Place, environment_of, find_places, identity
from tilewise.problems.base import Problem

__all__ = ["Workers", "WorkersWarning"]

PATIENCE_S = 300.0
"""Seconds of silence after which a worker is given up, while it starts or between two parts of a problem."""
IDLE_S = 10.0
"""Seconds without work after which workers end, since they hold memory of their devices."""
ENDING_S = 5.0
"""Seconds for a worker to keep what it measured before it is killed."""
GOING_S = 1.0
"""Seconds for a failed worker to end by itself, so that its exit status is its own."""
LOOK_S = 0.2
LONGEST_LINE = 1 << 20


class WorkersWarning(UserWarning):
    """A device could not be used, or a problem was planned on another device than it was begun on.

    The message says why.

    >>> import warnings
    >>> from tilewise.planner import WorkersWarning
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", WorkersWarning)  # every device must help
    ...     planner = tilewise.Planner()
    """


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
        """Start all workers and wait until they can plan. Returns how many processes can, this one included."""
        queue = JobQueue((), len(self.places))
        with self._used():
            threads = [self._start_helper(number, queue) for number in self.others]
            for thread in threads:
                thread.join()
            self._tell(queue.wait_for_news(helping=True)[1])
            return len(self._workers) + self.places[0].own

    def plan(self, jobs: Iterable[Job], own: Callable[[Job], None], told: Callable[[Problem], None]) -> None:
        """Have ``jobs`` done by all processes. ``own`` does one here, where this process's device takes part.

        ``told`` hears of each problem that is finished, in the calling thread. What could not be done is left to the
        caller, and a :class:`WorkersWarning` says what was lost. Whatever is raised here ends the workers, which keep
        what they measured.
        """
        queue = JobQueue(jobs, len(self.places))
        helping = self.places[0].own
        with self._used():
            threads = [self._start_helper(number, queue) for number in self.others[: queue.at_once]]
            try:
                while True:
                    news, faults = queue.wait_for_news(helping=helping)
                    self._tell(faults)
                    for problem in news:
                        told(problem)
                    job = queue.take(block=False) if helping else None
                    if job is not None:
                        own(job)
                        queue.finish(job)
                    elif not (news or faults) and (queue.over or not (helping or queue.helpers)):
                        break
            except BaseException:
                _end(queue, threads)
                self.close()
                raise
            _end(queue, threads)

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
        """Keep the workers from ending as idle meanwhile."""
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

    def _start_helper(self, number: int, queue: JobQueue) -> threading.Thread:
        """Start a thread that serves the worker of place ``number``, and return it."""
        queue.add_helper()
        thread = threading.Thread(target=self._serve, args=(number, queue), daemon=True)
        thread.start()
        return thread

    def _serve(self, number: int, queue: JobQueue) -> None:
        """Hand jobs to the worker of place ``number`` until there are none. It is started first if need be."""
        job, worker, place = None, self._workers.get(number), self.places[number]
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._workers[number] = _Worker(place, len(self.places), self._path)
            worker.wait_ready(queue)
            while (job := queue.take()) is not None:
                worker.do(job, queue)
                queue.finish(job)
        except _Stopped:
            pass
        except (Lost, OSError) as error:
            self._workers.pop(number, None)
            status = None if worker is None else worker.end(GOING_S)
            fault = f"the worker on {place.title} was lost ({error}; exit status {status})"
            if job is None:
                queue.note_fault(f"{fault}: planned without it")
            else:
                queue.give_back(job, f"{fault} while it planned {job.problem.key}, which is planned elsewhere")
        finally:
            queue.remove_helper()

    def _tell(self, faults: Iterable[str]) -> None:
        """Warn of each fault, with a :class:`WorkersWarning`."""
        for fault in faults:
            warnings.warn(fault, WorkersWarning, stacklevel=5)


def _end(queue: JobQueue, threads: Iterable[threading.Thread]) -> None:
    """Let no further job begin, and wait for the threads to end."""
    queue.stop()
    for thread in threads:
        thread.join()


class Lost(Exception):
    """A worker failed, ended or fell silent, and is not used any more."""


class _Stopped(Exception):
    """The work was over, or given up, while a worker was waited for."""


class _Worker:
    """One process and the pipes to it, used by one thread at a time."""

    def __init__(self, place: Place, processes: int, path: Path) -> None:
        self._place, self._ready, self._read = place, False, b""
        self._expected = {"environment": environment(place.name).key, "identity": identity(place)}
        variables = environment_of(place, processes)
        places = (os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
        self._part_of_gpu = variables.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewise.planner.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables},
        )
        # On a CPU the number of threads is part of what a measurement depends on.
        threads = torch.get_num_threads() if place.index is None else None
        self._tell({"device": place.name, "wisdom": str(path), "threads": threads})

    def wait_ready(self, queue: JobQueue) -> None:
        """Wait until the worker can plan.

        Raises :class:`Lost` where it does not start, or runs in another environment or on another device.
        """
        if self._ready:
            return
        answer = self._line(queue)
        names = ["environment"] if self._part_of_gpu else ["environment", "identity"]
        for name in names:
            if answer.get(name) != self._expected[name]:
                raise Lost(f"its {name} is {answer.get(name)!r} and not {self._expected[name]!r}")
        self._ready = True

    def do(self, job: Job, queue: JobQueue) -> None:
        """Have the worker do ``job``. Raises :class:`Lost` where it fails, ends, or is silent for too long."""
        self._tell(job.to_json())
        while True:
            answer = self._line(queue)
            if "failed" in answer:
                raise Lost(str(answer["failed"]))
            if "done" in answer:
                return

    def _tell(self, message: dict[str, Any]) -> None:
        """Write one line of JSON to the worker."""
        assert self.process.stdin is not None
        rest = memoryview((json.dumps(message) + "\n").encode())
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer then tells
            while rest:
                rest = rest[self.process.stdin.write(rest) :]

    def _line(self, queue: JobQueue) -> dict[str, Any]:
        """Read one line of JSON from the worker. Raises :class:`Lost`, or :class:`_Stopped` when work is stopped."""
        assert self.process.stdout is not None
        silent_since = time.monotonic()
        while b"\n" not in self._read:
            if queue.stopped:
                raise _Stopped
            if time.monotonic() - silent_since > PATIENCE_S:
                raise Lost(f"it has said nothing for {PATIENCE_S:g} s")
            if select.select([self.process.stdout], [], [], LOOK_S)[0]:
                data = self.process.stdout.read(1 << 16)
                if not data:
                    raise Lost("it ended")
                self._read += data
            if len(self._read) > LONGEST_LINE:
                raise Lost(f"it answered more than {LONGEST_LINE} bytes")
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Lost(f"it answered {line[:200]!r}")
        return answer

    def ask_to_end(self) -> None:
        """Close the worker's standard input, at which it ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, patience_s: float) -> int:
        """End the worker, and kill it after ``patience_s`` seconds.

        Returns its exit status; below 0 it is the number of a signal.
        """
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        status = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
