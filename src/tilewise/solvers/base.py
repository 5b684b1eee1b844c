"""The interface of solvers: what an algorithm declares, and the methods that planner and executor call."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewise.plan import Config
from tilewise.problems.activations import activation_kind
from tilewise.problems.base import Part, Problem
from tilewise.problems.kinds import kind_of, kinds

__all__ = [
    "BATCH_LEVEL",
    "NOTHING_KEPT_OUT",
    "Cost",
    "Prepare",
    "Run",
    "Solver",
    "SolverUnavailable",
    "Split",
    "mismatch",
]

BATCH_LEVEL = 2
"""The highest :attr:`Split.level` of splits that may pay without a memory limit: those up to the batch."""
NOTHING_KEPT_OUT = "the workspace limit kept nothing out"
"""Why a split is :meth:`Split.idle` that is there for limits."""

Solved = Any
"""A problem of the kind that a solver says it ``solves``: solvers of convolutions name :class:`ConvProblem` here."""

Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""``prepare(weight, kept, workspace)`` writes the prepared form of a constant weight into ``kept``, a uint8 tensor of
``constant(p, c)`` bytes, 256-byte aligned. ``workspace`` is the same buffer that ``run`` gets."""


Run = Callable[..., torch.Tensor]
"""``run(*operands, *results, workspace)`` for fixed shapes and strides: ``run(a, b, out, workspace)`` of convolutions.

It writes the results and returns the one, or several in a tuple; with ``own_output`` it ignores those given (they may
be ``None``) and returns new tensors. ``workspace`` is a uint8 tensor of at least ``workspace(p, c)`` bytes, 256-byte
aligned, or ``None`` where that is 0. Where ``problem.bias``, to which only what ``does_add_bias`` is bound, a further
argument is the vector that is added, contiguous and of the result's dtype. Where ``problem.residual``, to which only
what ``does_add_residual`` is bound, the last argument is the tensor that is added: it has the shape and dtype of
``out``, lies as ``out`` does where one is given, and shares no memory with it. It follows the current stream and never
synchronises or measures."""


class SolverUnavailable(RuntimeError):
    """A config cannot run on this machine. The planner keeps the message as the candidate's reason.

    >>> from tilewise.solvers import SolverUnavailable
    >>> try:
    ...     raise SolverUnavailable("cudnn: no CUDA device")
    ... except SolverUnavailable as error:
    ...     print(error)
    cudnn: no CUDA device
    """


