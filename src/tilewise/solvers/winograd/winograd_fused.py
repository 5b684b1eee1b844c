"""Convolution with fewer products along one axis, transforms and products in one kernel on a GPU's matrix units."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator

import torch

from tilewise.kernels.building.target import sought
from tilewise.kernels.cuda.launch import unavailable
from tilewise.kernels.cuda.winograd import CHANNELS, DEPTH
from tilewise.machine.device import torch_device
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run, Solver
from tilewise.solvers.common.cuda_run import Step, compiled
from tilewise.solvers.common.split_products import refused
from tilewise.solvers.common.tiles import PROCESSORS, config_reasons, integer
from tilewise.solvers.common.views import View
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.winograd import _fused as fused

__all__ = ["WinogradFused"]

CAPABILITY = (9, 0)
"""The compute capability that has these matrix units: others do not have their instructions."""
MOST_OFFERED = 2
OVERHEAD = 12
"""Time that a block takes beside its tiles, in tiles of each half."""
RATE, FEW_TAPS = 3.7, 1.5
"""``RATE`` is that of blocks of many tiles, relative to cuBLAS in fp32, counting the products that are done.
``FEW_TAPS`` is the number of taps along the other axis at which transforms take half of the time."""


class WinogradFused(ConvSolver):
    """Winograd convolution F(4, r) along one axis, with only the transformed filters in memory.

    The axis is the last one with taps to save. The kernel that multiplies also transforms: it brings tiles' inputs to n
    = r + 3 points (Winograd 1980; Lavin and Gray 2016, section 4) as two fp16 parts each (Ootomo and Yokota 2022,
    section 3), three products of which are summed in fp32. Other taps are summed in the matrix units. A thread block
    has two times ``places`` tiles. Where prepared filters exceed a workspace limit, the result's channels are computed
    in ``parts``, one after another. Prepared filters are kept where they are constant.
    """

    name, version = "winograd_fused", 2
    passes = frozenset({Pass.FPROP, Pass.DGRAD})
    devices = frozenset({"cuda"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({1, 2})
    compiles = True
    adds_bias = True
    kin = "Winograd's transforms on matrix units"
    accumulates = True
    most_configs = 1
    amounts = Solver.amounts | {"parts", "places"}
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: many groups, TF32, strides, no axis to save products on, large images, another kind of GPU."""
        reasons = refused(p)
        if fused.along(p) is None:
            reasons.append(
                f"saves products along an axis of 2 to {fused.MOST_ALONG} taps beside one of at most "
                f"{fused.MOST_ACROSS}, both without stride or dilation"
            )
        if reasons:
            return reasons
        layouts = _fitting(p)
        if not layouts:
            reasons.append(f"no block fits shared memory with a kernel of {'x'.join(str(a.kernel) for a in p.axes)}")
        elif any(fused.largest(layout) > fused.LARGEST for layout in layouts):
            reasons.append(f"there are more than {fused.LARGEST} elements in an image, or lines' places in all of them")
        elif any(fused.too_far(layout, fused.source_view(p)) for layout in layouts):
            reasons.append(f"what a block reads at a time lies more than {fused.LARGEST} bytes apart")
        return reasons or _device_lacks(p)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Blocks whose waves take the least time."""
        return [c for c, _ in _listed(p, None)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, in as few parts of the channels as fit into ``ceiling`` bytes."""
        if only is not None:
            return [(c, layout.workspace) for c in only if (layout := _made(p, c)) is not None]
        return list(_listed(p, ceiling))

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of one part's prepared filters unless they are kept, and of the images' peaks."""
        return _layout(p, c).workspace

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of prepared constant filters."""
        return _layout(p, c).kept

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms filters and splits them into fp16 parts."""
        run = compiled(self.filters(p, c, weight), weight.device)
        return lambda weight, kept, workspace: run.run_pointers(weight.data_ptr(), 0, kept.data_ptr(), 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products at the points, including those of partly filled blocks and waves, after a search for peaks."""
        layout = _layout(p, c)
        tiles = 2 * layout.places * layout.blocks * p.groups
        depth = -(-layout.read // DEPTH) * DEPTH * layout.taps
        flops = 2 * tiles * CHANNELS * layout.program.points * depth
        rate = RATE * layout.taps / (layout.taps + FEW_TAPS) * layout.places / (layout.places + OVERHEAD)
        busy = layout.blocks / (PROCESSORS * _waves(layout))
        searched = p.nbytes(p.operands[0])
        packed = layout.kept if layout.keeps else 2 * layout.workspace * len(layout.parts) * p.groups
        kernels = p.groups * 2 * len(layout.parts)
        apart = searched + (0 if layout.keeps else packed // 2)
        return Cost(flops, p.bytes + searched + packed, kernels, efficiency=rate * busy, apart=apart)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        return compiled(self.steps(p, c, a, b, out), a.device)

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """The launches. Raises ``SolverUnavailable`` for a config that does not fit the problem."""
        with config_reasons(p, c):
            return fused.steps(_layout(p, c), View.of(a), View.of(b), View.of(out))

    def filters(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
        """The launches that prepare filters to be kept. Raises as :meth:`steps`."""
        with config_reasons(p, c):
            return fused.filters(_layout(p, c), View.of(weight))


def _device_lacks(p: ConvProblem) -> list[str]:
    """Reasons why the GPU that is sought, or else is here, cannot run the kernels, or why nothing can compile them."""
    if p.device_type != "cuda":
        return []
    if reason := unavailable():
        return [reason]
    if (architecture := sought()) is not None:
        capability = architecture.major, architecture.minor
    else:
        try:
            device = torch_device(p.device)
        except ValueError:
            return []
        capability = torch.cuda.get_device_capability(device)
    return [] if capability == CAPABILITY else [f"needs compute capability 9.0, not {capability[0]}.{capability[1]}"]


@functools.lru_cache(maxsize=4096)
def _layout(p: ConvProblem, c: Config) -> fused.Layout:
    """The layout of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    return fused.Layout(p, integer(c, "places"), integer(c, "parts", 1))


def _made(p: ConvProblem, c: Config) -> fused.Layout | None:
    """The layout of a config, or ``None`` for what is no config of ``p``."""
    try:
        return _layout(p, c)
    except (KeyError, ValueError):
        return None


def _fitting(p: ConvProblem) -> list[fused.Layout]:
    """A layout for each number of tiles that fits shared memory, with all channels in one part."""
    layouts = (_made(p, Config(places=places)) for places in fused.PLACES)
    return [layout for layout in layouts if layout is not None]


def _waves(layout: fused.Layout) -> int:
    """How many times a group's blocks fill the multiprocessors, added over the parts."""
    place_blocks = layout.place_blocks * layout.segments
    return sum(-(-(-(-count // CHANNELS) * place_blocks) // PROCESSORS) for _, count in layout.parts)


def _listed(p: ConvProblem, ceiling: int | None) -> Iterator[tuple[Config, int]]:
    """Configs with their workspace, the fastest by estimate first; in the most parts where none fits ``ceiling``."""
    rated = []
    for whole in _fitting(p):
        base = Config(places=whole.places)
        choices = [base, *(Config(**base, parts=n) for n in _parts(whole) if n > 1 and ceiling is not None)]
        fits = (c for c in choices if ceiling is None or _layout(p, c).workspace <= ceiling)
        c = next(fits, choices[-1])
        rated.append((_waves(_layout(p, c)) * (whole.places + OVERHEAD), c))
    rated.sort(key=lambda entry: entry[0])
    for _, c in rated[:MOST_OFFERED]:
        yield c, _layout(p, c).workspace


def _parts(layout: fused.Layout) -> list[int]:
    """Numbers of parts that channels can be divided into, fewest first; only 1 for constant filters."""
    blocks = 1 if layout.keeps else layout.channel_blocks
    return list(dict.fromkeys(-(-blocks // -(-blocks // n)) for n in range(1, blocks + 1)))
