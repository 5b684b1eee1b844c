"""Shares of a batch for several devices: which share of the images each computes, found by measuring.

The first guess is the rule of Hadjis et al. 2015 (Caffe con Troll, section 2.3): each device takes a share in
proportion to its peak rate of arithmetic. The next one is in proportion to the rates that were measured on the layer,
copies included. From the better of both, images are moved from one device to another for as long as that gains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from tilewise import execute
from tilewise.machine.places import HERE, other_places
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.search.benchmark import TooSlow
from tilewise.planner.search.estimate import rate_name
from tilewise.planner.search.leaves import OverLimit, check_declared
from tilewise.planner.search.partitions import told_as
from tilewise.planner.search.root import Root
from tilewise.planner.search.sharing.balance import GAIN, Images, balanced
from tilewise.planner.search.sharing.share_plans import SharePlans
from tilewise.planner.search.trial import UNKNOWN, Trial
from tilewise.solvers import Split
from tilewise.solvers.common.shares import shares_by

__all__ = ["DeviceShares"]

Key = tuple[tuple[str, ...], Images, int, tuple[int, ...]]
"""What the time of a division is kept under: places, images, copying threads, and the sizes of parts."""

FIRST_STEP, LAST_STEP = 8, 64
"""Images are first moved by an eighth of the batch, and at last by a 64th."""
MOST = 40
"""Most shares of one problem that are measured; ``patient`` measures a whole sweep besides."""
SWEEP = 16
"""Steps of the sweep of ``patient``."""


@dataclass
class DeviceShares:
    """The divisions by ``solver`` of the problem of ``trial``, which has been run, among several devices.

    After :meth:`plans`, :attr:`log` has what came of each share that was tried, and what ``found`` it: ``flops`` for
    the rule by peak rates, ``alone`` for one device that computes all, ``rates``, ``search`` or ``sweep``.
    """

    solver: Split
    root: Root
    trial: Trial
    log: list[Measurement] = field(default_factory=list)
    steps: int = 0
    """Steps of a sweep of shares that is measured besides; 0 for none."""
    beside: tuple[str, ...] | None = None
    """Places of the other devices; ``None`` for those that the options name."""

    def __post_init__(self) -> None:
        self.found: list[tuple[str, Plan]] = []
        """What found each share that was measured, and its plan."""
        self.problem = self.trial.problem
        self.whole = self.problem.batch_size
        self._plans_of = SharePlans(self.solver, self.root, self.trial, (HERE,))
        self._times: dict[Key, float] = {}
        self._plans: dict[Key, Plan] = {}

    def plans(self) -> list[Plan]:
        """The best division, with the measured time of all shares together; none where no share gains."""
        if reason := self._why_none():
            self._lose(Config(), reason)
            return []
        by_flops = self._usable(self._by_flops())
        if by_flops is None:
            return []
        self._measured(by_flops, "flops")
        by_rates = self._by_rates()
        self._measured(by_rates, "rates")
        best = self._balanced(min((by_flops, by_rates), key=self._time), self.whole // FIRST_STEP)
        best = self._tuned(best)
        if steps := self.steps or (SWEEP if self.root.options.rigor == "patient" else 0):
            best = min((best, *self._sweep(steps)), key=self._time)
        return self._chosen(best)

    @property
    def _places(self) -> tuple[str, ...]:
        """The places of the devices that take part, the tensors' own first."""
        return self._plans_of.places

    def _why_none(self) -> str:
        """Why nothing is shared out; empty where it is tried."""
        options, others = self.root.options, self.beside
        if others is None and not options.share_with:
            return "not tried: share_with names no device"
        if others is None:
            others = other_places(options.share_with, self.trial.tensors.device)
        self._plans_of.places = (HERE, *others)
        if len(self._places) < 2:
            return "not tried: share_with names no other device than the one of the tensors"
        if options.rigor == "estimate":
            return "not tried: shares are found by measuring"
        return ""

    def _by_flops(self) -> Images:
        """Images in proportion to the devices' peak rates of arithmetic: the rule of the paper."""
        rate, of = rate_name(self.problem), self._plans_of.device
        return shares_by([self.root.profile_of(of(place))[rate] for place in self._places], self.whole)

    def _usable(self, images: Images) -> Images | None:
        """``images`` for the devices that have a solver for their parts; ``None`` where only one has."""
        kept = {}
        for place, count in zip(self._places, images, strict=True):
            if reason := self._plans_of.find_leaf(place, max(1, count)):
                self._lose(Config(devices=place), reason)
            else:
                kept[place] = float(count)
        if HERE not in kept or len(kept) < 2:
            return None
        self._plans_of.places = tuple(kept)
        return shares_by(list(kept.values()) if any(kept.values()) else [1.0] * len(kept), self.whole)

    def _by_rates(self) -> Images:
        """Images in proportion to the rates at which devices compute the whole alone, copies included."""
        rates = []
        for index, _ in enumerate(self._places):
            alone = tuple(self.whole * (i == index) for i in range(len(self._places)))
            ms = self._measured(alone, "alone")
            rates.append(1.0 / ms if 0 < ms < math.inf else 0.0)
        return shares_by(rates if any(rates) else [1.0] * len(rates), self.whole)

    def _balanced(self, images: Images, step: int) -> Images:
        """The best share that is reached from ``images`` by moving some."""
        least = max(1, self.whole // LAST_STEP)

        def time_of(each: Images) -> float:
            return self._measured(each, "search")

        return balanced(images, max(step, least), least, time_of, lambda: len(self._times) < MOST)

    def _tuned(self, images: Images) -> Images:
        """The best share after other sizes of parts and numbers of copying threads were tried."""
        if not any(images[1:]):
            return images
        plans = self._plans_of
        for factor in (2.0, 0.5):
            sizes = {place: max(1, min(self.whole, int(n * factor))) for place, n in plans.sizes.items()}
            self._take_if_faster(images, sizes, plans.copiers)
        if self.problem.device_type == "cpu" and any(place != "cpu" for place in self._places[1:]):
            for copiers in (2 * plans.copiers, max(1, plans.copiers // 2)):
                if copiers != plans.copiers and copiers < torch.get_num_threads():
                    self._take_if_faster(images, plans.sizes, copiers)
        return self._balanced(images, self.whole // LAST_STEP)

    def _take_if_faster(self, images: Images, sizes: dict[str, int], copiers: int) -> None:
        """Use other sizes of parts and another number of copying threads from now on, if ``images`` gain by them."""
        plans, before = self._plans_of, self._time(images)
        kept = dict(plans.sizes), plans.copiers
        plans.sizes, plans.copiers = dict(sizes), copiers
        if not self._measured(images, "search") < GAIN * before:
            plans.sizes, plans.copiers = kept

    def _sweep(self, steps: int) -> list[Images]:
        """Shares of the tensors' own device from all to nothing, measured; what it leaves is divided as by rates."""
        others = [float(n) for n in self._by_rates()[1:]]
        found = []
        for step in range(steps + 1):
            here = round(self.whole * step / steps)
            images = (here, *shares_by(others if any(others) else [1.0] * len(others), self.whole - here))
            self._measured(images, "sweep")
            found.append(images)
        return found

    def _chosen(self, best: Images) -> list[Plan]:
        """The plan of the best share in a list; an empty one where all is best computed where the tensors lie."""
        plan = self._plans.get(self._key(best))
        if plan is None and not any(best[1:]):
            alone, least = self._time(best), min(self._times.values(), default=math.inf)
            text = f"{alone:.3f} ms on the tensors' own device alone, {least:.3f} with the best share of others"
            names = "; ".join(self._places)
            self._lose(Config(devices=names), f"every share of other devices comes out as zero: {text}")
        return [] if plan is None else [plan]

    def _key(self, images: Images) -> Key:
        """What the time of a division is kept under, as parts and copying threads are now."""
        plans = self._plans_of
        return plans.places, images, plans.copiers, tuple(plans.sizes.get(place, 0) for place in plans.places[1:])

    def _time(self, images: Images) -> float:
        """The measured ms of a division; of all images where the tensors lie, those of the best candidate there."""
        return self._times.get(self._key(images), math.inf) if any(images[1:]) else self.trial.best_ms

    def _measured(self, images: Images, found: str) -> float:
        """The ms of a division, measured where it is not known. One that is lost takes for ever."""
        if not any(images[1:]):
            return self._time(images)
        plans = self._plans_of
        while (key := self._key(images)) not in self._times:
            self._times[key] = math.inf
            plan = plans.plan(images)
            if plan is None:
                self._lose(Config(images=images, found=found), "a solver does not offer parts of these sizes")
                break
            try:
                self._try(plan, key, found)
            except OverLimit as over:
                if max(plans.sizes[place] for place in plans.places[1:]) == 1:
                    self._lose(Config(**told_as(plan), found=found), str(over))
                    break
                del self._times[key]
                plans.sizes |= {place: max(1, plans.sizes[place] // 2) for place in plans.places[1:]}
        return self._time(images)

    def _try(self, plan: Plan, key: Key, found: str) -> None:
        """Take a plan's time from what is known, or measure it, and log it. Raises :class:`OverLimit`."""
        label = told_as(plan)
        known = self.solver.name, self.solver.version, label
        m = self.trial.believed(known, plan.workspace)
        if m is None and self.root.options.rigor == "wisdom_only":
            self._lose(Config(**label, found=found), UNKNOWN)
            return
        if m is None:
            best = min((self.trial.best_ms, *self._times.values())) if found != "alone" else math.inf
            try:
                m = replace(self._timed(plan, best), config=label)
            except TooSlow as slow:
                self._lose(Config(**label, found=found), str(slow))
                return
            self.trial.known[known] = m
            self.trial.foreign.discard(known)
        reason = m.reason or self.root.over_limit(m.workspace or 0)
        self.log.append(replace(m, config=Config(**label, found=found), reason=reason))
        if not reason and m.time_ms is not None:
            self._times[key] = m.time_ms
            plan = replace(plan, time_ms=m.time_ms, workspace=m.workspace or 0, host_ms=m.host_ms, load=m.load)
            self._plans[key] = plan
            self.found.append((found, plan))

    def _timed(self, plan: Plan, best_ms: float) -> Measurement:
        """The measurement of a plan; on a CPU after a run that does not count, which pins memory and starts threads."""
        if self.problem.device_type != "cpu":
            return self.trial.measure_plan(plan, best_ms)

        def bind(plan: Plan) -> execute.Bound:
            bound = execute.bind(plan, self.problem, *self.trial.tensors.all)
            check_declared(plan, self.problem, bound, self.trial.options.workspace)
            self.trial.tensors.call(bound, new=not self.problem.accumulate)()
            return bound

        return self.trial.benchmark.measure(plan, best_ms, bind)

    def _lose(self, config: Config, reason: str) -> None:
        """Note that a share is lost, and why."""
        self.log.append(Measurement(self.solver.name, self.solver.version, config, reason=reason))
