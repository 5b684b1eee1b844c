"""Strided convolutions of few channels, rewritten without their strides for another solver."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise import solvers
from tilewise.kernels.native.sequence import Address, LaunchSequence, joined
from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost, Run, Solver
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.common.triton_run import ProgramRun, compiled, triton_missing
from tilewise.solvers.common.views import WORKSPACE, View, at, counted, launch, within
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.rewrites._inner import inner_config, named

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Polyphase"]

FEW = 16
"""Most channels of a group. With more, matrix units are full without phases, which add taps of zeros."""
BLOCK = 1024
MOST = 2**31 - 2**20
"""Most elements of an image's phases: kernels count them in 32 bits."""


class Polyphase(ConvSolver):
    """Another solver on the phases of image and filter, as many times the channels without a stride.

    An image's places that are alike modulo the stride become a channel (polyphase decomposition; Vaidyanathan 1993,
    section 4.3), and so do a filter's taps: 3 channels at stride 4 in both axes are 48 channels, and 11x11 taps are 3x3
    with a rim of zeros. What pads few channels, or takes no strides, then computes a network's first layer. ``solver``
    is the other solver's name, the rest of a config is its own.
    """

    name, version = "polyphase", 3
    devices = frozenset({"cuda"})
    compiles = True
    adds_bias = True
    amounts = Solver.amounts | {"parts", "places"}
    most_configs = 2

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no stride, a stride beyond the kernel, dilation with a stride, or many channels."""
        reasons = triton_missing()
        if all(axis.stride == 1 for axis in p.axes):
            reasons.append("takes strides away, and there are none")
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.stride > 1 and (axis.dilation > 1 or axis.kernel < axis.stride):
                reasons.append(
                    f"along {name} needs taps side by side, no fewer than the stride; this is kernel {axis.kernel}, "
                    f"stride {axis.stride}, dilation {axis.dilation}"
                )
        if p.in_channels // p.groups > FEW:
            reasons.append(f"is for at most {FEW} channels in a group, not {p.in_channels // p.groups}")
        if reasons:
            return reasons
        inner = phased(p)
        largest = max(math.prod(inner.shape(role)[1:]) for role in "xw")
        if largest > MOST:
            reasons.append(f"counts to {MOST}; there are {largest} elements in the phases of an image or a filter")
        return reasons or ([] if _able(p) else ["no solver computes it without strides"])

    def family(self, c: Config) -> str:
        """One family for each other solver."""
        return f"{self.name} with {c['solver']}"

    def computes_with(self, c: Config) -> str:
        """The name of the solver that its config names."""
        return str(c.get("solver", ""))

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The configs of every solver that can compute the rewritten problem."""
        return (named(solver, c) for solver in _able(p) for c in solver.configs(phased(p)))

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterator[tuple[Config, int]]:
        """What the other solvers offer within the bytes of ``ceiling`` that the phases leave.

        One config where the phases alone exceed the ceiling, so that the reason can be told.
        """
        left = None if ceiling is None else ceiling - _Phases(p, 0).arena.size
        if left is not None and left < 0:
            configs = self.configs(p) if only is None else only
            yield from ((c, self.workspace(p, c)) for c in itertools.islice(configs, 1))
            return
        for solver in _able(p):
            inner_only = None if only is None else [inner_config(c) for c in only if c["solver"] == solver.name]
            for c, _ in solver.offers(phased(p), left, inner_only):
                outer = named(solver, c)
                yield outer, self.workspace(p, outer)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the phases of image and filter, and of the other solver's workspace."""
        return _phases(p, c).arena.size

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """What the other solver is expected to allocate by itself, in bytes."""
        return _solver(c).hidden_workspace(phased(p), inner_config(c))

    def does_add_bias(self, p: ConvProblem, c: Config) -> bool:
        """Whether the other solver's config adds the bias, in passes where it writes the result itself."""
        try:
            return p.result == "y" and _solver(c).does_add_bias(phased(p), inner_config(c))
        except (KeyError, ValueError):
            return False  # no config of this solver, which is said where it is bound

    def is_deterministic(self, p: ConvProblem, c: Config) -> bool:
        """Whether the other solver's config is deterministic."""
        return _solver(c).is_deterministic(phased(p), inner_config(c))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The other solver's cost, and that of the copies to and from phases."""
        inner = phased(p)
        inner_cost = _solver(c).cost(inner, inner_config(c))
        copies = sum(p.nbytes(role) + inner.nbytes(role) for role in "xw")
        return replace(inner_cost, kernels=inner_cost.kernels + 2, apart=inner_cost.apart + copies)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """The other solver's run between copies. Raises ``SolverUnavailable`` with the reason."""
        assert out is not None
        with config_reasons(p, c):
            phases = _phases(p, c)
        given = a, b, out
        copies = [phases.copies(list(map(View.of, given)), result=back) for back in (False, True)]
        space = torch.empty(phases.last.offset, dtype=torch.uint8, device=a.device)
        first, second, result = phases.tensors(given, space)
        inner = _solver(c).bind_checked(replace(phased(p), bias=p.bias), inner_config(c), first, second, result)
        split, join = (compiled(p, launches, a.device) for launches in copies)
        kind = _AddressedRun if hasattr(inner, "run_pointers") else _Run
        return kind(phases, inner, split, join if copies[1] else None)


