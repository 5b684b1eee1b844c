"""What a check's operands hold beside normal values: constants, slow waves, values that cancel, and outliers.

The result of a pass has two axes of whole parts: images or channels, each of which one operand alone decides. So parts
of different kinds lie in one pair of operands, and each pair of kinds meets in a block of the result of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import LOWERED, OCTAVES

__all__ = [
    "BALANCED",
    "CONSTANT",
    "KINDS",
    "NEEDED",
    "NORMAL",
    "OUTLIERS",
    "SLOW",
    "SMOOTH",
    "Mixture",
    "apart",
    "apply",
    "end_ranks",
    "mixture",
    "pairs_of",
    "plain",
    "plant",
]

T = TypeVar("T")

NORMAL, CONSTANT, SLOW, BALANCED = KINDS = range(4)
"""Standard normal values; one value everywhere; half a wave along each axis; normal values whose sums are zero."""
NEEDED = (
    (NORMAL, NORMAL), (NORMAL, CONSTANT), (CONSTANT, NORMAL), (CONSTANT, BALANCED), (BALANCED, CONSTANT),
    (SLOW, NORMAL), (NORMAL, SLOW), (SLOW, BALANCED), (BALANCED, SLOW),
)  # fmt: skip
"""Pairs of kinds that a check should hold, the most important first. Pairs of smooth kinds come with them."""
SMOOTH = tuple(len(KINDS) * first + second for first in (CONSTANT, SLOW) for second in (CONSTANT, SLOW))
"""Blocks of the result, as :func:`pairs_of` names them, where nothing cancels and a plain sum drifts."""
FIRST, SECOND = (NORMAL, CONSTANT, SLOW, BALANCED), (NORMAL, BALANCED, CONSTANT, SLOW)
"""The order of kinds along either operand's parts."""
VALUE = 0.7
"""The value of a constant part. It takes all digits, so that sums of it are rounded."""
OUTLIERS = {"fp32": (20, 14, 10), "bf16": (20, 14, 10), "fp16": (14, 12, 10)}
"""Powers of two by which planted outliers are larger than the ordinary values beside them: fp16 ends at 2^16."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The kind of each part of both operands: of images, or of channels that the result has."""

    first: tuple[int, ...]
    second: tuple[int, ...]


def plain(problem: ConvProblem) -> Mixture:
    """A mixture of normal values alone."""
    first, second = _parts(problem)
    return Mixture((NORMAL,) * first, (NORMAL,) * second)


