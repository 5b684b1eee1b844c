"""What checks keep for later checks of the same problem: operands, and what float64 makes of them.

Drawing operands and computing their references takes longer than a run of the plan that is checked. Plans of one
problem are all checked on the same operands, so these are kept while a caller asks for it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar

__all__ = ["KEPT_BYTES", "KeptRuns", "Run", "keeping_runs", "kept_runs"]


KEPT_BYTES = {"cpu": 1 << 29}
"""What planning keeps, by type of device. A CPU draws and computes slowly: a few layers of a large network."""


class Run(Protocol):
    """One run of a check."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that it holds now."""


T = TypeVar("T", bound=Run)


class KeptRuns:
    """Runs by key. Once they hold more than ``most`` bytes together, those go that were asked for longest ago."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._runs: OrderedDict[Hashable, Run] = OrderedDict()

    def find(self, key: Hashable, make: Callable[[], T]) -> T:
        """The run that is kept under ``key``, or a new one, which :meth:`keep` may keep."""
        run = self._runs.get(key)
        if run is None:
            return make()
        self._runs.move_to_end(key)
        return run  # type: ignore[return-value]  # each key is that of one kind of runs

    def keep(self, key: Hashable, run: Run) -> None:
        """Keep ``run``, whose size may have grown since it was made."""
        self._runs[key] = run
        self._runs.move_to_end(key)
        total = sum(each.nbytes for each in self._runs.values())
        while total > self.most:
            _, dropped = self._runs.popitem(last=False)
            total -= dropped.nbytes

    def drop(self, key: Hashable) -> None:
        """Forget the run under ``key``, if there is one."""
        self._runs.pop(key, None)


_open: contextvars.ContextVar[KeptRuns | None] = contextvars.ContextVar("tilewise_kept_runs", default=None)


def kept_runs() -> KeptRuns | None:
    """Where checks of this thread keep their runs; ``None`` where nobody asked for that."""
    return _open.get()


@contextlib.contextmanager
def keeping_runs(most: int) -> Iterator[None]:
    """Let checks within keep up to ``most`` bytes of runs. Within another such block that one's runs are used.

    With no bytes nothing is kept.

    >>> with keeping_runs(1 << 20):
    ...     kept_runs().most
    1048576
    """
    if not most or _open.get() is not None:
        yield
        return
    token = _open.set(KeptRuns(most))
    try:
        yield
    finally:
        _open.reset(token)
