"""Everything that a search tried on a problem, for a user who asks why a plan was chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewise.plan import Measurement
from tilewise.planner.options import NoPlanError
from tilewise.planner.search.search import Search

__all__ = ["explained"]


def explained(
    search: Search,
    every_config_of: Sequence[str],
    refused: Sequence[Measurement],
    tell: Callable[[int, int, str], None],
) -> list[Measurement]:
    """Search, then measure every config of some solvers. Returns all that was tried: the fastest first, the lost last.

    ``refused`` are plans from elsewhere that may not be used, which count where nothing was measured of them. ``tell``
    hears of each solver in ``every_config_of``.
    """
    if search.root.options.rigor == "wisdom_only":
        search.survey()
    else:
        with contextlib.suppress(NoPlanError):  # the log holds the reasons, which is all that is asked here
            search.best()
    for done, name in enumerate(every_config_of):
        tell(done, len(every_config_of), f"every config of {name}")
        search.measure_every_config(name)
    latest = {(m.solver, m.version, m.config): m for m in (*refused, *search.log)}
    tried = (replace(m, estimate_ms=search.estimates.get((m.solver, m.config))) for m in latest.values())
    return sorted(tried, key=lambda m: (bool(m.reason), m.time_ms or 0.0, m.solver))