def mixture(problem: ConvProblem, start: tuple[int, int] = (NORMAL, NORMAL)) -> Mixture:
    """A mixture of all kinds, from the kinds in ``start`` on.

    Images, and the channels of WGRAD's second operand, get kinds from both ends, which are what a check compares;
    other channels in turn. Where groups are too small to hold all kinds, each group holds one pair of them.
    """
    first, second = _parts(problem)
    inside, outside = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    if problem.pass_ is Pass.WGRAD and problem.groups > 1 and inside < len(KINDS):
        ordered = _from(NEEDED, start)
        pairs = [ordered[rank] if rank < len(ordered) else (NORMAL, NORMAL) for rank in end_ranks(problem.groups)]
        return Mixture(
            tuple(pairs[c // inside][0] for c in range(first)), tuple(pairs[c // outside][1] for c in range(second))
        )
    rows, columns = _from(FIRST, start[0]), _from(SECOND, start[1])
    if problem.pass_ is Pass.WGRAD:
        return Mixture(_in_turn(rows, first), _at_ends(columns, second))
    return Mixture(_at_ends(rows, first), _in_turn(columns, second))


def _parts(problem: ConvProblem) -> tuple[int, int]:
    """How many parts either operand has."""
    if problem.pass_ is Pass.WGRAD:
        return problem.in_channels, problem.out_channels
    return problem.batch, problem.out_channels if problem.pass_ is Pass.FPROP else problem.in_channels


def _from(ordered: Sequence[T], start: T) -> tuple[T, ...]:
    """All of ``ordered``, turned round so that ``start`` comes first."""
    index = ordered.index(start)
    return (*ordered[index:], *ordered[:index])


def _in_turn(ordered: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` kinds of data, those of ``ordered`` again and again."""
    return tuple(ordered[index % len(ordered)] for index in range(count))


def _at_ends(ordered: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` kinds of data: those of ``ordered`` at both ends in turn, normal data between."""
    return tuple(ordered[rank] if rank < len(ordered) else NORMAL for rank in end_ranks(count))


def end_ranks(count: int) -> list[int]:
    """Ranks of ``count`` things: the first has 0, the last 1, the second 2, the last but one 3 and so on."""
    return [2 * index if 2 * index < count else 2 * (count - 1 - index) + 1 for index in range(count)]


def pairs_of(problem: ConvProblem, mixed: Mixture) -> torch.Tensor:
    """The pair of kinds behind each element of the result's first two axes, as ``first * 4 + second``, on the CPU."""
    first = torch.tensor(mixed.first, device="cpu", dtype=torch.int64)
    second = torch.tensor(mixed.second, device="cpu", dtype=torch.int64)
    if problem.pass_ is not Pass.WGRAD:
        return len(KINDS) * first[:, None] + second
    of_groups = first.view(problem.groups, -1).repeat_interleave(problem.out_channels // problem.groups, 0)
    return len(KINDS) * of_groups + second[:, None]


def apply(problem: ConvProblem, operands: tuple[torch.Tensor, torch.Tensor], mixed: Mixture) -> None:
    """Write the kinds of ``mixed`` over parts of normal operands."""
    for role, tensor, kinds in zip(problem.operands, operands, (mixed.first, mixed.second), strict=True):
        start = 0
        for view in _by_part(problem, role, tensor):
            kinds_here = kinds[start : start + len(view)]
            start += len(view)
            for kind in sorted({*kinds_here} - {NORMAL}):
                where = [index for index, kind_of_part in enumerate(kinds_here) if kind_of_part == kind]
                _write(problem, role, view, torch.tensor(where, device=tensor.device, dtype=torch.int64), kind)


def _by_part(problem: ConvProblem, role: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of an operand whose first axis is its parts: one, or one for each group that has parts of its own."""
    if problem.pass_ is Pass.WGRAD:
        return [tensor.transpose(0, 1)]
    if problem.pass_ is Pass.FPROP or role != "w":
        return [tensor]
    groups = tensor.view(problem.groups, -1, *tensor.shape[1:])
    return [groups.squeeze(2)] if groups.shape[2] == 1 else [group.transpose(0, 1) for group in groups]


def _write(problem: ConvProblem, role: str, view: torch.Tensor, where: torch.Tensor, kind: int) -> None:
    """Write data of ``kind`` over the parts ``where`` of an operand."""
    if kind == CONSTANT:
        view.index_fill_(0, where, VALUE)
    elif kind == SLOW:
        wave = _wave(view.shape[2:], view.device).to(view.dtype)
        view.index_copy_(0, where, wave.expand(len(where), *view.shape[1:]).contiguous())
    else:
        view.index_copy_(0, where, _balanced(problem, role, view.index_select(0, where)))


def _wave(space: Sequence[int], device: torch.device) -> torch.Tensor:
    """A slow wave: 1 plus half a cosine, whose argument runs from 0 to pi along each axis."""
    total = torch.zeros(tuple(space), dtype=torch.float64, device=device)
    for axis, length in enumerate(space):
        steps = torch.arange(length, dtype=torch.float64, device=device) / length
        total = total + steps.view([-1 if axis == other else 1 for other in range(len(space))])
    return 1.0 + 0.5 * torch.cos(math.pi * total)


def _balanced(problem: ConvProblem, role: str, parts: torch.Tensor) -> torch.Tensor:
    """``parts`` less their mean over all values that one result sums, so that sums by a constant factor cancel.

    An image is summed over the channels of a group; unchanged where these are one.
    """
    values = parts.double()
    if role != "w" and problem.pass_ is not Pass.WGRAD:
        groups = values.view(len(values), problem.groups, -1, *values.shape[2:])
        values = (groups - groups.mean(2, keepdim=True)).flatten(1, 2) if groups.shape[2] > 1 else values
    elif values[0].numel() > 1:
        values = values - values.mean(tuple(range(1, values.dim())), keepdim=True)
    return values.to(parts.dtype)


def apart(problem: ConvProblem) -> bool:
    """Whether outliers of both operands find room where none is multiplied by, or transformed beside, another's.

    An error of their product would be beside results that do not hold it.
    """
    if problem.pass_ is Pass.WGRAD:
        return problem.batch > 1
    some_without = problem.shape(problem.result)[1] > 1  # of the result's channels: those of the second operand
    return some_without and (problem.groups > 1 or _summed_channels(problem) > 1)


def _summed_channels(problem: ConvProblem) -> int:
    """Channels that a result of FPROP or DGRAD is the sum of."""
    return (problem.in_channels if problem.pass_ is Pass.FPROP else problem.out_channels) // problem.groups


def plant(
    problem: ConvProblem,
    operands: tuple[torch.Tensor, torch.Tensor],
    roles: Collection[str],
    images: Collection[int],
    seams: Iterable[int] = (),
) -> None:
    """Write each of :data:`OUTLIERS` into the operands with these ``roles``, where some results do not meet them.

    ``images`` are those that hold them, ``seams`` where tiles begin that have plans of their own. Those of the second
    operand are in the last channel of what a result is the sum of (behind the first group where that is one channel),
    or in WGRAD's last image, all others before it. Each of WGRAD's is read by one tap: beside it the other operand is
    zero. The largest is also where strides and dilation leave out a value of ``x``.
    """
    values = [2.0 ** (LOWERED[problem.dtype] + power) for power in OUTLIERS[problem.dtype]]
    for second, (role, tensor) in enumerate(zip(problem.operands, operands, strict=True)):
        if role not in roles:
            continue
        places = _places(problem, role)
        if problem.pass_ is Pass.WGRAD:
            last = {problem.batch - 1}
            with_outliers = images if len(roles) == 1 else last if second else {*images} - last
            # Of several in one channel others would hide what each does, and the middle one's taps are the most.
            channels, places = tensor.transpose(0, 1), [places[-1], *places[:-1]]
            largest = values[: max(1, len(channels) - 1)]
            _plant_in_turn(channels, largest, places, sorted(with_outliers))
            for place in places[: len(largest)]:
                _part_around(problem, role, place, operands[1 - second], sorted(with_outliers))
        elif second:
            for view in _by_part(problem, role, tensor):
                sums_one_channel = _summed_channels(problem) == 1 and problem.groups > 1
                parts = view[len(view) // problem.groups :] if sums_one_channel else view
                # Of several in one filter the largest alone would show.
                _plant_in_turn(parts, values[: max(1, len(parts) - 1)], places, [view.shape[1] - 1])
        else:
            _plant_images(problem, tensor, [*zip(places, values, strict=True)], images, _tiles(problem, role, seams))
        if role == "x" and (unread := _unread(problem)) is not None:
            within = sorted(with_outliers if problem.pass_ is Pass.WGRAD else images)
            where = torch.tensor(within, device=tensor.device, dtype=torch.int64)
            _at(tensor, 1, 0, unread)[where] = values[0]


def _plant_images(
    problem: ConvProblem,
    tensor: torch.Tensor,
    outliers: Sequence[tuple[tuple[int, ...], float]],
    images: Collection[int],
    tiles: Iterable[int],
) -> None:
    """Write outliers into the first channels of the first, last and middle group, and the largest into each tile."""
    inside = _summed_channels(problem)
    groups = (0, problem.groups - 1, problem.groups // 2) if inside > 1 else (0, 0, 0)
    planted = [(group * inside, *outlier) for group, outlier in zip(groups, outliers, strict=True)]
    (place, value), *_ = outliers
    planted += [(0, (tile, *place[1:]), value) for tile in tiles]
    where = torch.tensor(sorted(images), device=tensor.device, dtype=torch.int64)
    for channel, at, outlier in reversed(planted):
        _at(tensor, 1, channel, at)[where] = outlier


def _plant_in_turn(
    view: torch.Tensor, values: Sequence[float], places: Sequence[tuple[int, ...]], within: Sequence[int]
) -> None:
    """Write outliers in turn: none in the first part, then one of each magnitude in the parts after it, and so on.

    Where there are too few parts, the last one holds the rest.

    ``within`` says where along the view's second axis.
    """
    where = torch.tensor(within, device=view.device, dtype=torch.int64)
    for turn in reversed(range(len(values))):
        first = min(turn + 1, len(view) - 1)
        _at(view[first :: len(values) + 1], 2, None, places[turn])[:, where] = values[turn]


def _part_around(
    problem: ConvProblem, role: str, place: tuple[int, ...], other: torch.Tensor, images: Sequence[int]
) -> None:
    """Zero what WGRAD multiplies by ``place`` of ``role``, but by one tap; of one tap in every other channel.

    All other results then do not hold an outlier that lies there, as beside gradients that are mostly zero.
    """
    met_places = [_met(axis, role, at) for axis, at in zip(problem.axes, place, strict=True)]
    if not all(met_places):
        return
    where = tuple(
        torch.meshgrid(*(torch.tensor(m, device=other.device, dtype=torch.int64) for m in met_places), indexing="ij")
    )
    read_place = tuple(m[0] for m in met_places)
    for image in images:
        channels = other[image] if problem.taps > 1 else other[image][1::2]
        places = channels.movedim(0, -1)
        places[where] = 0.0
        if problem.taps > 1:
            places[read_place] = 2.0 ** (LOWERED[problem.dtype] + OCTAVES)


def _met(axis: Axis, role: str, place: int) -> list[int]:
    """The places along the other of ``x`` and ``y`` that the taps multiply by ``place``, in order of taps."""
    taps = [tap * axis.dilation - axis.before for tap in range(axis.kernel)]
    if role == "y":
        return [at for at in (place * axis.stride + tap for tap in taps) if 0 <= at < axis.size]
    quotients = (divmod(place - tap, axis.stride) for tap in taps)
    return [at for at, rest in quotients if rest == 0 and 0 <= at < axis.out]


def _at(tensor: torch.Tensor, axis: int, channel: int | None, place: Sequence[int]) -> torch.Tensor:
    """A view of one place of planes, whose axes begin at ``axis``; of one ``channel``, if any is named."""
    for index in (*(() if channel is None else (channel,)), *place):
        tensor = tensor.select(axis, index)
    return tensor


def _places(problem: ConvProblem, role: str) -> list[tuple[int, ...]]:
    """The first and last place of a plane, cropped margins left out, and the middle."""
    if role == "w":
        spans = [(0, axis.kernel - 1) for axis in problem.axes]
    elif role == "y":
        spans = [(0, axis.out - 1) for axis in problem.axes]
    else:
        spans = [_read(axis) for axis in problem.axes]
    first, last = tuple(span[0] for span in spans), tuple(span[1] for span in spans)
    return [first, last, tuple((low + high) // 2 for low, high in spans)]


def _read(axis: Axis) -> tuple[int, int]:
    """The first and the last input that an output may read."""
    first = max(0, -axis.before)
    return first, max(first, min(axis.size, (axis.out - 1) * axis.stride - axis.before + axis.reach) - 1)


def _unread(problem: ConvProblem) -> tuple[int, ...] | None:
    """A place between values that outputs read, if there is one."""
    unread = [_read(axis)[0] for axis in problem.axes]
    for index, axis in enumerate(problem.axes):
        inside = range(*_read(axis))
        skipped = next((at for at in inside if not _met(axis, "x", at)), None)
        if skipped is not None:
            unread[index] = skipped
            return tuple(unread)
    return None


def _tiles(problem: ConvProblem, role: str, seams: Iterable[int]) -> list[int]:
    """Where along the outermost axis of an operand the tiles begin whose results begin at ``seams``."""
    axis, extent = problem.axes[0], problem.shape(role)[2]
    starts = (seam // axis.stride if role == "y" else seam * axis.stride for seam in seams)
    return [min(place, extent - 1) for place in starts]
