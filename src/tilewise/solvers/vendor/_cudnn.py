"""What solvers by cuDNN's graph API have in common: engines by cuDNN's names, exact workspaces, and runs."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.machine.device import torch_device
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.vendor import _api as api
from tilewise.solvers.vendor import _graph as graphs
from tilewise.solvers.vendor._api import handles
from tilewise.solvers.vendor._catalogue import Catalogue
from tilewise.solvers.vendor._graph import Engine

__all__ = ["CudnnEngines", "CudnnRun", "Offer"]

FFT_BASIS = 32
"""Largest tile edge of cuDNN's FFT engines."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine config with its ``workspace`` in bytes and cuDNN's notes of it.

    ``compiles`` says that building it compiles a kernel, which takes up to a second once in a process.
    """

    config: Config
    workspace: int
    notes: frozenset[str]
    compiles: bool

    @property
    def deterministic(self) -> bool:
        """Whether it gives the same bits on every run."""
        return "NONDETERMINISTIC" not in self.notes


class CudnnEngines(ConvSolver):
    """One engine of cuDNN's graph API, called through nvidia-cudnn-frontend.

    A config is cuDNN's name of a plan: ``engine=eng70_k2=12_k18=0``. Names mean the same for one cuDNN version and GPU,
    which wisdom's environment holds.
    """

    devices = frozenset({"cuda"})

    def __init__(self) -> None:
        self._catalogue = Catalogue()

    @abc.abstractmethod
    def graphed(self, p: ConvProblem) -> ConvProblem:
        """What of ``p`` is in cuDNN's operation graph."""

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no package or library, negative padding, a filter that is a view, or cuDNN's own refusal."""
        reason = api.missing()
        if reason:
            return [reason]
        if any(axis.before < 0 or axis.after < 0 for axis in p.axes):
            return ["cuDNN takes no negative padding"]
        if p.pass_ is Pass.WGRAD and any(axis.before != axis.after for axis in p.axes):
            return ["most of cuDNN's engines leave out the trailing padding of WGRAD where it is not the leading one"]
        if p.layout("w") == "view":
            return ["cuDNN takes no filter with gaps between its elements"]
        try:
            device = _index(p)
        except ValueError as error:
            return [str(error)]
        reason = self._catalogue.refusal(self.graphed(p), device)
        return [reason] if reason else []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """What heuristics list, in their order, then the engines that they leave out, at default knobs."""
        return [entry.engine.config for entry in self._catalogue.listing(self.graphed(p), _index(p)).entries]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Configs with their workspaces; nothing is built to learn these. With ``only`` no heuristics are asked."""
        if only is not None:
            engines = [engine for engine in map(_engine, only) if engine.settable]
            return [(e.config, n) for e, n in self._catalogue.taken(self.graphed(p), engines, _index(p))]
        return [(offer.config, offer.workspace) for offer in self.details(p)]

    def details(self, p: ConvProblem) -> list[Offer]:
        """Every config with its workspace and cuDNN's notes."""
        p, device = self.graphed(p), _index(p)
        offers = []
        for entry in self._catalogue.listing(p, device).entries:
            workspace = entry.workspace
            if workspace is None:
                workspace = self._catalogue.workspace(p, entry.engine, device)
            traits = self._catalogue.traits(p, entry.engine, device)
            offers.append(Offer(entry.engine.config, workspace, traits.notes, traits.compiles))
        return offers

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes that cuDNN asks for: for the strides bound so far, or for canonical ones where those need more."""
        return self._catalogue.workspace(self.graphed(p), _engine(c), _index(p))

    def is_deterministic(self, p: ConvProblem, c: Config) -> bool:
        """Whether cuDNN notes it as deterministic."""
        return "NONDETERMINISTIC" not in self._catalogue.traits(self.graphed(p), _engine(c), _index(p)).notes

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The arithmetic of the method that cuDNN's notes suggest, at a rate that few engines reach."""
        notes = self._catalogue.traits(self.graphed(p), _engine(c), _index(p)).notes
        workspace = self.workspace(p, c)
        moved = p.bytes + 2 * workspace
        if "FFT" in notes:
            return Cost(_fft_flops(p), moved, kernels=4, efficiency=0.7)
        if "STRICT_NAN_PROP" in notes and p.groups == 1:
            return Cost(p.flops, p.bytes, efficiency=0.05)  # plain loops, some 3 % of the peak
        # cuDNN leaves the note off some Winograd engines; what tells them is the transforms that they store.
        stores = workspace > p.nbytes(p.result) // 2 and "TENSOR_CORE" not in notes
        small = p.dims == 2 and all(axis.kernel in (3, 5) and axis.stride == 1 for axis in p.axes)
        if small and ("WINOGRAD" in notes or stores):
            return Cost(p.flops // 4, moved, kernels=4, efficiency=0.7)
        return Cost(p.flops, p.bytes, efficiency=0.9)

    def unpredicted(self, p: ConvProblem, c: Config) -> bool:
        """Whether the engine has no knobs: then no heuristic that knows the sizes chose it. Some are plain loops."""
        return not _engine(c).knobs

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Build the plan for these strides. Raises ``SolverUnavailable`` naming the engine."""
        if a.device.type != "cuda":
            raise SolverUnavailable(f"a is on {a.device}: cuDNN runs on CUDA devices")
        p, engine = self.graphed(p), _engine(c)
        given = dict(zip(p.operands, (a.stride(), b.stride()), strict=True))
        if out is not None:
            given[p.result] = out.stride()
        built = self._catalogue.build(p, engine, graphs.exact_strides(p, given), a.device.index)
        return CudnnRun(engine.name, built.graph, a.device.index)


class CudnnRun:
    """A built plan bound to a device. Threads may share it.

    Called with tensors it is a :data:`Run`. :meth:`run_pointers` takes the addresses of the operands, the result and
    the workspace (0 where there is none) instead, so that parts of larger tensors need no views. Addresses are aligned
    as the problem says; cuDNN raises where they are not. Bias and residual follow where the graph adds them.
    """

    __slots__ = ("_current", "_device", "_execute", "_name", "_stream")

    def __init__(self, name: str, graph: Any, device: int) -> None:
        self._name, self._device = name, device
        self._execute: Callable[[int, int, int, int], None] = graph._execute_with_raw_ptrs
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        several = torch.cuda.device_count() > 1
        self._current: Callable[[], int] | None = torch._C._cuda_getDevice if several else None
        api.handle(device)  # made now: it cannot be while a CUDA graph is captured

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *added: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        space = 0 if workspace is None else workspace.data_ptr()
        self.run_pointers(a.data_ptr(), b.data_ptr(), out.data_ptr(), space, *map(torch.Tensor.data_ptr, added))
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *added: int) -> None:
        """Queue the plan on the device's current stream. Raises ``SolverUnavailable`` naming the engine."""
        device = self._device
        if self._current is not None and self._current() != device:
            with torch.cuda.device(device):
                return self.run_pointers(a, b, out, workspace, *added)
        stream = self._stream(device)
        try:
            handle = handles.of[device]
            if handle.stream != stream:
                handle.follow(stream)
        except KeyError:
            handle = api.handle(device)
        pointers = handle.pointers
        pointers[0], pointers[1], pointers[2] = a, b, out
        for place, address in enumerate(added, 3):  # in the order of their numbers in the graph
            pointers[place] = address
        try:
            return self._execute(handle.address, 3 + len(added), workspace, handle.value)
        except Exception as error:
            raise SolverUnavailable(f"{self._name}: {api.first_line(error)}") from error


def _index(p: ConvProblem) -> int:
    """The index of the problem's device."""
    index = torch_device(p.device).index
    return 0 if index is None else index


def _engine(c: Config) -> Engine:
    """The engine of a config. Raises ``SolverUnavailable`` where it names none."""
    try:
        return Engine.of(c)
    except ValueError as error:
        raise SolverUnavailable(str(error)) from error


def _fft_flops(p: ConvProblem) -> int:
    """Products of the transformed tiles (overlap-save), four multiply-adds each; the transforms are memory traffic."""
    points = 1
    for axis in p.axes:
        edge = min(FFT_BASIS, 1 << math.ceil(math.log2(axis.size + axis.kernel - 1)))
        new = edge - axis.reach + 1
        tiles = 1 if new < 1 else -(-axis.out * axis.stride // new)
        points *= edge * tiles
    return 4 * p.batch * p.out_channels * (p.in_channels // p.groups) * points
