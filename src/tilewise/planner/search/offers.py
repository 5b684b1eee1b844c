"""The leaf candidates of one problem: what solvers offer within the options, in the order of their estimates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tilewise import solvers
from tilewise.execute.kept_filter import compared_bytes
from tilewise.machine.turns import pause
from tilewise.plan import Config, Measurement, format_bytes
from tilewise.planner.experience import Experience
from tilewise.planner.measuring.times import NOISE
from tilewise.planner.options import EXCLUDED, Options, first_line
from tilewise.planner.search.estimate import Profile, estimate_ms
from tilewise.planner.search.known import Known
from tilewise.planner.search.leaves import needed_beside
from tilewise.planner.search.rates import Key
from tilewise.problems.base import Problem
from tilewise.solvers import Solver, SolverUnavailable, Split

__all__ = ["Offer", "Offers", "loss_of"]


MOST_BORROWED = 3
"""Candidates that are taken from each problem that may be computed instead."""


class Offer(NamedTuple):
    """A candidate, and what is expected of it."""

    estimate_ms: float
    rank: int
    """Its place among the configs of its solver."""
    solver: Solver
    config: Config
    needed: int
    """Bytes of workspace, those included that libraries take unseen."""
    by_cost_ms: float = 0.0
    """The estimate by arithmetic and bytes alone."""

    @property
    def key(self) -> Key:
        """The key of its measurement."""
        return self.solver.name, self.solver.version, self.config


def loss_of(solver: Solver, config: Config, reason: str, workspace: int | None = None) -> Measurement:
    """The note that a candidate is lost, and why."""
    return Measurement(solver.name, solver.version, config, workspace=workspace, reason=reason)


@dataclass
class Offers:
    """What leaf solvers offer for ``problem``. What cannot be tried is in :attr:`lost`, with the reasons."""

    problem: Problem
    options: Options
    profile: Profile
    wrong: Mapping[tuple[str, Config], str] = field(default_factory=dict)
    """Candidates that failed a check against float64 in this search, at any size, with the reason."""
    is_root: bool = True
    only: frozenset[tuple[str, Config]] | None = None
    """The solvers and configs to try; ``None``: all."""
    among: frozenset[str] | None = None
    """Names of the solvers to try; ``None``: all."""
    blocks: bool = False
    """Whether a part is worth trying for candidates that block the batch themselves: a tile is, a micro-batch not."""
    beside: Sequence[Measurement] = ()
    """For a front, the measurements under other limits."""
    known_of: Callable[[Problem], Known] | None = None
    """The measurements of any problem on the same device."""
    experience: Experience | None = None
    """What estimates were worth for problems before."""
    lost: list[Measurement] = field(default_factory=list)
    blocked: dict[tuple[str, Config], float] = field(default_factory=dict)
    """Candidates lost to the workspace limit alone, with their estimates."""
    estimates: dict[tuple[str, Config], float] = field(default_factory=dict)
    """Estimated milliseconds of all candidates that were offered, over the limit or not."""

    def ranked(self) -> list[Offer]:
        """The candidates of every leaf solver that may be tried, by their estimates."""
        offers: list[Offer] = []
        for solver in solvers.solving(self.problem):
            pause()
            if isinstance(solver, Split) or (solver.baseline and self.is_root):
                continue  # the root's baseline is measured by the search, outside the limit
            if self.only is not None and all(name != solver.name for name, _ in self.only):
                continue
            if self.among is not None and solver.name not in self.among:
                continue
            if self.options.excludes(solver):
                self.lost.append(loss_of(solver, Config(), EXCLUDED))
                continue
            try:
                reasons = solver.why_not(self.problem) or self._policy(solver)
                if not reasons:
                    offers += self._of(solver)
            except Exception as error:  # whatever a solver does: it is lost, planning goes on
                reasons = [f"raised {type(error).__name__} when asked for configs: {first_line(error)}"]
            if reasons:
                self.lost.append(loss_of(solver, Config(), "; ".join(reasons)))
        return sorted(offers, key=lambda offer: offer[:2])

    def _policy(self, solver: Solver) -> list[str]:
        """Reasons why ``solver`` is not tried on a part; empty where it is."""
        on_gpu = self.problem.device_type == "cuda"
        if solver.blocks_itself and not (self.is_root or self.blocks or self.options.rigor == "patient"):
            return ["takes the batch in blocks by itself"]
        if solver.baseline and on_gpu and self.options.workspace is not None:
            return ["torch's benchmark mode tries workspaces of any size, so as a part it cannot be held to a limit"]
        return []

    def _of(self, solver: Solver) -> list[Offer]:
        """What ``solver`` offers within the options. What it offers beyond them is noted as lost."""
        offers = []
        lost_before, limit = len(self.lost), self.options.workspace
        only = None if self.only is None else [c for name, c in self.only if name == solver.name]
        for rank, (config, workspace) in enumerate(self._offered(solver, limit, only)):
            if reason := self._unwanted(solver, config):
                self.lost.append(loss_of(solver, config, reason, workspace))
                continue
            hidden = solver.hidden_workspace(self.problem, config)
            needed = workspace + hidden
            if limit is not None and (most := workspace + needed_beside(solver, self.problem, config, hidden)) > limit:
                unseen = f", {format_bytes(NOISE)} of it for what may not show" if needed <= limit else ""
                text = f"needs {format_bytes(most)} of workspace{unseen}, the limit is {format_bytes(limit)}"
                self.lost.append(loss_of(solver, config, text, most))
                self.blocked[solver.name, config] = self._estimate(solver, config)
                continue
            estimate = self._estimate(solver, config)
            expected = estimate * (
                1.0 if self.experience is None else self.experience.factor(self.problem, solver, config)
            )
            offers.append(Offer(expected, rank, solver, config, needed, estimate))
        if not offers and len(self.lost) == lost_before:
            within = "" if limit is None else f" in {format_bytes(limit)} of workspace"
            self.lost.append(loss_of(solver, Config(), f"offers no config{within}"))
        return offers

    def _offered(
        self, solver: Solver, limit: int | None, only: Collection[Config] | None
    ) -> Iterable[tuple[Config, int]]:
        """What ``solver`` offers, and then what is known to be good for the problems that it may compute instead."""
        offered = dict(solver.offers(self.problem, limit, only))
        if only is None and self.known_of is not None:
            for other, form in solver.computed_instead(self.problem):
                for m in _best(self.known_of(other)):
                    config = Config(**form, solver=m.solver, **m.config)
                    try:
                        offered.setdefault(config, solver.workspace(self.problem, config))
                    except (KeyError, ValueError, SolverUnavailable) as error:
                        self.lost.append(loss_of(solver, config, f"taken from {other.key}: {first_line(error)}"))
        return offered.items()

    def _unwanted(self, solver: Solver, config: Config) -> str:
        """Why the options, or an earlier check, rule a config out; empty where they do not."""
        if self.options.excludes(solver, config):
            return EXCLUDED
        if self.options.deterministic and not solver.is_deterministic(self.problem, config):
            return "is not deterministic"
        return self.wrong.get((solver.name, config), "")

    def _estimate(self, solver: Solver, config: Config) -> float:
        """Milliseconds expected by arithmetic and bytes, corrected by measurements under other limits."""
        share = self._shares.get((solver.name, solver.like(config)), 1.0) if self._shares else 1.0
        estimate = share * self._by_cost(solver, config)
        self.estimates[solver.name, config] = estimate
        return estimate

    def _by_cost(self, solver: Solver, config: Config) -> float:
        """Milliseconds expected by arithmetic and bytes alone."""
        cost = solver.cost(self.problem, config)
        if compared := compared_bytes(solver, self.problem, config):
            cost = replace(cost, apart=cost.apart + compared)
        return estimate_ms(self.problem, cost, self.profile)

    @functools.cached_property
    def _shares(self) -> dict[tuple[str, Config], float]:
        """Measured time divided by estimate, for each solver and group of similar configs in ``beside``."""
        by_name = {solver.name: solver for solver in solvers.all_solvers()}
        shares = {}
        for m in self.beside:
            if m.time_ms is not None and not m.reason:
                solver = by_name[m.solver]
                shares[m.solver, solver.like(m.config)] = m.time_ms / max(self._by_cost(solver, m.config), 1e-9)
        return shares


def _best(known: Known) -> list[Measurement]:
    """The fastest candidates of a problem that was measured, by solvers of this version."""
    by_name = {solver.name: solver for solver in solvers.all_solvers()}
    usable = []
    for m in known.values():
        solver = by_name.get(m.solver)
        if solver is None or solver.version != m.version or isinstance(solver, Split):
            continue
        if solver.own_output or solver.computes_with(m.config):
            continue  # it cannot write where it is told to, or hands on itself what is known of another problem
        if m.time_ms is not None and not m.reason:
            usable.append(m)
    return sorted(usable, key=lambda m: m.time_ms or 0.0)[:MOST_BORROWED]
