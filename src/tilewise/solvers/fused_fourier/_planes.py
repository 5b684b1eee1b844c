"""Depthwise convolutions of planes in fused kernels: configs, workspace and launches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.kernels.cuda import depthwise2d
from tilewise.kernels.cuda.depthwise2d import SIZES, Adder, Program, Window
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.bases import least_whole, whole_placement
from tilewise.solvers.common.cuda_run import FIRST, OUT, SECOND, WORKSPACE, Step
from tilewise.solvers.common.tiles import PROCESSORS, integer
from tilewise.solvers.fused_fourier._operands import Operand, correlates, operands

__all__ = [
    "SHARED", "basis", "configs", "constant", "filters", "resident_blocks", "steps", "too_large", "transformed",
    "workspace",
]  # fmt: skip

THREADS = (64, 256)
"""Least and most threads of a block that are worth trying, where planes can be chosen."""
PLANES = (1, 2, 3, 4, 6, 8, 16, 32, 64)
"""Planes of a block that are worth trying."""
SUMMING = ("depthwise2d_gradient", "depthwise2d_summed")
"""Kernels that hold sums in registers."""
REGISTERS = 65536
LEAST_SHARED = 48
"""Points of a transform from which on two threads are tried for each."""
SHARED = 233472
"""Bytes of shared memory of a multiprocessor; a block takes 1 KiB beside its own."""


def too_large(p: ConvProblem) -> list[str]:
    """Reasons where a plane needs a larger basis than there is."""
    return [
        f"along {name} needs a basis of {least_whole(axis, p.pass_)}, at most {SIZES[-1]}"
        for name, axis in zip(p.space, p.axes, strict=True)
        if least_whole(axis, p.pass_) > SIZES[-1]
    ]


def basis(p: ConvProblem) -> tuple[int, int]:
    """The smallest sizes in which nothing wraps onto what is kept."""
    n1, n2 = (next(n for n in SIZES if n >= least_whole(axis, p.pass_)) for axis in p.axes)
    return n1, n2


def configs(p: ConvProblem) -> Iterable[Config]:
    """Configs by threads of a transform, planes of a block, and in a weight gradient shares of the batch; the best
    first.
    """
    sizes = basis(p)
    ranked: list[tuple[float, Config]] = []
    for split in (1, 2):
        points = max(sizes) // split
        if points > depthwise2d.WHOLE_ROW or (split == 2 and max(sizes) < LEAST_SHARED):
            continue
        for planes in PLANES:
            if planes > p.batch * p.in_channels:
                break
            program = _program(p, sizes, planes, split, 0)
            if program.problems() or (planes > 1 and program.threads > THREADS[1]):
                break
            idle = program.threads / (planes * program.row_threads)
            few = max(1.0, THREADS[0] / program.threads)
            rank = idle * few * (1.0 if points <= depthwise2d.FEW_ENOUGH else 1.3) * (1 + 0.02 * planes)
            base = Config(basis=sizes, planes=planes, split=split)
            # Shares matter more than planes: of filter gradients the first variant of each is tried before any second.
            step = 1.0 if p.pass_ is Pass.WGRAD else 0.01
            ranked += [(rank * (1 + step * i), c) for i, c in enumerate(_variants(p, base, program))]
    ranked.sort(key=lambda entry: entry[0])
    return [c for _, c in ranked]


def _variants(p: ConvProblem, base: Config, program: Program) -> list[Config]:
    """Configs with registers unbounded or for one more block; in a weight gradient with one or two waves of shares."""
    resident = resident_blocks(program)
    by_blocks = [(resident, base)]
    if program.threads * resident < 512 and resident < SHARED // (program.shared + 1024):
        by_blocks.append((resident + 1, Config(**base, resident=resident + 1)))
    if p.pass_ is not Pass.WGRAD:
        return [c for _, c in by_blocks]
    blocks = -(-p.in_channels // program.planes)
    waves = [(max(1, PROCESSORS * n // blocks), c) for n, c in reversed(by_blocks)]
    listed = [Config(**c, shares=min(p.batch, n * wave)) for n in (1, 2) for wave, c in waves]
    return list(dict.fromkeys(listed))


def resident_blocks(program: Program) -> int:
    """About how many blocks a multiprocessor holds."""
    points = max(program.n1 // program.split1, program.n2 // program.split2)
    sums = 2 * points * program.results if program.name in SUMMING and not program.keep else 0
    registers = min(255, 2 * points + sums + 56)
    # Each of four schedulers has a quarter of the registers, for whole warps.
    warps = 4 * (REGISTERS // 4 // (32 * -(-registers // 8) * 8))
    return max(1, min(SHARED // (program.shared + 1024), 32 * warps // program.threads, 32))


def _program(p: ConvProblem, sizes: tuple[int, int], planes: int, split: int, resident: int,
             tensors: dict[str, Operand] | None = None) -> Program:  # fmt: skip
    """The pass's kernel; without ``tensors`` no accesses in pairs are assumed."""
    name = "depthwise2d_gradient" if p.pass_ is Pass.WGRAD else "depthwise2d_image"
    roles = ("x", "y", "w") if p.pass_ is Pass.WGRAD else (p.operands[0], p.result)
    windows = tuple(_window(p, role, tensors) for role in roles)
    split1, split2 = (split if n >= LEAST_SHARED else 1 for n in sizes)
    dtype, wide = p.torch_dtype(p.operands[0]), p.out_dtype == "fp32"
    return Program(name, *sizes, windows, dtype, planes, split1, split2, resident, correlates(p), wide)


