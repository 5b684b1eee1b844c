"""Sources of batches: computed where they are asked for, or ahead in worker processes, or held by the caller."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.utils.data
from torch import Tensor

from tilewise.frontends.caffe.data.draws import MOST_SEED
from tilewise.frontends.caffe.errors import CaffeError

__all__ = ["Batches", "Held", "Place", "Source", "Stream", "default_workers"]

Place = dict[str, int]
"""A place in the data: ``{"seed": ..., "batch": ...}``, the seed and the number of the next batch."""
MOST_BATCH = 2**62


class Batches(Protocol):
    """All batches of a data layer by number, the same for the same seed in every process."""

    shapes: tuple[tuple[int, ...], ...]
    seed: int

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Batch ``number``, 0 for the first, as one float32 tensor on the CPU for each top."""

    def told(self, number: int) -> str:
        """Where batch ``number`` is from, for messages."""

    def release(self) -> None:
        """Close what a forked process may not inherit; it is opened again when it is next needed."""


class Source(Protocol):
    """Where a data layer's tops come from, batch after batch.

    ``shapes`` has the shape of each top. :meth:`next` gives the next batch, float32 tensors on the CPU, and raises
    :class:`~tilewise.frontends.caffe.errors.CaffeError` that names the file and the record for whatever is wrong.
    """

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each top."""

    def next(self) -> tuple[Tensor, ...]:
        """The next batch: one tensor for each top."""

    def place(self) -> Place:
        """Where in the data the next batch is, for :meth:`go_to`; empty where there is no such thing."""

    def go_to(self, place: Place) -> None:
        """Go on from a place that :meth:`place` gave, in this process or another. Raises ``CaffeError``."""

    def told(self) -> str:
        """Where the last batch was from, for messages; empty where nobody knows."""

    def close(self) -> None:
        """End worker processes. A later :meth:`next` starts them again."""


def default_workers() -> int:
    """How many processes make batches ahead where nobody says: half the cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, cores // 2))


class Stream:
    """A source of numbered batches, made ahead by ``workers`` processes, or here where that is 0.

    ``ahead`` batches are made ahead in all, at least one by each worker. Processes start at the first :meth:`next`.
    """

    def __init__(self, batches: Batches, workers: int = 0, ahead: int = 4) -> None:
        if workers < 0:
            raise CaffeError(f"workers={workers}: 0 or more would do")
        self.batches, self.workers, self.ahead = batches, workers, ahead
        self._number = 0
        self._coming: Iterator[Any] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each top."""
        return self.batches.shapes

    def next(self) -> tuple[Tensor, ...]:
        """The next batch. Raises ``CaffeError`` that names the file and the record that is at fault."""
        if not self.workers:
            found = self.batches.batch(self._number)
        else:
            if self._coming is None:
                self._coming = self._start()
            try:
                arrived = next(self._coming)
            except RuntimeError as error:  # torch's word for a worker that was killed
                self.close()
                raise CaffeError(f"a process that reads data ended: {error}; workers=0 reads without any") from error
            if isinstance(arrived, Failure):
                self.close()
                raise CaffeError(arrived.text)
            found = tuple(arrived)
        self._number += 1
        return found

    def place(self) -> Place:
        """Where the next batch is. What workers have made ahead is not behind it."""
        return {"seed": self.batches.seed, "batch": self._number}

    def go_to(self, place: Place) -> None:
        """Make the next batch the one at ``place``. Raises ``CaffeError`` for what is no place."""
        for name, most in (("seed", MOST_SEED), ("batch", MOST_BATCH)):
            value = place.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
                raise CaffeError(f"place in the data: {name} is {value!r}; a whole number below {most} would do")
        self.close()
        self.batches.seed, self._number = place["seed"], place["batch"]

    def told(self) -> str:
        """Where the last batch was from; empty before the first."""
        return self.batches.told(self._number - 1) if self._number else ""

    def close(self) -> None:
        """End the worker processes; the next :meth:`next` starts new ones at the same place."""
        self._coming = None

    def _start(self) -> Iterator[Any]:
        """Start the workers at the next batch."""
        self.batches.release()
        with warnings.catch_warnings():
            # torch advises against more processes than cores; whoever asks for them has a reason.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
                Numbered(self.batches),
                sampler=Upwards(self._number),
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=max(1, self.ahead // self.workers),
                worker_init_fn=leave_signals,
                # Else a base seed would be drawn from the generator that dropout and fillers draw from.
                generator=torch.Generator(device="cpu"),
            )
            return iter(loader)


class Failure:
    """What went wrong in a worker, in one line; torch would carry an exception with a traceback in its text."""

    def __init__(self, text: str) -> None:
        self.text = text


class Numbered(torch.utils.data.Dataset[Any]):
    """Batches as a data set of torch's, whose items are whole batches."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitem__(self, number: int) -> tuple[Tensor, ...] | Failure:
        try:
            return self.batches.batch(number)
        except CaffeError as error:
            return Failure(str(error))


class Upwards(torch.utils.data.Sampler[int]):
    """The numbers from ``start`` on, without end."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        number = self.start
        while True:
            yield number
            number += 1


def leave_signals(worker: int) -> None:
    """Leave Ctrl-C and hang-ups to the process that trains: it may go on, and it ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Held:
    """A source that gives what the caller put there: zeros at first, as Caffe's ``Input`` layer does."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self._tensors = tuple(torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each top, which :meth:`set` may change."""
        return tuple(tuple(tensor.shape) for tensor in self._tensors)

    def set(self, *tensors: Tensor) -> None:
        """Give these from now on, one for each top. Raises ``CaffeError`` for another number of them."""
        if len(tensors) != len(self._tensors):
            raise CaffeError(f"{len(tensors)} tensors were given to a layer of {len(self._tensors)} tops")
        self._tensors = tensors

    def next(self) -> tuple[Tensor, ...]:
        """What was set last."""
        return self._tensors

    def place(self) -> Place:
        """Nothing: what is held has no order."""
        return {}

    def go_to(self, place: Place) -> None:
        """Nothing to do."""

    def told(self) -> str:
        """Nothing: the caller knows."""
        return ""

    def close(self) -> None:
        """Nothing to end."""
