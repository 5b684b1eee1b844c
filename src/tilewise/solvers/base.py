"""What every solver is: an algorithm for problems, declared as data plus one predicate that states its limits."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Part, Pass

__all__ = ["Cost", "Prepare", "Run", "Solver", "SolverUnavailable", "Split", "mismatch"]

Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""``prepare(weight, kept, workspace)`` writes what a constant weight comes to into ``kept``, a uint8 tensor of
``constant(p, c)`` bytes, 256-byte aligned; ``workspace`` is that of ``run``."""


Run = Callable[..., torch.Tensor]
"""``run(a, b, out, workspace) -> result`` for fixed shapes and strides, ``a`` and ``b`` in the order of
``problem.operands``. Writes ``out`` and returns it, or with ``own_output`` ignores it (it may be ``None``) and returns
a new tensor. ``workspace`` is a uint8 tensor of at least ``workspace(p, c)`` bytes, 256-byte aligned, or ``None`` where
that is 0. Where ``problem.bias``, to which only what ``does_add_bias`` is bound, a fifth argument is the vector that
is added, contiguous and of the result's dtype. It follows the current stream and never synchronises or measures."""


class SolverUnavailable(RuntimeError):
    """A config that turned out not to run here; the message is kept as the candidate's reason."""


def mismatch(p: ConvProblem, role: str, tensor: torch.Tensor) -> str:
    """How ``tensor`` differs from what the problem says of ``role``; empty where it does not."""
    if tuple(tensor.shape) != p.shape(role):
        return f"{role} has shape {tuple(tensor.shape)}, the problem {p.shape(role)}"
    if tensor.dtype is not p.torch_dtype(role):
        return f"{role} is {tensor.dtype}, in the problem {p.torch_dtype(role)}"
    return ""


@dataclass(frozen=True, slots=True)
class Cost:
    """For estimates: floating-point operations done, bytes moved through memory, kernels launched.

    ``efficiency`` is the share of the device's measured peak that the arithmetic usually reaches. It hides behind
    ``bytes`` or the other way round, but not behind those ``apart``, which other kernels move before or after it.
    """

    flops: int
    bytes: int
    kernels: int = 1
    efficiency: float = 1.0
    apart: int = 0