def _window(p: ConvProblem, role: str, tensors: dict[str, Operand] | None) -> Window:
    """Where a tensor's elements lie in the basis."""
    rows, columns = (whole_placement(axis, role, p.pass_) for axis in p.axes)
    pairs = tensors is not None and tensors[role].pairs
    return Window(rows.count, columns.count, rows.lead, columns.lead, pairs, rows.apart, columns.apart)


def _sizes(c: Config) -> tuple[int, int]:
    """The basis of a config. Raises ``ValueError`` for what is none."""
    sizes = c["basis"]
    if not isinstance(sizes, tuple) or len(sizes) != 2 or any(n not in SIZES for n in sizes):
        raise ValueError(f"basis={sizes!r}: two of {', '.join(map(str, SIZES))} would do")
    return sizes


def workspace(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are not kept, or of a weight gradient's shares where there are several."""
    if p.pass_ is Pass.WGRAD:
        shares = integer(c, "shares")
        return 4 * shares * math.prod(p.shape("w")) if shares > 1 else 0
    return 0 if p.constant_weight else _spectra(p, c)


def constant(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are kept."""
    return _spectra(p, c) if p.constant_weight else 0


def _spectra(p: ConvProblem, c: Config) -> int:
    """Bytes of all filters' spectra."""
    return 8 * p.in_channels * depthwise2d.spectrum_length(*_sizes(c))


def transformed(p: ConvProblem, c: Config) -> int:
    """Planes times points, over all forward and inverse transforms."""
    planes = p.in_channels * (2 * p.batch + (not p.constant_weight))
    return planes * math.prod(_sizes(c))


def _checked(p: ConvProblem, c: Config, tensors: dict[str, Operand] | None) -> Program:
    """The kernel of a config. Raises ``ValueError`` where it does not fit the problem."""
    sizes = _sizes(c)
    if any(n < least_whole(axis, p.pass_) for n, axis in zip(sizes, p.axes, strict=True)):
        raise ValueError(f"basis={sizes}: must be at least {tuple(least_whole(axis, p.pass_) for axis in p.axes)}")
    program = _program(
        p, sizes, integer(c, "planes"), integer(c, "split"), integer(c, "resident") if "resident" in c else 0, tensors
    )
    if problems := program.problems():
        raise ValueError("; ".join(problems))
    return program


def steps(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
    """The launches. Raises ``ValueError`` for a config that does not fit the problem."""
    tensors = operands(p, a, b, out)
    program = _checked(p, c, tensors)
    if p.pass_ is Pass.WGRAD:
        return _gradient(p, c, program, tensors)
    if p.constant_weight:
        return [_image(p, program, tensors, SECOND)]
    return [_filter(p, program, tensors["w"], (SECOND, WORKSPACE)), _image(p, program, tensors, WORKSPACE)]


def filters(p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
    """The launch that transforms filters to be kept: the first tensor is the weight, the result what is kept."""
    return [_filter(p, _checked(p, c, None), Operand.of(p, "w", weight), (FIRST, OUT))]


def _filter(p: ConvProblem, program: Program, w: Operand, tensors: tuple[int, int]) -> Step:
    """The filters' transform. ``tensors`` are the numbers of the weight and of its spectra, in the order of threads."""
    source, target = tensors
    filters = Program(
        "depthwise2d_filter", program.n1, program.n2, (_window(p, "w", {"w": w}),), program.dtype,
        min(program.planes, p.in_channels), program.split1, program.split2,
    )  # fmt: skip
    return Step(
        filters, -(-p.in_channels // filters.planes), ((source, w.start), (target, 0)),
        (p.in_channels, p.in_channels, 0, w.channel, *w.space, _scale(program)),
    )  # fmt: skip


def _image(p: ConvProblem, program: Program, tensors: dict[str, Operand], spectra: int) -> Step:
    """The launch over all images; ``spectra`` is the number of the tensor with the filters' spectra."""
    x, y = tensors[p.operands[0]], tensors[p.result]
    planes = p.batch * p.in_channels
    return Step(
        program, -(-planes // program.planes), ((FIRST, x.start), (spectra, 0), (OUT, y.start)),
        (planes, p.batch, x.channel, x.image, *x.space, y.channel, y.image, *y.space),
    )  # fmt: skip


def _scale(program: Program) -> float:
    """The scale of an inverse transform."""
    return 1.0 / (program.n1 * program.n2)


def _gradient(p: ConvProblem, c: Config, program: Program, tensors: dict[str, Operand]) -> list[Step]:
    """The launches of a weight gradient. Raises ``ValueError`` for more shares than images."""
    x, y, w = (tensors[role] for role in "xyw")
    shares, channels, scale = integer(c, "shares"), p.in_channels, _scale(program)
    if shares > p.batch:
        raise ValueError(f"shares={shares}: at most one for each of {p.batch} images")
    height, width = p.shape("w")[2:]
    operand = (channels, p.batch, shares, x.channel, x.image, *x.space, y.channel, y.image, *y.space)
    grid = shares * -(-channels // program.planes)
    if shares == 1:
        pointers = ((FIRST, x.start), (SECOND, y.start), (OUT, w.start))
        return [Step(program, grid, pointers, (*operand, 0, w.channel, *w.space, scale))]
    taps = height * width
    partial = _to_workspace(program, height, width)
    elements = channels * taps
    adder = Adder(program.dtype, program.wide)
    return [
        Step(
            partial, grid, ((FIRST, x.start), (SECOND, y.start), (WORKSPACE, 0)),
            (*operand, elements, taps, width, 1, scale),
        ),
        Step(
            adder, -(-elements // adder.threads), ((WORKSPACE, 0), (OUT, w.start)),
            (elements, shares, height, width, channels, 0, w.channel, *w.space),
        ),
    ]  # fmt: skip


def _to_workspace(program: Program, height: int, width: int) -> Program:
    """The weight gradient's kernel that writes shares, contiguous and in fp32, into the workspace."""
    first, second, result = program.windows
    dense = Window(height, width, 0, 0, width % 2 == 0, result.down, result.along)
    return replace(program, windows=(first, second, dense), wide=True)
