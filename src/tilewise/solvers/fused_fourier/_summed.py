"""Sums of products of planes' spectra in one kernel: roles of the tensors, configs, workspace and launches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewise.kernels.cuda import depthwise2d
from tilewise.kernels.cuda.depthwise2d import SIZES, Adder, Program, Window
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.bases import Placement, least_whole, whole_placement
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.cuda_run import FIRST, OUT, SECOND, WORKSPACE, Step
from tilewise.solvers.common.tiles import PROCESSORS, integer
from tilewise.solvers.fused_fourier._operands import Operand, operands
from tilewise.solvers.fused_fourier._planes import SHARED, resident_blocks

__all__ = [
    "arena", "basis", "configs", "extents", "filters", "handicap", "keeps", "multiplied", "spectra", "steps",
    "too_large", "transformed",
]  # fmt: skip

PLANES = (1, 2, 3, 4, 6, 8, 16)
"""Planes of a block that are worth trying."""
MOST = 16
"""How many configs are offered."""
RESULTS = (1, 2, 4)
"""Results of a block that are worth trying."""
THREADS = (64, 256)
"""Least and most threads of a block that are worth trying, where planes can be chosen."""
LEAST_SHARED = 24
"""Points of a transform from which on two threads are tried for each."""
MOST_THREADS = 512
"""Threads of a multiprocessor beyond which another block is not worth its registers."""
ENOUGH_WARPS = 12
"""Warps of a multiprocessor that hide each other's waiting."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Which tensor takes which part in the sums.

    Each plane of ``many`` (outer index of the result, summed index) is transformed in the kernel that sums, and
    multiplied with planes of ``few`` (summed index, inner index of the result), whose spectra are made before. Indices
    are named by the strides of :class:`Operand`: ``image`` or ``channel``. ``mirrored`` says that the sum is the wanted
    correlation backwards, as its operands have changed places.
    """

    many: str
    few: str
    outer: str
    sum_many: str
    sum_few: str
    inner_few: str
    outer_result: str
    inner_result: str
    mirrored: bool = False


FORWARD = Roles("x", "w", "image", "channel", "image", "channel", "image", "channel")
BACKWARD = Roles("y", "w", "image", "channel", "channel", "image", "image", "channel")
FEW_OUTPUTS = Roles("x", "y", "channel", "image", "image", "channel", "image", "channel")
FEW_INPUTS = Roles("y", "x", "channel", "image", "image", "channel", "channel", "image", mirrored=True)


def roles(p: ConvProblem) -> Roles:
    """The roles for ``p``. In a weight gradient the operand with more channels is the one transformed while summing."""
    if p.pass_ is Pass.WGRAD:
        return FEW_OUTPUTS if p.out_channels <= p.in_channels else FEW_INPUTS
    return FORWARD if p.pass_ is Pass.FPROP else BACKWARD


def extents(p: ConvProblem) -> tuple[int, int]:
    """How many results each plane contributes to, and how many products are summed."""
    if p.pass_ is Pass.WGRAD:
        return min(p.in_channels, p.out_channels), p.batch
    channels = p.out_channels, p.in_channels
    return channels if p.pass_ is Pass.FPROP else (channels[1], channels[0])


def _planes(p: ConvProblem) -> int:
    """Planes of the result for each of a sum's results."""
    return max(p.in_channels, p.out_channels) if p.pass_ is Pass.WGRAD else p.batch


def keeps(p: ConvProblem) -> bool:
    """Whether the few spectra are those of a constant filter."""
    return p.constant_weight and p.pass_ is not Pass.WGRAD


def _place(p: ConvProblem, axis: Axis, role: str) -> Placement:
    """Where a tensor lies in the basis.

    Mirrored, place t of the filter is the correlation's lag -t, so ``y`` moves up by the filter's reach to keep lags
    from being negative.
    """
    place = whole_placement(axis, role, p.pass_)
    return replace(place, lead=place.lead + axis.reach - 1) if roles(p).mirrored and role == "y" else place


def _least(p: ConvProblem, axis: Axis) -> int:
    """The smallest size in which nothing wraps onto what is kept."""
    moved = _place(p, axis, roles(p).many)
    return max(least_whole(axis, p.pass_), moved.lead + max(moved.count - 1, 0) * moved.step + 1)


def too_large(p: ConvProblem) -> list[str]:
    """Reasons where a plane needs a larger basis than there is."""
    return [
        f"along {name} needs a basis of {_least(p, axis)}, at most {SIZES[-1]}"
        for name, axis in zip(p.space, p.axes, strict=True)
        if _least(p, axis) > SIZES[-1]
    ]


def basis(p: ConvProblem) -> tuple[int, int]:
    """The smallest sizes in which nothing wraps onto what is kept."""
    n1, n2 = (next(n for n in SIZES if n >= _least(p, axis)) for axis in p.axes)
    return n1, n2