class Solver(abc.ABC):
    """One way to solve problems. A new subclass in its own file in this package is found by being there.

    ``name`` and ``version`` are keys in wisdom: raise the version when results or speed change. What a solver cannot do
    natively (add into a result, write a view) the executor does through a temporary, counted as workspace.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    passes: ClassVar[frozenset[Pass]] = frozenset(Pass)
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"fp32", "bf16", "fp16"})
    dims: ClassVar[frozenset[int]] = frozenset({1, 2, 3})
    deterministic: ClassVar[bool] = True
    adds_bias: ClassVar[bool] = False
    """Adds a vector over the result's channels as it writes them; elsewhere a pass of its own does."""
    accumulates: ClassVar[bool] = False
    """Can add into ``out`` when ``problem.accumulate``; it can then also set it."""
    own_output: ClassVar[bool] = False
    """Can only return a new tensor."""
    writes_views: ClassVar[bool] = True
    """Can write an ``out`` of any strides; otherwise the executor gives it a dense one and copies."""
    baseline: ClassVar[bool] = False
    """The framework's own choice, against which every plan is measured."""
    compiles: ClassVar[bool] = False
    """Binding compiles kernels for a GPU, and may be done by several threads at a time."""
    blocks_itself: ClassVar[bool] = False
    """Has configs that take the batch in blocks, so that as a micro-batch it has nothing to add."""
    amounts: ClassVar[frozenset[str]] = frozenset({"block", "images", "splits", "tiles"})
    """Names in configs that say how much is done at a time: configs that differ in these alone err alike."""
    kin: ClassVar[str] = ""
    """A name for solvers whose estimates err alike, so that one far behind another of them need not be measured."""
    most_configs: ClassVar[int] = 6
    """Configs of a family measured when planning is not ``patient``: those with the best estimates."""
    error_bound: ClassVar[dict[str, float]] = {"ieee": 1e-5, "tf32": 5e-3}
    """Relative L2 error it may have in fp32, by precision."""

    @abc.abstractmethod
    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons beyond the declarations why it cannot solve ``p``; empty when it can."""

    @abc.abstractmethod
    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Configs worth trying on ``p``, the most promising first."""

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes it needs beyond operands and result, passed to ``run`` as one buffer."""
        return 0

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes it is expected to allocate by itself inside ``run`` (library scratch). Measured too."""
        return 0

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a prepared filter that are kept between calls where ``p.constant_weight``; 0: none is."""
        return 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What prepares filters with the strides of this example. Asked for only where :meth:`constant` is not 0.

        ``run`` then takes what was prepared in place of the weight.
        """
        raise NotImplementedError(f"{self.name} keeps no filter")

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Configs with their workspace in bytes; those over ``ceiling`` may be listed without being built.

        With ``only``, those of these that can solve ``p``: a part is asked about what gained on the whole.
        """
        return ((c, self.workspace(p, c)) for c in self.configs(p) if only is None or c in only)

    def most(self, p: ConvProblem) -> int:
        """Configs of ``p``, of each family, measured when planning is not ``patient``."""
        return self.most_configs

    def family(self, c: Config) -> str:
        """A name for configs whose estimates err alike; those of one solver, unless it computes with others."""
        return self.name

    def computes_with(self, c: Config) -> str:
        """The name of the other solver that this config computes with; empty where there is none."""
        return ""

    def like(self, c: Config) -> Config:
        """``c`` without :attr:`amounts`."""
        return Config(**{name: value for name, value in c.items() if name not in self.amounts})

    @abc.abstractmethod
    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Flops and bytes for the roofline estimate."""

    def unpredicted(self, p: ConvProblem, c: Config) -> bool:
        """Whether it may take hundreds of times its estimate: it is then run on a few images of many first."""
        return False

    def does_add_bias(self, p: ConvProblem, c: Config) -> bool:
        """Whether this config adds a bias as it writes."""
        return self.adds_bias

    def is_deterministic(self, p: ConvProblem, c: Config) -> bool:
        """Whether this config gives the same bits every time."""
        return self.deterministic

    @abc.abstractmethod
    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A callable for tensors with the shapes, strides and dtypes of these examples, which it must not keep.

        Raises :class:`SolverUnavailable` when the config cannot run here.
        """

    def bind_checked(
        self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> Run:
        """:meth:`bind`, for examples that have the problem's shapes and dtypes: kernels take their addresses alone.

        Raises ``ValueError`` naming the tensor that has not, else as :meth:`bind`.
        """
        for role, tensor in zip((*p.operands, p.result), (a, b, out), strict=True):
            if tensor is not None and (reason := mismatch(p, role, tensor)):
                raise ValueError(f"{self.name}: {reason}")
        return self.bind(p, c, a, b, out)

    def why_not(self, p: ConvProblem) -> list[str]:
        """Every reason why it cannot solve ``p``: declared ones first, then its own. Empty when it can."""
        reasons = []
        if p.pass_ not in self.passes:
            reasons.append(f"does {'/'.join(sorted(x.value for x in self.passes))}, not {p.pass_.value}")
        if p.device_type not in self.devices:
            reasons.append(f"runs on {'/'.join(sorted(self.devices))}, not {p.device_type}")
        if p.dtype not in self.dtypes:
            reasons.append(f"takes {'/'.join(sorted(self.dtypes))}, not {p.dtype}")
        if p.dims not in self.dims:
            reasons.append(f"does {'/'.join(map(str, sorted(self.dims)))}-D, not {p.dims}-D")
        return reasons or self.unsupported(p)


class Split(Solver):
    """A solver that cuts a problem into parts and leaves each to the planner; it names children and binds nothing."""

    axis: ClassVar[str]
    """What it cuts, by the name of an axis of :meth:`ConvProblem.split` where :meth:`axis_of` says no other."""
    level: ClassVar[int]
    """Nesting order: ranks 0, devices 1, batch 2, space 3, channels 4. A child may only be cut at a higher level."""
    at_once: ClassVar[bool] = False
    """Its parts run at once, each with its share of torch's threads and a workspace of its own.

    They are leaves, and either have ranges of the result of their own or are terms of the whole. What there is to try
    is in :meth:`divisions`.
    """

    alike: ClassVar[bool] = True
    """All parts of one size are one problem, so that any sizes compose; else those of :meth:`cut` alone do."""

    def axis_of(self, p: ConvProblem) -> str:
        """The axis of :meth:`ConvProblem.split` along which it cuts ``p``."""
        return self.axis

    def idle(self, p: ConvProblem) -> str:
        """Below the batch: why to leave ``p`` whole where the limit kept nothing out; empty where it calls for cuts.

        Then every candidate is tried on the parts, not only what the limit kept out of the whole.
        """
        return "the workspace limit kept nothing out"

    @abc.abstractmethod
    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Part sizes worth planning under a batch-size policy: ``undivided``, ``powers_of_two`` or ``all``.

        They fall; a size is tried with what gained at the size before it.
        """

    def between(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Further sizes, tried with what gained at the neighbours among :meth:`sizes` alone."""
        return ()

    def divisions(self, p: ConvProblem, threads: int) -> Sequence[tuple[int, ...]]:
        """With :attr:`at_once`, sizes of the parts of each division for so many threads, the most promising first."""
        return ()

    @abc.abstractmethod
    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of one part of ``size``, wherever it starts; of most of them unless parts are :attr:`alike`."""

    def cut(self, p: ConvProblem, size: int) -> tuple[int, ...]:
        """Unless parts are :attr:`alike`: sizes of all parts where most are of ``size``."""
        raise NotImplementedError(f"{self.name} cuts into parts that are alike: any sizes would do")

    def children(self, p: ConvProblem, c: Config) -> tuple[Part, ...]:
        """The parts of ``p`` in order; ``c["sizes"]`` holds their sizes."""
        sizes = c["sizes"]
        if not isinstance(sizes, tuple):
            raise ValueError(f"sizes={sizes!r}: a split's config holds a tuple of sizes")
        return p.split(self.axis_of(p), sizes)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """None: the planner composes a split's sizes by dynamic programming."""
        return ()

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Never called: the executor runs the children."""
        raise TypeError(f"{self.name} is a split: the executor runs its children")
