"""One worker process and the pipes to it: what is written to it, and what it answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["Worker", "environment"]

NICE = 10
"""The priority of workers beside a program that goes on: any other process comes first."""
LONGEST_ANSWER = 2**16
"""Most bytes of an answer."""


class Worker:
    """One worker process and the pipes to it, used by one thread at a time."""

    def __init__(self) -> None:
        self.ready = False
        self._read = b""
        # Unbuffered: a forked child must have nothing to write when it closes its copies.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewise.kernels.building.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment(),
        )

    def step_back(self) -> None:
        """Lower the priority of the process."""
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, NICE)

    def ask(self, line: str) -> dict[str, str]:
        """The answer to a job.

        Raises ``OSError``, ``EOFError`` or ``ValueError`` where the process has ended or answers nonsense.
        """
        if not self.ready:
            self.ready = "ready" in self._line()
        rest = memoryview(f"{line}\n".encode())
        assert self.process.stdin is not None
        while rest:
            rest = rest[self.process.stdin.write(rest) :]
        answer = self._line()
        if len(answer) != 1 or not all(isinstance(text, str) for text in answer.values()):
            raise ValueError(f"it answered {str(answer)[:200]}")
        return answer

    def _line(self) -> dict[str, Any]:
        """The next answer. Raises ``EOFError`` where the process has ended, ``ValueError`` for what is no answer."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            more = self.process.stdout.read(LONGEST_ANSWER)
            if not more:
                raise EOFError
            self._read += more
            if len(self._read) > LONGEST_ANSWER:
                raise ValueError(f"it answered more than {LONGEST_ANSWER} bytes")
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() <= {"ready", "hash", "failed", "refused"}:
            raise ValueError(f"it answered {line[:200]!r}")
        return answer

    def end(self, patience_s: float = 0.0) -> int:
        """Kill the process unless it ends within ``patience_s`` seconds.

        Returns its exit status, negative for a signal.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        status = self.process.wait()
        self._close()
        return status

    def forget(self) -> None:
        """Close this process's copies of the pipes without touching the worker."""
        self.process.returncode = 0
        self._close()

    def _close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def environment() -> dict[str, str]:
    """A worker's environment: this process's, with its Triton settings and module path, and without a GPU."""
    from tilewise.kernels.triton.own_cache import settings  # needs Triton, which planning on a CPU does without

    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (os.path.abspath(place) for place in sys.path if isinstance(place, str))
    variables |= {"PYTHONPATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": "", "TILEWISE_ENABLE": "0"}
    return variables | settings()