@functools.lru_cache(maxsize=1024)
def configs(p: ConvProblem) -> tuple[Config, ...]:
    """Configs by results of a block, threads of a transform, planes of a block and shares of each sum."""
    sizes, (most, _) = basis(p), extents(p)
    ranked: list[tuple[float, Config]] = []
    for results in RESULTS:
        if results > 1 and results >= 2 * most:
            break
        for split in (1, 2):
            if max(sizes) // split > depthwise2d.WHOLE_ROW or (split == 2 and max(sizes) < LEAST_SHARED):
                continue
            for planes in PLANES:
                if planes > _planes(p):
                    break
                program = _program(p, sizes, planes, split, results)
                if program.problems() or (planes > 1 and program.threads > THREADS[1]):
                    break
                if program.keep and results > 1:
                    break
                ranked += _variants(p, program, Config(basis=sizes, planes=planes, split=split, results=results))
    ranked.sort(key=lambda entry: entry[0])
    listed = dict.fromkeys(c for _, c in ranked[:MOST])
    if all(integer(c, "shares") > 1 for c in listed):  # what fits most limits
        listed |= dict.fromkeys([Config(**{**ranked[0][1], "shares": 1})])
    return tuple(listed)


def _variants(p: ConvProblem, program: Program, base: Config) -> Iterator[tuple[float, Config]]:
    """Rank and config for registers unbounded or for one more block, with one and two waves of blocks."""
    most, depth = extents(p)
    fitting = resident_blocks(program)
    blocks = -(-most // program.results) * -(-_planes(p) // program.planes)
    choices = [(fitting, base)]
    if fitting * program.threads < MOST_THREADS and fitting < SHARED // (program.shared + 1024):
        choices.append((fitting + 1, Config(**base, resident=fitting + 1)))
    for waves, (resident, c) in itertools.product((1, 2), choices):
        shares = max(1, min(depth, waves * PROCESSORS * resident // blocks))
        bound = replace(program, resident=resident if c is not base else 0)
        yield _rank(p, bound, shares), Config(**c, shares=shares)


def _rank(p: ConvProblem, program: Program, shares: int) -> float:
    """A rule of thumb for the time relative to the least arithmetic on a GPU that is filled."""
    (most, _), fitting = extents(p), resident_blocks(program)
    groups = -(-most // program.results)
    idle = program.threads / (program.planes * program.row_threads)
    warps = fitting * program.threads / 32
    # Each group transforms all planes again; a block's planes share what they read of the others' spectra.
    work = groups * (1 + 0.25 * program.results * (1 + 1 / program.planes)) / 1.25
    places = PROCESSORS * fitting
    waves = shares * groups * -(-_planes(p) // program.planes) / places
    partly = (1.1 if waves > 1.5 else 1.0) * (1.05 if program.resident else 1.0)  # bound registers may spill
    return work * idle * max(1.0, ENOUGH_WARPS / warps) * (1 + 0.01 * program.planes) / min(1.0, waves) * partly


def handicap(p: ConvProblem, c: Config) -> float:
    """How much slower than the best config of a layer with one result ``c`` may be, by :func:`_rank`."""
    return _rank(p, _checked(p, c, None), integer(c, "shares"))


def _program(p: ConvProblem, sizes: tuple[int, int], planes: int, split: int, results: int, resident: int = 0,
             tensors: dict[str, Operand] | None = None, dense: bool = False) -> Program:  # fmt: skip
    """The sums' kernel; without ``tensors`` no accesses in pairs are assumed, ``dense`` writes shares into the
    workspace.
    """
    who = roles(p)
    pairs = {role: tensors is not None and tensors[role].pairs for role in (who.many, p.result)}
    windows = (_window(p, who.many, pairs[who.many]), _window(p, p.result, pairs[p.result] and not who.mirrored))
    if dense:
        rows, columns = _kept(p)
        windows = (windows[0], replace(windows[1], height=rows, width=columns, vector=columns % 2 == 0))
    split1, split2 = (split if n >= LEAST_SHARED else 1 for n in sizes)
    dtype, wide = p.torch_dtype(who.many), dense or p.out_dtype == "fp32"
    return Program(
        "depthwise2d_summed", *sizes, windows, dtype, planes, split1, split2, resident, p.pass_ is not Pass.DGRAD, wide,
        results,
    )  # fmt: skip


def _window(p: ConvProblem, role: str, pairs: bool) -> Window:
    """Where a tensor's elements lie in the basis."""
    rows, columns = (_place(p, axis, role) for axis in p.axes)
    return Window(rows.count, columns.count, rows.lead, columns.lead, pairs, rows.apart, columns.apart)


def _kept(p: ConvProblem) -> tuple[int, int]:
    """Rows and columns of the result that are written."""
    rows, columns = (_place(p, axis, p.result).count for axis in p.axes)
    return rows, columns


def _sizes(p: ConvProblem, c: Config) -> tuple[int, int]:
    """The basis of a config. Raises ``ValueError`` for what is none."""
    sizes = c["basis"]
    if not isinstance(sizes, tuple) or len(sizes) != 2 or any(n not in SIZES for n in sizes):
        raise ValueError(f"basis={sizes!r}: two of {', '.join(map(str, SIZES))} would do")
    least = tuple(_least(p, axis) for axis in p.axes)
    if any(n < wanted for n, wanted in zip(sizes, least, strict=True)):
        raise ValueError(f"basis={sizes}: must be at least {least}")
    return sizes


def spectra(p: ConvProblem, c: Config) -> int:
    """Bytes of the few planes' spectra."""
    return 8 * math.prod(extents(p)) * depthwise2d.spectrum_length(*_sizes(p, c))


def _slots(p: ConvProblem, c: Config) -> tuple[Arena, Slot | None, Slot | None]:
    """The workspace, the few spectra unless they are kept, and the shares unless there is only one."""
    workspace, shares = Arena(), integer(c, "shares")
    few = None if keeps(p) else workspace.add((spectra(p, c) // 8,), torch.complex64)
    planes = _planes(p) * extents(p)[0] * math.prod(_kept(p))
    return workspace, few, workspace.add((shares, planes), torch.float32) if shares > 1 else None


def arena(p: ConvProblem, c: Config) -> Arena:
    """The workspace of a config."""
    return _slots(p, c)[0]


def transformed(p: ConvProblem) -> int:
    """Planes times points of the transforms that every config does: those of operands and of results."""
    results, depth = extents(p)
    few = 0 if keeps(p) else results * depth
    return (_planes(p) * (depth + results) + few) * math.prod(basis(p))


def multiplied(p: ConvProblem) -> int:
    """Complex multiplications of spectra, times two."""
    return _planes(p) * math.prod(extents(p)) * math.prod(basis(p))


def _checked(p: ConvProblem, c: Config, tensors: dict[str, Operand] | None) -> Program:
    """The kernel of a config. Raises ``ValueError`` where it does not fit the problem."""
    shares, depth = integer(c, "shares"), extents(p)[1]
    if shares > depth:
        raise ValueError(f"shares={shares}: at most one for each of {depth} products")
    resident = integer(c, "resident") if "resident" in c else 0
    program = _program(
        p, _sizes(p, c), integer(c, "planes"), integer(c, "split"), integer(c, "results"), resident, tensors, shares > 1
    )
    if problems := program.problems():
        raise ValueError("; ".join(problems))
    return program


def steps(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
    """The launches. Raises ``ValueError`` for a config that does not fit the problem."""
    tensors, who = operands(p, a, b, out), roles(p)
    program = _checked(p, c, tensors)
    _, few, partial = _slots(p, c)
    number = dict(zip((*p.operands, p.result), (FIRST, SECOND, OUT), strict=True))
    source = (number[who.few], 0) if few is None else (WORKSPACE, few.offset)
    queued = []
    if few is not None:
        queued.append(_few(p, program, tensors[who.few], number[who.few], source))
    many, result = tensors[who.many], tensors[p.result]
    planes, (results, depth), shares = _planes(p), extents(p), integer(c, "shares")
    rows, columns = _kept(p)
    grid = shares * -(-planes // program.planes) * -(-results // program.results)
    outer, inner = getattr(result, who.outer_result), getattr(result, who.inner_result)
    target, lines = result.start, result.space
    if who.mirrored:  # the last comes first
        target += out.element_size() * ((rows - 1) * lines[0] + (columns - 1) * lines[1])
        lines = (-lines[0], -lines[1])
    read = (
        planes, depth, results, shares, getattr(many, who.outer), getattr(many, who.sum_many), *many.space,
    )  # fmt: skip
    if partial is None:
        pointers = ((number[who.many], many.start), source, (OUT, target))
        return [*queued, Step(program, grid, pointers, (*read, 0, outer, inner, *lines))]
    taps = rows * columns
    elements = planes * results * taps
    adder = Adder(program.dtype, p.out_dtype == "fp32")
    queued.append(
        Step(
            program, grid, ((number[who.many], many.start), source, (WORKSPACE, partial.offset)),
            (*read, elements, results * taps, taps, columns, 1),
        )
    )  # fmt: skip
    scalars = (elements, shares, rows, columns, results, outer, inner, *lines)
    queued.append(Step(adder, -(-elements // adder.threads), ((WORKSPACE, partial.offset), (OUT, target)), scalars))
    return queued


def filters(p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
    """The launch that transforms filters to be kept: the first tensor is the weight, the result what is kept."""
    return [_few(p, _checked(p, c, None), Operand.of(p, "w", weight), FIRST, (OUT, 0))]


def _few(p: ConvProblem, program: Program, planes: Operand, source: int, target: tuple[int, int]) -> Step:
    """The transform of the few planes; spectra are in the order of threads, all results of a product together."""
    who, (results, depth) = roles(p), extents(p)
    count = results * depth
    kernel = Program(
        "depthwise2d_filter", program.n1, program.n2, (_window(p, who.few, planes.pairs),), p.torch_dtype(who.few),
        min(program.planes, count), program.split1, program.split2,
    )  # fmt: skip
    outer, inner = getattr(planes, who.sum_few), getattr(planes, who.inner_few)
    return Step(
        kernel, -(-count // kernel.planes), ((source, planes.start), target),
        (count, results, outer, inner, *planes.space, 1.0 / (program.n1 * program.n2)),
    )  # fmt: skip