@dataclass(frozen=True, slots=True)
class _Run:
    """Copies operands into phases, runs the other solver, and copies the result from its phases where it has some."""

    phases: _Phases
    inner: Run
    split: ProgramRun
    join: ProgramRun | None

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        assert workspace is not None
        self.split(a, b, out, workspace)
        first, second, result = self.phases.tensors((a, b, out), workspace)
        self.inner(first, second, result, self.phases.rest(workspace), *bias)
        if self.join is not None:
            self.join(a, b, out, workspace)
        return out


class _AddressedRun(_Run):
    """The same where the other solver takes addresses, too."""

    __slots__ = ()

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        """Queue all kernels on the current stream of the device that they were compiled for."""
        given = a, b, out, workspace
        first, second, result, rest = (given[place.source] + place.offset for place in self.phases.places())
        run: Any = self.inner
        self.split.run_pointers(a, b, out, workspace)
        run.run_pointers(first, second, result, rest, *bias)
        if self.join is not None:
            self.join.run_pointers(a, b, out, workspace)

    @property
    def sequence(self) -> LaunchSequence | None:
        """What the driver is told of all kernels; ``None`` where not all can be told."""
        inner: LaunchSequence | None = getattr(self.inner, "sequence", None)
        copies = [self.split.sequence] if self.join is None else [self.split.sequence, self.join.sequence]
        if inner is None or any(copy is None for copy in copies):
            return None
        first, *last = (copy for copy in copies if copy is not None)
        return joined([first, inner.over(self.phases.places()), *last])


