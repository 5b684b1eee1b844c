"""Direct depthwise convolution with small kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run, SolverUnavailable
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.depthwise import _cpu as cpu
from tilewise.solvers.depthwise._effort import candidates, code_work, effort, partial_sums
from tilewise.solvers.depthwise._gpu import Tile, axes_of, launches, pack_filter

__all__ = ["Depthwise"]

MOST = 2**31 - 2**20
"""Most tiles, and most elements of the filter: kernels count them in 32 bits."""
LONGEST = 15
MOST_STRIDE = 4
MOST_SPLITS = 65535
FAR = 1.5
"""Tiles with so many times the least effort are not tried."""
PEAK = {"ieee": 1.0, "tf32": 0.126, "16-bit": 0.066}
"""Rate of the GPU's plain fp32 units, relative to matrix products in the problem's precision."""


class Depthwise(ConvSolver):
    """The sums of the definition, each thread's in registers: a tile of outputs, or in a filter gradient all taps.

    A line of the input is read once for all the sums of a tile that it belongs to: the register blocking of direct
    convolutions (Georganas et al. 2018, section II), with a thread in place of a core and channels or space along its
    lanes, whichever memory is contiguous in. Sums are in fp32, whatever the precision. Bias, residual and activation
    follow before they are rounded. Memory goes to filters with channels innermost, which are kept where they are
    constant, and to the partial sums of filter gradients: ``splits`` shares of the tiles, summed in a fixed order.

    On a CPU lanes are groups: a tile of the source lies in a core's cache with its rim, ``tile`` bounds results (or in
    a filter gradient outputs), ``threads`` threads share all tiles, ``team`` says whether they are torch's, and
    ``shares`` of the tiles are summed one by one to a filter's gradient. What follows the sums is left to a pass behind
    it there, and filters are not kept.
    """

    name, version = "depthwise", 2
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    compiles = True
    accumulates = True
    most_configs = 4
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton or Numba, several input channels per group, long kernels, large strides, large tensors."""
        reasons = []
        if p.groups != p.in_channels:
            reasons.append(f"takes one input channel to a group, not {p.in_channels // p.groups}")
        if self.on_cpu(p):
            return reasons + cpu.unsupported(p)
        reasons += triton_missing()
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.kernel > LONGEST:
                reasons.append(
                    f"unrolls its sums over the kernel, so that takes at most {LONGEST} along {name}, not {axis.kernel}"
                )
            if p.pass_ is Pass.DGRAD and axis.stride > MOST_STRIDE and name != "d":
                reasons.append(
                    f"unrolls an input gradient over the stride, so that takes at most {MOST_STRIDE} along {name}, "
                    f"not {axis.stride}"
                )
        for role in ROLES:
            number = p.nbytes(role) // p.torch_dtype(role).itemsize
            counted = number if role == "w" else number // p.shape(role)[1]
            if counted > MOST:
                reasons.append(f"counts to {MOST}; {role} has {counted} elements {'' if role == 'w' else 'a channel'}")
        return reasons

    def on_cpu(self, p: ConvProblem) -> bool:
        """Whether ``p`` is for a CPU."""
        return p.device_type == "cpu"

    def does_add_bias(self, p: ConvProblem, c: Config) -> bool:
        """On a GPU alone."""
        return not self.on_cpu(p)

    def does_add_residual(self, p: ConvProblem, c: Config) -> bool:
        """On a GPU alone."""
        return not self.on_cpu(p) and super().does_add_residual(p, c)

    def does_activate(self, p: ConvProblem, c: Config) -> bool:
        """On a GPU alone."""
        return not self.on_cpu(p) and super().does_activate(p, c)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Tiles of the least effort for the length of their code.

        Where both space and channels may be contiguous, half of them have lanes along each. Long code takes ten seconds
        to compile, and the estimate does not show what a processor loses by fetching it.
        """
        if self.on_cpu(p):
            return cpu.configs(p)
        best: dict[tuple[int, ...], Tile] = {}
        for tile in sorted(candidates(p), key=lambda tile: effort(p, tile)):
            best.setdefault((tile.rows, tile.columns, tile.width, tile.channels > 1), tile)
        kinds = [[tile for tile in best.values() if (tile.channels > 1) is along] for along in (False, True)]
        most_of_kind = self.most_configs // sum(1 for kind in kinds if kind)
        chosen = [tile for kind in kinds for tile in _front(p, kind)[:most_of_kind]]
        return [_config(p, tile) for tile in sorted(chosen, key=lambda tile: effort(p, tile))]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the filter with channels innermost unless it is kept, or of a weight gradient's partial sums."""
        if self.on_cpu(p):
            return cpu.workspace(p, c)
        if p.pass_ is Pass.WGRAD:
            return integer(c, "splits") * _filter_bytes(p)
        return _filter_bytes(p) if _tile(c).channels > 1 and not p.constant_weight else 0

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a constant filter with channels innermost, where lanes lie along channels of a GPU."""
        keeps = p.constant_weight and not self.on_cpu(p) and _tile(c).channels > 1
        return _filter_bytes(p) if keeps else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What puts channels of filters innermost. Raises ``SolverUnavailable`` with Triton's reason."""
        run = compiled(p, [pack_filter(p, weight)], weight.device)

        def prepared(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            run(weight, weight, kept, kept)  # from the second operand into what is the workspace elsewhere

        return prepared

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic on plain fp32 units, at the share of instructions that are multiply-adds."""
        if self.on_cpu(p):
            return cpu.cost(p, c)
        tile = _tile(c)
        moved = p.bytes + 2 * self.workspace(p, c)
        kernels = 2 if self.workspace(p, c) else 1
        peak = PEAK[p.precision if p.dtype == "fp32" else "16-bit"]
        return Cost(p.flops, moved, kernels, efficiency=min(1.0, peak / effort(p, tile)))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if self.on_cpu(p):
            return cpu.bind(p, c, a, b, out)
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(p, _tile(c), integer(c, "splits", 1), a, b, out), a.device)


def _filter_bytes(p: ConvProblem) -> int:
    """Bytes of the filter in fp32."""
    return 4 * p.out_channels * p.taps


def _front(p: ConvProblem, ranked: list[Tile]) -> list[Tile]:
    """Of tiles ranked by effort, those with less code than every tile before them."""
    kept: list[Tile] = []
    for tile in ranked:
        if effort(p, tile) > FAR * effort(p, ranked[0]):
            break
        if not kept or code_work(p, tile) < code_work(p, kept[-1]):
            kept.append(tile)
    return kept


def _config(p: ConvProblem, tile: Tile) -> Config:
    """The config of a tile."""
    base = Config(tile=(tile.rows, tile.columns), lanes=(tile.spatial, tile.channels), warps=tile.warps)
    return Config(**base, splits=partial_sums(p, tile)) if p.pass_ is Pass.WGRAD else base


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    names = {"tile", "lanes", "warps", *(["splits"] if p.pass_ is Pass.WGRAD else [])}
    try:
        tile = _tile(c)
        if set(c) != names or integer(c, "splits", 1) > MOST_SPLITS:
            return False
    except (KeyError, ValueError):
        return False
    _, height, width = axes_of(p)
    whole = tile.rows % height.stride == 0 and tile.columns % width.stride == 0
    return whole or p.pass_ is not Pass.DGRAD


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    warps, (rows, columns), (spatial, channels) = integer(c, "warps"), _pair(c, "tile"), _pair(c, "lanes")
    powers = (warps, spatial, channels)
    if any(n & (n - 1) for n in powers) or warps > 16 or spatial * channels < 32 * warps:
        raise ValueError(f"warps, lanes = {powers}: powers of two would do, with a lane for every thread")
    return Tile(rows, columns, spatial, channels, warps)


def _pair(c: Config, name: str) -> tuple[int, int]:
    """The two positive integers called ``name`` in a config. Raises ``ValueError`` for anything else."""
    value = c[name]
    if not isinstance(value, tuple) or len(value) != 2 or min(value) < 1:
        raise ValueError(f"{name}={value!r}: two positive integers would do")
    return value[0], value[1]
