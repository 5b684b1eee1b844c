"""What is swept: a recurrent layer, a matrix product or a convolution, and which of its sizes may be others.

A :class:`Sweep` makes the problems at any sizes. Nothing else here knows what a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewise.advice.axes import Axis
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.recurrent.problem import RecurrentProblem

__all__ = ["BATCH_SHARE", "SIZE_SHARE", "Sizes", "Sweep", "convolution", "product", "recurrent_layer"]

Sizes = tuple[int, ...]
"""A size for each axis of a sweep, in their order."""
SIZE_SHARE, BATCH_SHARE = 0.10, 0.25
"""How far sizes of a layer, and its mini-batch, may be from what was asked."""


@dataclass(frozen=True)
class Sweep:
    """Axes of which sizes may be chosen, and ``make``, which gives the problems of one step at sizes by name.

    ``batch`` is the name of the axis that counts samples. Steps are compared by the sum of their problems' times.

    >>> from tilewise.advice import Axis, Sweep
    >>> sweep = Sweep((Axis("rows", 64, 0.25),), "rows", lambda sizes: (tilewise.GemmProblem(sizes["rows"], 32, 32),))
    >>> sweep.samples(sweep.asked), sweep.flops(sweep.asked)
    (64, 131072)
    """

    axes: tuple[Axis, ...]
    batch: str
    make: Callable[[Mapping[str, int]], tuple[Problem, ...]]
    _flops: dict[Sizes, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def asked(self) -> Sizes:
        """The sizes that the user has."""
        return tuple(axis.asked for axis in self.axes)

    @property
    def batch_place(self) -> int:
        """The place of the mini-batch among the axes."""
        return next(place for place, axis in enumerate(self.axes) if axis.name == self.batch)

    def problems(self, sizes: Sizes) -> tuple[Problem, ...]:
        """The problems of one step at ``sizes``. Raises ``ValueError`` where they make no layer."""
        return self.make(self.named(sizes))

    def flops(self, sizes: Sizes) -> int:
        """Floating-point operations of one step at ``sizes``; 0 where they make no layer."""
        if sizes not in self._flops:
            try:
                self._flops[sizes] = sum(problem.flops for problem in self.problems(sizes))
            except ValueError:  # an image that is smaller than the filter, say
                self._flops[sizes] = 0
        return self._flops[sizes]

    def named(self, sizes: Sizes) -> dict[str, int]:
        """``sizes`` by the names of their axes."""
        return {axis.name: size for axis, size in zip(self.axes, sizes, strict=True)}

    def samples(self, sizes: Sizes) -> int:
        """How many samples one step computes."""
        return sizes[self.batch_place]

    def text(self, sizes: Sizes) -> str:
        """``sizes`` in words, such as ``hidden 1664, batch 64``."""
        return ", ".join(f"{name} {size}" for name, size in self.named(sizes).items())


def recurrent_layer(
    problem: RecurrentProblem, *, size_share: float = SIZE_SHARE, batch_share: float = BATCH_SHARE
) -> Sweep:
    """A sweep of ``problem`` over its ``hidden`` units and its ``batch``; a sample is a sequence.

    Where the input is as wide as the state it stays so: layers on one another change together. A projection keeps its
    share of the units.

    >>> layer = tilewise.RecurrentProblem("gru", time=4, batch=4, inputs=8, hidden=8)
    >>> recurrent_layer(layer).named((8, 5))
    {'hidden': 8, 'batch': 5}
    """
    square = problem.inputs == problem.hidden

    def make(sizes: Mapping[str, int]) -> tuple[Problem, ...]:
        inputs = sizes["hidden"] if square else problem.inputs
        hidden, share = sizes["hidden"], problem.projection * sizes["hidden"] // problem.hidden
        projection = min(max(1, share), hidden - 1) if problem.projection else 0
        return (replace(problem, hidden=hidden, inputs=inputs, batch=sizes["batch"], projection=projection),)

    axes = (Axis("hidden", problem.hidden, size_share), Axis("batch", problem.batch, batch_share))
    return Sweep(axes, "batch", make)


def product(
    problems: Sequence[GemmProblem], *, size_share: float = SIZE_SHARE, batch_share: float = BATCH_SHARE
) -> Sweep:
    """A sweep of one matrix product stored in the ways of ``problems``, over all its sizes; a sample is a row.

    ``rows`` (M) are the mini-batch, as in a linear layer; ``columns`` (N) and ``depth`` (K) are widths of layers.

    >>> sweep = product([tilewise.GemmProblem(64, 32, 32)])
    >>> sweep.text(sweep.asked)
    'columns 32, depth 32, rows 64'
    """
    first = problems[0]

    def make(sizes: Mapping[str, int]) -> tuple[Problem, ...]:
        return tuple(replace(p, m=sizes["rows"], n=sizes["columns"], k=sizes["depth"]) for p in problems)

    columns, depth = (Axis(name, size, size_share) for name, size in (("columns", first.n), ("depth", first.k)))
    return Sweep((columns, depth, Axis("rows", first.m, batch_share)), "rows", make)


def convolution(
    problems: Sequence[ConvProblem], *, size_share: float = SIZE_SHARE, batch_share: float = BATCH_SHARE
) -> Sweep:
    """A sweep of the passes ``problems`` of one convolution over channels, the image's size and the batch.

    The channels of a depthwise layer, of which each is a group, are one size; those of other grouped layers stay
    multiples of the groups. All sides of an image change in proportion to the first.

    >>> from tilewise.notation import parse_layer
    >>> sweep = convolution([parse_layer("mb8ic16ih28oc16kh3ph1")])
    >>> sweep.text(sweep.asked)
    'ic 16, oc 16, image 28, batch 8'
    """
    first = problems[0]
    depthwise = first.groups > 1 and first.groups == first.in_channels == first.out_channels

    def make(sizes: Mapping[str, int]) -> tuple[Problem, ...]:
        factor = sizes["image"] / first.axes[0].size
        sides = [sizes["image"], *(max(1, round(axis.size * factor)) for axis in first.axes[1:])]
        axes = tuple(replace(axis, size=side) for axis, side in zip(first.axes, sides, strict=True))
        groups, ic, oc = (sizes["channels"],) * 3 if depthwise else (first.groups, sizes["ic"], sizes["oc"])
        return tuple(
            replace(p, batch=sizes["batch"], axes=axes, groups=groups, in_channels=ic, out_channels=oc)
            for p in problems
        )

    widths = {"channels": first.in_channels} if depthwise else {"ic": first.in_channels, "oc": first.out_channels}
    unit = 1 if depthwise else first.groups
    channel_axes = [Axis(name, size, size_share, unit) for name, size in widths.items()]
    image = Axis("image", first.axes[0].size, size_share)
    return Sweep((*channel_axes, image, Axis("batch", first.batch, batch_share)), "batch", make)