class _Phases:
    """Contiguous phases of ``x`` and ``w`` in the workspace, followed by the other solver's own workspace."""

    def __init__(self, p: ConvProblem, inner_bytes: int) -> None:
        self.p, self.arena, self.inner_bytes = p, Arena(), inner_bytes
        self.roles = (*p.operands, p.result)
        slots = {role: self.arena.add(phased(p).shape(role), p.torch_dtype(role)) for role in "xw"}
        self.slots: list[Slot | None] = [slots.get(role) for role in self.roles]
        """Phases of the operands and the result in order; ``None`` for ``y``, which is used where it lies."""
        self.last = self.arena.add([inner_bytes], torch.uint8)

    def tensors(self, given: Sequence[torch.Tensor], workspace: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that the other solver computes with, in the order of ``given``."""
        return [t if slot is None else slot.of(workspace) for t, slot in zip(given, self.slots, strict=True)]

    def places(self) -> list[Address]:
        """Where the other solver's operands, result and workspace lie in those of this one."""
        found = [
            Address(number, 0) if slot is None else Address(WORKSPACE, slot.offset)
            for number, slot in enumerate(self.slots)
        ]
        return [*found, Address(WORKSPACE, self.last.offset)]

    def rest(self, workspace: torch.Tensor) -> torch.Tensor | None:
        """The other solver's workspace, or ``None`` where it needs none."""
        return self.last.of(workspace) if self.inner_bytes else None

    def copies(self, views: Sequence[View], *, result: bool) -> list[Launch]:
        """The launches that copy the operands to phases, or with ``result`` the result from its phases."""
        numbers = [2] if result else [0, 1]
        numbered = ((number, self.slots[number]) for number in numbers)
        return [self._copy(number, slot, views[number], back=result) for number, slot in numbered if slot is not None]

    def _copy(self, number: int, slot: Slot, view: View, *, back: bool) -> Launch:
        """The launch that copies tensor ``number`` to its phases, or ``back`` from them."""
        from tilewise.kernels.triton import phases as kernels

        counted(view.narrow(0, 0, 1).narrow(1, 0, 1))
        image = self.roles[number] == "x"
        missing = [1] * (3 - self.p.dims)
        before = [axis.before if image and axis.stride > 1 else 0 for axis in self.p.axes]
        sizes = [*missing, *slot.sizes[2:]]
        d, h, w = [*missing, *(axis.stride for axis in self.p.axes)]
        images, channels = view.sizes[:2]
        scalars = [channels, *view.sizes[2:], *[0] * len(missing), *before, *sizes, *view.strides]
        places = {"S_D": d, "S_H": h, "S_W": w, "BLOCK": BLOCK}
        if back:
            grid = [images * channels, -(-math.prod(view.sizes[2:]) // BLOCK)]
            return launch(kernels.join_phases, grid, [at(slot), within(view, number)], scalars, **places)
        grid = [images * channels * d * h, -(-math.prod(sizes) * w // BLOCK)]
        return launch(kernels.split_phases, grid, [within(view, number), at(slot)], scalars, **places)


@functools.lru_cache(maxsize=1024)
def phased(p: ConvProblem) -> ConvProblem:
    """The same convolution on phases: without strides and, along axes that had one, without padding."""
    axes = []
    for axis in p.axes:
        if axis.stride == 1:
            axes.append(axis)
        else:
            kernel = -(-axis.kernel // axis.stride)
            axes.append(Axis(axis.out + kernel - 1, kernel))
    more = math.prod(axis.stride for axis in p.axes)
    return replace(
        p, in_channels=p.in_channels * more, axes=tuple(axes), layouts=("contiguous", "contiguous", p.layouts[2]),
        alignment=(ALIGNMENT, ALIGNMENT, p.alignment[2]), bias=False,
        accumulate=False, constant_weight=False,
    )  # fmt: skip


def _is_other(solver: Solver) -> bool:
    """Whether ``solver`` is another solver with kernels of this package for GPUs."""
    return solver.compiles and solver.name != Polyphase.name


@functools.lru_cache(maxsize=1024)
def _able(p: ConvProblem) -> tuple[Solver, ...]:
    """Solvers that can compute ``p`` without its strides."""
    return tuple(s for s in solvers.all_solvers() if _is_other(s) and not s.why_not(phased(p)))


def _solver(c: Config) -> Solver:
    """The other solver of a config. Raises ``KeyError`` or ``ValueError`` where there is none such."""
    solver = solvers.get(str(c["solver"]))
    if not _is_other(solver):
        raise ValueError(f"solver={solver.name!r}: one of our own kernels for a GPU would do")
    return solver


@functools.lru_cache(maxsize=1024)
def _phases(p: ConvProblem, c: Config) -> _Phases:
    """The workspace of a config."""
    return _Phases(p, _solver(c).workspace(phased(p), inner_config(c)))
