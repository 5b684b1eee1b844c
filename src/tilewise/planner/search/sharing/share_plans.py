"""The plans of shares: what computes a part on each device, and the plan in which each computes so many images."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tilewise import solvers
from tilewise.execute.kept_filter import kept_bytes
from tilewise.machine.places import HERE, name_of_place
from tilewise.machine.threads import with_threads
from tilewise.plan import Config, Plan
from tilewise.planner.search.divisions import tensors_of
from tilewise.planner.search.partitions import nearest
from tilewise.planner.search.root import Root
from tilewise.planner.search.sharing.balance import Images
from tilewise.planner.search.trial import Trial
from tilewise.problems.base import Part, Problem
from tilewise.problems.operands import Tensors, make_operands, make_results
from tilewise.solvers import Split
from tilewise.solvers.common.shares import Shares, parts_of_size

__all__ = ["SharePlans"]

PIECES = {"cpu": 4, "cuda": 8}
"""In so many parts a device other than the tensors' own computes its first share, so that copies overlap."""
COPYING = 8
"""One of so many threads of the host copies for each GPU at first."""


@dataclass
class SharePlans:
    """Plans that divide the batch of the problem of ``trial`` by ``solver`` among the devices at ``places``.

    ``places`` begin with the one where the tensors lie. ``sizes`` are how many images other devices compute at a time,
    and ``copiers`` how many of the host's threads copy for each GPU.
    """

    solver: Split
    root: Root
    trial: Trial
    places: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem = self.trial.problem
        self.copiers = max(1, torch.get_num_threads() // COPYING)
        self._leaves: dict[str, tuple[str, Config]] = {}
        self._offered: dict[tuple[str, Problem, int], list[Config]] = {}

    def device(self, place: str) -> str:
        """The name of the device at ``place``."""
        return self.problem.device if place == HERE else name_of_place(place)

    def find_leaf(self, place: str, images: int) -> str:
        """Find what computes parts on ``place`` fastest, for a share of about so many ``images``.

        Returns why there is none; empty where there is one.
        """
        size = images
        if place != HERE:
            size = 1 << max(0, (images // PIECES[self.device(place).partition(":")[0]]).bit_length() - 1)
            self.sizes[place] = size
        part = self._part(place, size)
        child = part.problem
        assert child is not None
        if place == HERE:
            tensors = tensors_of(self.problem, self.trial.tensors, part, child)
        else:
            tensors = Tensors(make_operands(child), make_results(child))
        trial = self.root.trial(child, tensors, self.trial.options, root=False)
        with child.flags(deterministic=self.trial.options.deterministic):
            measured = trial.run()
        usable = [(m.time_ms, m.solver, m.config) for m in measured if not m.reason and m.time_ms is not None]
        if not usable:
            reasons = (" ".join(f"{m.solver} {m.config}".split()) + f": {m.reason}" for m in measured if m.reason)
            return f"no solver computes parts of {size} images there: {'; '.join(reasons)}"
        _, solver, config = min(usable, key=lambda each: each[0])
        self._leaves[place] = solver, config
        return ""

    def _part(self, place: str, size: int) -> Part[Problem]:
        """A part of ``size`` images at ``place``; another device has the rest, whichever it is."""
        parts = {place: (size,)}
        if rest := self.problem.batch_size - size:
            parts[HERE if place != HERE else self.places[1]] = (rest,)
        order = tuple(each for each in self.places if each in parts)
        config = Shares(order, tuple(parts[each] for each in order)).config()
        return self.solver.children(self.problem, config)[order.index(place)]

    def plan(self, images: Images) -> Plan | None:
        """The plan of a division, not timed yet; ``None`` where a solver does not offer parts of these sizes."""
        config = Shares(self.places, tuple(map(self._parts, self.places, images)), self.copiers).config()
        shares = Shares.of(config)  # without devices that have no images
        threads = shares.threads(self.problem.device_type, torch.get_num_threads())
        parts = iter(self.solver.children(self.problem, config))
        children: list[Plan] = []
        counts: list[int] = []
        for place, sizes, count in zip(shares.places, shares.parts, threads, strict=True):
            for size in sizes:
                child = next(parts).problem
                assert child is not None
                leaf = self._leaf(place, child, count if self.device(place) == "cpu" else 0, size)
                if leaf is None:
                    return None
                if children and children[-1] == leaf:
                    counts[-1] += 1
                else:
                    children.append(leaf)
                    counts.append(1)
        taking = zip(shares.places, shares.images, strict=True)
        text = " + ".join(f"{count} on {place.partition('=')[0]}" for place, count in taking)
        return Plan(
            self.problem.key, self.solver.name, self.solver.version, config, tuple(children), tuple(counts),
            workspace=children[0].workspace if shares.places[0] == HERE else 0,
            label=f"{self.problem.batch_size} = {text}",
        )  # fmt: skip

    def _parts(self, place: str, images: int) -> tuple[int, ...]:
        """The sizes of the parts of a device that computes so many images."""
        if place == HERE:
            return (images,) if images else ()
        return parts_of_size(images, self.sizes[place])

    def _leaf(self, place: str, child: Problem, threads: int, size: int) -> Plan | None:
        """The leaf that computes a part on ``place``, in the config that is most like the best one there."""
        name, wanted = self._leaves[place]
        solver = solvers.get(name)
        key = name, child, threads
        if key not in self._offered:
            offered: list[Config] = []

            def ask() -> None:
                if not solver.why_not(child):
                    offered.extend(config for config, _ in solver.offers(child, None))

            if threads:
                with_threads(ask, threads)
            else:
                ask()
            self._offered[key] = offered
        if not self._offered[key]:
            return None
        config = wanted if wanted in self._offered[key] else nearest(self._offered[key], wanted)
        return Plan(
            child.key, name, solver.version, config, workspace=solver.workspace(child, config),
            constant=kept_bytes(solver, child, config), label=f"{config} @{size}".strip(),
        )  # fmt: skip
