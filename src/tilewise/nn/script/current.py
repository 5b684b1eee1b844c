"""The session that counts at this moment, as the functions find it that stand in for torch's.

A file of this folder for each kind of function (``convolutions``, ``linear``) has its sites and what stands in for
torch's functions; ``session`` lists these files. Everything else knows sites by :class:`Site` alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tilewise.nn.functional import Table
from tilewise.nn.script.recorder import Recorder

__all__ = ["Session", "Site", "note_compiled", "session"]


class Site(Protocol):
    """What runs one of torch's functions with one weight: its input comes first, the weight or ``None`` second.

    ``arguments`` are those that are no tensors, and tell sites of one weight apart. ``misses`` counts calls of another
    kind than the one before.
    """

    arguments: tuple[Any, ...]
    misses: int
    shapes: dict[tuple[int, ...], Any]

    @property
    def function(self) -> str:
        """The name of torch's function."""
        ...

    def __call__(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result by plan; ``NotImplemented`` where torch must compute it."""
        ...

    def by_torch(self, x: Any, w: Any, *rest: Any) -> Any:
        """The result of torch's own function."""
        ...

    def at(self, x: object) -> Site | None:
        """The site for inputs shaped as ``x``; ``None`` where such a call is left to torch."""
        ...

    def close(self) -> None:
        """Leave to torch every kind of call that has not been seen by now."""
        ...

    def forget(self) -> None:
        """Look plans up anew."""
        ...


class Session(Protocol):
    """What a function that stands in for torch's needs of :class:`tilewise.nn.script.session.Session`.

    ``sites`` are found by the ``id`` of a weight, which may belong to another weight by now; those of functions without
    one by the function and its arguments. ``waiting`` is not empty
    where a call was refused that has no plan yet. While ``watched``, calls go through :meth:`between`.
    """

    table: Table
    plan_table: Recorder
    sites: dict[Any, Any]
    waiting: dict[int, Any]
    watched: bool

    def add(self, weight: torch.Tensor, site: Site) -> None:
        """Remember the site of a weight."""
        ...

    def keep(self, key: object, site: Site) -> None:
        """Remember the site of ``key``."""
        ...

    def between(self, site: Site, *operands: Any) -> Any:
        """The result of a call while planning goes on in the background, or while steps are compared."""
        ...

    def note(self, site: Site, *operands: Any) -> Any:
        """Record a call that has no plan yet; its result where all is planned now, else ``NotImplemented``."""
        ...

    def compiled(self) -> None:
        """A call is compiled. Where all calls are, no step is seen any more."""
        ...


session: Session | None = None
"""The innermost session, ``None`` where planning is not enabled."""


def note_compiled() -> bool:
    """Dynamo traces a call: nobody will hear of it when it runs. Called once for each trace, and no part of it."""
    if session is not None:
        session.compiled()
    return True


note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