def mismatch(p: Problem, role: str, tensor: torch.Tensor) -> str:
    """How ``tensor`` differs in shape or dtype from what ``p`` says of operand ``role``; empty where it does not.

    >>> from tilewise.solvers import mismatch
    >>> mismatch(tilewise.GemmProblem(2, 4, 3), "a", torch.ones(2, 5))
    'a has shape (2, 5), the problem (2, 3)'
    """
    if tuple(tensor.shape) != p.shape(role):
        return f"{role} has shape {tuple(tensor.shape)}, the problem {p.shape(role)}"
    if tensor.dtype is not p.torch_dtype(role):
        return f"{role} is {tensor.dtype}, in the problem {p.torch_dtype(role)}"
    return ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a config costs, for estimates: floating-point operations, bytes moved through memory, kernels launched.

    ``efficiency`` is the share of the device's measured peak that the arithmetic usually reaches. Arithmetic and the
    traffic in ``bytes`` overlap, so the longer of the two counts. Traffic in ``apart`` does not overlap: other kernels
    move it before or after. ``serial_us`` are microseconds of steps within a kernel that wait for one another, whatever
    the device's rates.

    >>> from tilewise import solvers
    >>> problem = tilewise.GemmProblem(2, 4, 3)
    >>> solver = solvers.baseline(problem)
    >>> solver.cost(problem, next(iter(solver.configs(problem)))).flops
    48
    """

    flops: int
    bytes: int
    kernels: int = 1
    efficiency: float = 1.0
    apart: int = 0
    serial_us: float = 0.0


class Solver(abc.ABC):
    """One way to solve problems. A subclass in a file of its own in this package is found without being listed.

    ``name`` and ``version`` are keys in wisdom: raise the version when results or speed change. What a solver cannot do
    by itself (add into a result, write a view) the executor does through a temporary, which counts as workspace.

    >>> from tilewise import solvers
    >>> from tilewise.notation import parse_layer
    >>> winograd = solvers.get("winograd")
    >>> winograd.unsupported(parse_layer("mb1ic4ih8oc4kh3ph1"))
    []
    >>> len(winograd.unsupported(parse_layer("mb1ic4ih8oc4kh3sh2ph1")))  # reasons, for a stride along two axes
    2
    """

    name: ClassVar[str]
    version: ClassVar[int]
    solves: ClassVar[type[Problem]]
    """The kind of problems that it is for."""
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"fp32", "bf16", "fp16"})
    deterministic: ClassVar[bool] = True
    adds_bias: ClassVar[bool] = False
    """Whether it adds a vector over the result's channels as it writes. After other solvers a separate pass adds it."""
    adds_residual: ClassVar[bool] = False
    """Whether it adds a tensor like the result as it writes, after the bias. After other solvers a separate pass does.
    """
    writes_over_residual: ClassVar[bool] = False
    """Whether ``out`` may be the residual itself: each number of it is read just before the result's is written there,
    and never again."""
    activations: ClassVar[frozenset[str]] = frozenset()
    """Activations that it applies as it writes, without their parameters. After other solvers a separate pass applies
    them."""
    accumulates: ClassVar[bool] = False
    """Whether it can add into ``out`` where ``problem.accumulate``. It can then also overwrite ``out``."""
    own_output: ClassVar[bool] = False
    """Whether it can only return a new tensor, and not write into ``out``."""
    writes_views: ClassVar[bool] = True
    """Whether it can write an ``out`` of any strides. Otherwise the executor gives it a contiguous one and copies."""
    baseline: ClassVar[bool] = False
    """Whether it is the framework's own choice, against which every plan is measured."""
    exact_memory: ClassVar[bool] = False
    """Whether all memory that it takes on a CPU is declared or comes from torch's allocator, but for some KiB of
    objects.

    What other solvers take shows only as growth of resident memory. That is rough, so as many bytes as may not show are
    counted for them too.
    """
    compiles: ClassVar[bool] = False
    """Whether binding compiles GPU kernels and may be done by several threads at a time."""
    blocks_itself: ClassVar[bool] = False
    """Whether it has configs that take the batch in blocks. Micro-batches of it then gain nothing."""
    amounts: ClassVar[frozenset[str]] = frozenset({"block", "images", "splits", "tiles"})
    """Config parameters that say how much is done at a time. Configs that differ only in these have similar errors."""
    kin: ClassVar[str] = ""
    """A name shared by solvers whose estimates are off by similar factors.

        One that is estimated far behind another of them need not be measured.
        """
    most_configs: ClassVar[int] = 6
    """How many configs of a :meth:`family` are measured when planning is not ``patient``: the best by estimate."""
    most_compiled: ClassVar[int] = 3
    """How many of them at the most where kernels may have to be compiled for a GPU, each of which takes seconds."""
    while_it_pays: ClassVar[bool] = False
    """Whether further configs of a family are measured until :attr:`most_configs` in a row have brought no gain."""
    error_bound: ClassVar[dict[str, float]] = {"ieee": 1e-5, "tf32": 5e-3}
    """Largest relative L2 error allowed in fp32, by precision."""

    @abc.abstractmethod
    def unsupported(self, p: Solved) -> list[str]:
        """Reasons why it cannot solve ``p``, beyond the declared passes, devices, dtypes and dims.

        Empty when it can.
        """

    @abc.abstractmethod
    def configs(self, p: Solved) -> Iterable[Config]:
        """Configs worth trying on ``p``, the most promising first."""

    def workspace(self, p: Solved, c: Config) -> int:
        """Bytes of scratch that config ``c`` needs beyond operands and result; ``run`` gets them as one buffer."""
        return 0

    def hidden_workspace(self, p: Solved, c: Config) -> int:
        """Bytes that the run is expected to allocate by itself, such as a library's scratch. Checked by measurement."""
        return 0

    def constant(self, p: Solved, c: Config) -> int:
        """Bytes of a prepared filter that are kept between calls where ``p.constant_weight``; 0 where none is kept."""
        return 0

    def prepare(self, p: Solved, c: Config, weight: torch.Tensor) -> Prepare:
        """A function that prepares filters with the strides of the example ``weight``.

        ``run`` then takes the prepared filter in place of the weight. Called only where :meth:`constant` is not 0.
        Raises ``NotImplementedError`` where the solver keeps no filter.
        """
        raise NotImplementedError(f"{self.name} keeps no filter")

    def pack(self, p: Solved, c: Config, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that makes the prepared form of a filter as a tensor of its own, for weights like ``weight``.

        That is for libraries which allocate it themselves: the tensor may be opaque, and takes :meth:`constant` bytes.
        ``None`` for solvers that :meth:`prepare` a filter in memory which they are given.
        """
        return None

    def offers(
        self, p: Solved, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Configs of ``p`` with their workspace in bytes.

        Solvers with many configs may yield one that needs more than ``ceiling`` bytes without working it out in full.
        With ``only``, yields just those of these configs that can solve ``p``: parts of a problem are tried with the
        configs that were good on the whole.
        """
        return ((c, self.workspace(p, c)) for c in self.configs(p) if only is None or c in only)

    def computed_instead(self, p: Solved) -> Iterable[tuple[Problem, Config]]:
        """Other problems that it may compute in the place of ``p``, with its config but for who computes them.

        What is known to be good for one of them, another solver with its config, is offered too: the config with
        ``solver`` and the other solver's parameters added.
        """
        return ()

    def most(self, p: Solved) -> int:
        """How many configs of each :meth:`family` are measured on ``p`` when planning is not ``patient``."""
        return self.most_configs

    def family(self, c: Config) -> str:
        """A name shared by configs whose estimates are off by similar factors. By default the solver's name."""
        return self.name

    def computes_with(self, c: Config) -> str:
        """The name of another solver that this config runs on a changed problem; empty where there is none."""
        return ""

    def exactness(self, c: Config) -> object:
        """What of a config decides how large errors are, as far as it matters which one is taken: the tile, if any."""
        return c.get("tile")

    def like(self, c: Config) -> Config:
        """``c`` without the parameters named in :attr:`amounts`. Configs that are then equal have similar errors."""
        return Config(**{name: value for name, value in c.items() if name not in self.amounts})

    @abc.abstractmethod
    def cost(self, p: Solved, c: Config) -> Cost:
        """Flops and bytes for the roofline estimate."""

    def warm_up(self, p: Solved) -> Callable[[], object] | None:
        """What has a library compile and load kernels for ``p``, to be called on any thread, beside a program.

        It sets no flags of the process, and hardly uses Python or the device. ``None`` where there is nothing to do.
        """
        return None

    def unpredicted(self, p: Solved, c: Config) -> bool:
        """Whether it may take hundreds of times its estimate: it is then run on a few images of many first."""
        return False

    def does_add_bias(self, p: Solved, c: Config) -> bool:
        """Whether this config adds a bias as it writes."""
        return self.adds_bias

    def does_add_residual(self, p: Solved, c: Config) -> bool:
        """Whether this config adds a residual as it writes, after the bias where there is one.

        It lies as the result does, so that a solver which cannot write the result's memory cannot read it either.
        """
        writes = self.own_output or self.writes_views or all(p.layout(role) != "view" for role in p.results)
        return self.adds_residual and writes and (not p.bias or self.does_add_bias(p, c))

    def does_activate(self, p: Solved, c: Config) -> bool:
        """Whether this config applies the activation as it writes, after bias and residual where there are such."""
        return (
            activation_kind(p.activation) in self.activations
            and (not p.bias or self.does_add_bias(p, c))
            and (not p.residual or self.does_add_residual(p, c))
        )

    def is_deterministic(self, p: Solved, c: Config) -> bool:
        """Whether this config gives the same bits every time."""
        return self.deterministic

    @abc.abstractmethod
    def bind(self, p: Solved, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A callable for tensors with the shapes, strides and dtypes of these examples, which it must not keep.

        They are all operands and all results, of convolutions ``bind(self, p, c, a, b, out)``. A result may have no
        memory (device ``meta``); with ``own_output`` it is ``None``.

        Raises :class:`SolverUnavailable` when the config cannot run here.
        """

    def bind_checked(self, p: Solved, c: Config, *tensors: torch.Tensor | None) -> Run:
        """:meth:`bind`, for examples that have the problem's shapes and dtypes: kernels take their addresses alone.

        Kernels get bare addresses, so a wrong tensor would read or write elsewhere. Raises ``ValueError`` naming the
        wrong tensor, and what :meth:`bind` raises.
        """
        for role, tensor in zip(p.roles, tensors, strict=True):
            if tensor is not None and (reason := mismatch(p, role, tensor)):
                raise ValueError(f"{self.name}: {reason}")
        return self.bind(p, c, *tensors)

    def declarations(self) -> dict[str, list[Any]]:
        """What it declares of the problems that it takes, by name, for tables and documents."""
        return {"devices": sorted(self.devices), "dtypes": sorted(self.dtypes)}

    def undeclared(self, p: Solved) -> list[str]:
        """Reasons why the declarations leave ``p`` out."""
        if not isinstance(p, self.solves):
            return [f"solves {kinds()[self.solves.kind].called}, not {kind_of(p).called}"]
        reasons = []
        if p.device_type not in self.devices:
            reasons.append(f"runs on {'/'.join(sorted(self.devices))}, not {p.device_type}")
        if p.dtype not in self.dtypes:
            reasons.append(f"takes {'/'.join(sorted(self.dtypes))}, not {p.dtype}")
        return reasons

    def why_not(self, p: Solved) -> list[str]:
        """Every reason why it cannot solve ``p``: declared ones first, then its own. Empty when it can."""
        return self.undeclared(p) or self.unsupported(p)


class Split(Solver):
    """A solver that divides a problem into smaller ones and leaves each to the planner.

    It names the parts; the executor runs their plans. It binds nothing itself.

    >>> from tilewise import solvers
    >>> from tilewise.notation import parse_layer
    >>> list(solvers.get("micro_batch").sizes(parse_layer("mb8ic4ih8oc4kh3ph1"), "powers_of_two"))
    [4, 2, 1]
    """

    axis: ClassVar[str]
    """The axis of :meth:`Problem.split` that it divides, unless :meth:`axis_of` names another."""
    level: ClassVar[int]
    """Nesting order: ranks 0, devices 1, batch 2, space 3, channels 4. A child may only be cut at a higher level."""
    at_once: ClassVar[bool] = False
    """Whether its parts run at once, each with its share of torch's threads and its own workspace.

    The parts are leaves. Each writes its own range of the result or is one term of a sum. :meth:`divisions` says how
    the problem may be divided.
    """

    across: ClassVar[bool] = False
    """Whether its parts run at once on several devices, which its config names (:mod:`tilewise.solvers.common.shares`).
    """

    alike: ClassVar[bool] = True
    """Whether all parts of one size are the same problem, so that any sizes compose; else only those of :meth:`cut`."""

    def axis_of(self, p: Solved) -> str:
        """The axis of :meth:`Problem.split` along which it cuts ``p``."""
        return self.axis

    def idle(self, p: Solved) -> str:
        """Why not to divide ``p`` although no candidate exceeded the memory limit; empty where dividing may pay anyway.

        Where it is empty, a split below the batch tries every candidate on the parts, and not only those that the limit
        kept out of the whole.
        """
        return "" if self.level <= BATCH_LEVEL else NOTHING_KEPT_OUT

    @abc.abstractmethod
    def sizes(self, p: Solved, policy: str) -> Sequence[int]:
        """Part sizes worth planning, falling, under a batch-size policy: ``undivided``, ``powers_of_two`` or ``all``.

        Each size is tried with the configs that were good at the size before it.
        """

    def between(self, p: Solved, policy: str) -> Sequence[int]:
        """Further part sizes, tried only with the configs that were good at their neighbours in :meth:`sizes`."""
        return ()

    def divisions(self, p: Solved, threads: int) -> Sequence[tuple[int, ...]]:
        """With :attr:`at_once`: for each way to divide ``p`` among ``threads`` threads, the sizes of its parts.

        The most promising division comes first.
        """
        return ()

    @abc.abstractmethod
    def child(self, p: Solved, size: int) -> Solved:
        """The problem of a part of ``size``, wherever it starts.

        Unless parts are :attr:`alike`, that of most parts of this size.
        """

    def cut(self, p: Solved, size: int) -> tuple[int, ...]:
        """Sizes of all parts of ``p`` where most are of ``size``. Needed only where parts are not :attr:`alike`."""
        raise NotImplementedError(f"{self.name} cuts into parts that are alike: any sizes would do")

    def children(self, p: Solved, c: Config) -> tuple[Part[Any], ...]:
        """The parts of ``p`` in order; ``c["sizes"]`` is the tuple of their sizes along the axis.

        Raises ``ValueError`` where it is not a tuple.
        """
        sizes = c["sizes"]
        if not isinstance(sizes, tuple):
            raise ValueError(f"sizes={sizes!r}: a split's config holds a tuple of sizes")
        parts: tuple[Part[Any], ...] = p.split(self.axis_of(p), sizes)
        return parts

    def configs(self, p: Solved) -> Iterable[Config]:
        """None: the planner composes a split's sizes by dynamic programming."""
        return ()

    def bind(self, p: Solved, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """Never called: the executor runs the children."""
        raise TypeError(f"{self.name} is a split: the executor runs its children")
