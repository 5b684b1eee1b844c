"""Divisions whose parts run at once: each is measured whole, as parts share the caches and the memory's bandwidth.

Parts are computed by what did best on the undivided problem, in the config for a part's threads that is most like the
one there. What was measured is remembered on the whole problem, under the split and a config that names the part's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from tilewise import solvers
from tilewise.execute.kept_filter import kept_bytes
from tilewise.machine.threads import with_threads
from tilewise.plan import Config, Measurement, Plan, format_bytes
from tilewise.planner.options import EXCLUDED
from tilewise.planner.search.leaves import OverLimit
from tilewise.planner.search.rates import LOST
from tilewise.planner.search.trial import UNKNOWN, Trial
from tilewise.problems.base import Problem
from tilewise.solvers import Solver, Split
from tilewise.solvers.common.shares import Shares

__all__ = ["Partitions", "nearest", "told_as"]

MOST = 2
"""Solvers that are tried on parts, the fastest ones on the whole; ``patient`` tries all."""


@dataclass
class Partitions:
    """The divisions by ``solver`` of the problem of ``trial``, which has been run, into parts at once.

    ``baseline`` is the measurement of torch's own choice on the whole. After :meth:`plans`, :attr:`log` has what came
    of each candidate.
    """

    solver: Split
    trial: Trial
    baseline: Measurement | None
    log: list[Measurement] = field(default_factory=list)

    def plans(self) -> list[Plan]:
        """Usable plans, with the measured time and workspace of all parts together."""
        rigor, threads = self.trial.options.rigor, torch.get_num_threads()
        divisions = list(self.solver.divisions(self._problem, threads)) if rigor != "estimate" else []
        if not divisions:
            text = f"torch has {threads} thread here: parts at once need two"
            self._lose(Config(), "not tried: estimates are as for the whole" if rigor == "estimate" else text)
        patient = rigor == "patient"
        usable = []
        for sizes in divisions if patient else divisions[:1]:
            for solver, configs in self._candidates(sizes, max(1, threads // len(sizes))):
                usable += self._tried(sizes, solver, configs)
        if divisions and not self.log:
            self._lose(Config(), "nothing computed the whole that could compute a part")
        return usable

    @property
    def _problem(self) -> Problem:
        """The problem whose batch is divided."""
        return self.trial.problem

    def _candidates(self, sizes: tuple[int, ...], threads: int) -> Iterator[tuple[Solver, dict[int, Config]]]:
        """Solvers with a config for each size in ``sizes``, as they offer them to a part on ``threads`` threads."""
        patient = self.trial.options.rigor == "patient"
        for solver, best in self._solvers():
            offered = {size: self._offered(solver, size, threads) for size in dict.fromkeys(sizes)}
            if not all(offered.values()):
                continue
            first = offered[sizes[0]]
            for config in first if patient else [nearest(first, best)]:
                yield solver, {size: nearest(configs, config) for size, configs in offered.items()}

    def _solvers(self) -> list[tuple[Solver, Config]]:
        """The solvers to try on parts, each with its best config on the whole; all solvers for ``patient``."""
        measurements = [*self.trial.found, *([] if self.baseline is None else [self.baseline])]
        usable = sorted(
            ((m.time_ms, m.solver, m) for m in measurements if not m.reason and m.time_ms is not None),
            key=lambda entry: entry[:2],
        )
        best = {name: m.config for _, name, m in reversed(usable)}
        if self.trial.options.rigor == "patient":
            return [(s, best.get(s.name, Config())) for s in solvers.solving(self._problem) if not isinstance(s, Split)]
        near = dict.fromkeys(name for ms, name, _ in usable if ms <= LOST * usable[0][0])
        return [(solvers.get(name), best[name]) for name in itertools.islice(near, MOST)]

    def _offered(self, solver: Solver, size: int, threads: int) -> list[Config]:
        """Configs that ``solver`` offers for parts of ``size`` on ``threads`` threads; empty where it cannot."""
        part = self.solver.child(self._problem, size)
        offered: list[Config] = []

        def ask() -> None:
            if not solver.why_not(part):
                offered.extend(config for config, _ in solver.offers(part, None))

        with_threads(ask, threads)
        return offered

    def _tried(self, sizes: tuple[int, ...], solver: Solver, configs: dict[int, Config]) -> list[Plan]:
        """The measured plan in a list; an empty one where it is lost, which :attr:`log` explains."""
        options, known = self.trial.options, self.trial.known
        plan = self._plan(sizes, solver, configs)
        label = told_as(plan)
        key = self.solver.name, self.solver.version, label
        reason = self._unwanted(solver, configs.values())
        if not reason and options.workspace is not None and plan.workspace > options.workspace:
            needs, limit = format_bytes(plan.workspace), format_bytes(options.workspace)
            reason = f"its parts at once need {needs} of workspace, the limit is {limit}"
        believed = self.trial.believed(key, plan.workspace)
        if not reason and believed is None:
            if options.rigor == "wisdom_only":
                reason = UNKNOWN
            else:
                try:
                    believed = replace(self.trial.measure_plan(plan, self.trial.best_ms), config=label)
                    known[key] = believed
                    self.trial.foreign.discard(key)
                except OverLimit as over:
                    reason = str(over)
        if not reason and believed is not None:
            m = believed
            reason = m.reason or self._over(m)
            self.log.append(replace(m, reason=reason))
            if not reason and m.time_ms is not None:
                return [replace(plan, time_ms=m.time_ms, workspace=m.workspace or 0, host_ms=m.host_ms, load=m.load)]
        else:
            self._lose(label, reason, plan.workspace)
        return []

    def _unwanted(self, solver: Solver, configs: Iterable[Config]) -> str:
        """Why the options rule out one of ``configs``; empty where they do not."""
        for config in configs:
            if self.trial.options.excludes(solver, config):
                return EXCLUDED
            if (solver.name, config) in self.trial.offers.wrong:
                return self.trial.offers.wrong[solver.name, config]
            if self.trial.options.deterministic and not solver.is_deterministic(self._problem, config):
                return "is not deterministic"
        return ""

    def _over(self, m: Measurement) -> str:
        """Why a measurement is over the workspace limit; empty where it is not."""
        limit = self.trial.options.workspace
        if limit is None or m.workspace is None or m.workspace <= limit:
            return ""
        return f"took {format_bytes(m.workspace)} of workspace when run, the limit is {format_bytes(limit)}"

    def _plan(self, sizes: tuple[int, ...], solver: Solver, configs: dict[int, Config]) -> Plan:
        """The plan that runs these parts at once: not timed yet, and with the workspace that the parts declare."""
        children, counts = [], []
        for size, same in itertools.groupby(sizes):
            part, config = self.solver.child(self._problem, size), configs[size]
            children.append(
                Plan(
                    part.key, solver.name, solver.version, config, workspace=solver.workspace(part, config),
                    constant=kept_bytes(solver, part, config),
                    label=f"{config} @{size}".strip(),
                )
            )  # fmt: skip
            counts.append(len(list(same)))
        parts = " + ".join(f"{n}x{size}" if n > 1 else str(size) for size, n in zip(configs, counts, strict=True))
        return Plan(
            self._problem.key, self.solver.name, self.solver.version, Config(sizes=sizes), tuple(children),
            tuple(counts), workspace=sum(n * c.workspace for n, c in zip(counts, children, strict=True)),
            label=f"{sum(sizes)} = {parts} at once",
        )  # fmt: skip

    def _lose(self, config: Config, reason: str, workspace: int | None = None) -> None:
        """Note that a division is lost, and why."""
        split = self.solver
        self.log.append(Measurement(split.name, split.version, config, workspace=workspace, reason=reason))


def told_as(plan: Plan) -> Config:
    """The config under which reports and wisdom name a plan: for parts at once it also names what the parts run.

    For shares of devices it has the images of each device in place of its parts' sizes.
    """
    solver = solvers.get(plan.solver)
    if not isinstance(solver, Split) or not (solver.at_once or solver.across):
        return plan.config
    if solver.across:
        shares = Shares.of(plan.config)
        parts = " | ".join(dict.fromkeys(f"{child.solver} {child.config}".strip() for child in plan.children))
        return Config(
            devices=plan.config["devices"], images=shares.images, sizes=tuple(sizes[0] for sizes in shares.parts),
            copiers=shares.copiers, part=parts,
        )  # fmt: skip
    first = plan.children[0]
    return Config(**plan.config, part=f"{first.solver} {first.config}".strip())


def nearest(offered: list[Config], wanted: Config) -> Config:
    """The config that shares most values with ``wanted``; of several the one that was offered first."""
    items = set(wanted.items())
    return max(offered, key=lambda config: len(items & set(config.items())))
