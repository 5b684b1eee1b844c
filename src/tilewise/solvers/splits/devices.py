"""Parts of the batch on several devices at once (Hadjis et al. 2015, Caffe con Troll, section 2.3 and appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewise.machine.places import HERE, name_of_place, place_on_this_machine
from tilewise.machine.threads import bounds_threads
from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT, Part
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost
from tilewise.solvers.common.shares import Shares
from tilewise.solvers.conv import ConvSplit
from tilewise.solvers.splits._batch import batch_part


class Devices(ConvSplit):
    """Gives a share of the batch to each of several devices, which compute at once. WGRAD adds the shares in order.

    Its config names the ``devices``: ``here`` is the one of the layer's tensors, others have a place of their own
    (:mod:`tilewise.machine.places`). ``sizes`` are the images of the parts in order, and ``owners`` the index of the
    device of each. Another device than ``here`` may have several parts: while it computes one, the next is copied to it
    and the result of the last one comes back. Where the tensors lie on the host, ``copiers`` threads copy for each GPU,
    and those that are left compute.
    """

    name, version = "devices", 1
    axis, level, across = "batch", 1, True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: a batch of 1, or on a CPU a torch whose threads cannot be limited for each share."""
        reasons = [] if p.batch > 1 else ["a batch of 1 cannot be shared"]
        if p.device_type == "cpu" and not bounds_threads():
            reasons.append("torch's threads cannot be bounded share by share: it was not built with OpenMP")
        return reasons

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Nothing: shares depend on which devices take part."""
        return ()

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of a part of ``size`` on the device of ``p``, wherever it starts."""
        return batch_part(p, size, 1)

    def children(self, p: ConvProblem, c: Config) -> tuple[Part[ConvProblem], ...]:
        """The parts in order, each on its owner's device.

        Raises ``ValueError`` for a config that is none of this split's, and for a device that is not here.
        """
        shares, parts = Shares.of(c), []
        owners = [place for place, sizes in zip(shares.places, shares.parts, strict=True) for _ in sizes]
        for part, place in zip(p.split("batch", sum(shares.parts, ())), owners, strict=True):
            assert part.problem is not None
            if place == HERE:
                parts.append(part)
                continue
            place_on_this_machine(place)
            # Copies are dense, aligned and new in every call, so that nothing of them can be kept.
            lx, lw, ly = ("contiguous" if layout == "view" else layout for layout in part.problem.layouts)
            there = replace(
                part.problem.on(name_of_place(place)), constant_weight=False, checked_weight=False,
                layouts=(lx, lw, ly), alignment=(ALIGNMENT, ALIGNMENT, ALIGNMENT),
            )  # fmt: skip
            parts.append(replace(part, problem=there))
        return tuple(parts)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)
