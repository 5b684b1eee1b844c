"""What a problem of any kind declares, and the words that all kinds share: element types, layouts, ranges, writes."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

import torch

from tilewise.problems.limits import INT64_MAX

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "DTYPE_NAMES",
    "LAYOUTS",
    "PRECISIONS",
    "WHOLE",
    "Compute",
    "Part",
    "Problem",
    "Range",
    "Seams",
    "Write",
    "as_tuple",
    "dense_strides",
    "layout_of",
    "narrow",
    "parts_of_batch",
    "read_back",
    "require_sizes",
]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

DTYPE_NAMES = {value: key for key, value in DTYPES.items()}

LAYOUTS = ("contiguous", "channels_last", "view")

PRECISIONS = ("ieee", "tf32")

ALIGNMENT = 16
"""Bytes of the widest memory access of a kernel. Problems do not differ by alignment beyond it."""


class Write(enum.Enum):
    """How a part's result becomes part of the whole: set, added, or added where parts overlap.

    >>> from tilewise.problem import Write
    >>> [write.name for write in Write]
    ['SET', 'ADD', 'OVERLAP_ADD']
    """

    SET = "set"
    ADD = "add"
    OVERLAP_ADD = "overlap_add"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``[start, start + length)`` of tensor dimension ``dim``.

    >>> from tilewise.problem import Range
    >>> Range(dim=0, start=12, length=4)
    Range(dim=0, start=12, length=4)
    """

    dim: int
    start: int
    length: int


Kind = TypeVar("Kind", bound="Problem", covariant=True)


@dataclass(frozen=True, slots=True)
class Part(Generic[Kind]):
    """One piece of a split problem.

    ``problem`` is ``None`` for a part that meets no data: its share of the result is zero. ``uses`` holds, by role, the
    ranges of each tensor that the part works on; of a tensor that is not in it the part works on all.

    >>> first, second = tilewise.GemmProblem(16, 32, 8).split("rows", (12, 4))
    >>> second.problem.m, second.ranges("c")
    (4, (Range(dim=0, start=12, length=4),))
    """

    problem: Kind | None
    uses: Mapping[str, tuple[Range, ...]]
    write: Write

    def ranges(self, role: str) -> tuple[Range, ...]:
        """Ranges of the tensor of ``role`` that the part works on; none: all of it."""
        return self.uses.get(role, ())


@dataclass(frozen=True, slots=True)
class Seams:
    """Where the parts of a plan meet: what a check compares beside the ends of a result.

    ``starts`` holds, by the axis that is cut, where the first part of each different plan begins, in the order of the
    plan; ``parted`` says whether there are parts at all.
    """

    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parted: bool = False


WHOLE = Seams()
"""The seams of what is computed in one piece: none."""

Tensors = tuple[torch.Tensor, ...]
Compute = Callable[..., torch.Tensor | Tensors]
"""``compute(*operands, bias, *results)`` gives the problem's results by what is to be checked.

That is a tensor, or several in a tuple. ``bias`` is ``None`` where the problem adds none. Of a problem with a residual
it takes that too, as the keyword ``residual``.
"""


class Problem(abc.ABC):
    """What planner, plans, wisdom, execution and reports know of a problem of any kind.

    A kind is a frozen, hashable class in a folder of its own below ``tilewise.problems``, whose ``__init__`` registers
    it (:mod:`tilewise.problems.kinds`). It has these attributes, as fields or properties:

    - ``key``: canonical text, equal for equal problems alone. Its first word is ``kind``, its last one ``device``.
    - ``device``: ``"cpu"`` or ``"cuda:<name>"``. A part may name another device than its whole.
    - ``dtype``, ``out_dtype``: names in :data:`DTYPES` of the operands' and the results' elements.
    - ``precision``: ``"ieee"`` or ``"tf32"``, how fp32 operands may be rounded.
    - ``operands``, ``results``: roles of the tensors, in the order in which solvers take them.
    - ``accumulate``: whether values are added to what the results hold.
    - ``flops``: floating-point operations of the direct way; ``bytes``: least memory traffic, each tensor moved once.
    - ``cut_axes``: names of the axes along which :meth:`split` cuts. Where ``"batch"`` is one of them it counts
      independent items, such as images.

    What a kind need not say has a default here.

    >>> from tilewise.problem import Problem
    >>> problem = tilewise.GemmProblem(16, 32, 8)
    >>> isinstance(problem, Problem), problem.operands, problem.results
    (True, ('a', 'b'), ('c',))
    """

    __slots__ = ()

    kind: ClassVar[str]
    """The first word of every key of this kind."""
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        "kind", "key", "device", "dtype", "out_dtype", "precision", "operands", "results", "accumulate",
        "flops", "bytes", "cut_axes",
    )  # fmt: skip

    if TYPE_CHECKING:  # fields of frozen dataclasses: at run time properties here would be taken for their defaults

        @property
        def key(self) -> str: ...
        @property
        def device(self) -> str: ...
        @property
        def dtype(self) -> str: ...
        @property
        def out_dtype(self) -> str: ...
        @property
        def precision(self) -> str: ...
        @property
        def operands(self) -> tuple[str, ...]: ...
        @property
        def results(self) -> tuple[str, ...]: ...
        @property
        def accumulate(self) -> bool: ...
        @property
        def bias(self) -> bool: ...
        @property
        def activation(self) -> str: ...
        @property
        def residual(self) -> bool: ...
        @property
        def bias_dim(self) -> int: ...
        @property
        def flops(self) -> int: ...
        @property
        def cut_axes(self) -> tuple[str, ...]: ...
    else:
        bias = False
        activation = "none"
        """The function that is applied to every number of the result, after bias and residual."""
        residual = False
        """Whether a tensor with the result's shape, type and strides is added, after the bias."""
        bias_dim = 1
        """The dimension of the result along which a ``bias``, one number for each of its elements, is added."""

    @classmethod
    @abc.abstractmethod
    def from_key(cls, text: str) -> Self:
        """Read ``key`` back, whoever wrote it. Raises ``ValueError`` for what is no key of this kind."""

    @abc.abstractmethod
    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of ``role``. Raises ``ValueError`` for an unknown role."""

    @abc.abstractmethod
    def split(self, axis: str, sizes: Sequence[int]) -> tuple[Part[Self], ...]:
        """Cut along ``axis`` into parts of ``sizes``, in order. Raises ``ValueError`` for cuts that cannot be made."""

    @abc.abstractmethod
    def extent(self, axis: str) -> int:
        """What the sizes of a split along ``axis`` sum to. Raises ``ValueError`` for an unknown axis."""

    @abc.abstractmethod
    def reference(self, *operands: torch.Tensor) -> torch.Tensor | Tensors:
        """The results in float64, without bias, residual, activation or accumulation.

        That is a tensor, or several in a tuple.
        """

    @property
    def result(self) -> str:
        """Role of the one result."""
        (role,) = self.results
        return role

    @property
    def written_last(self) -> str:
        """Role of the operand that a step has written just before, and of which a cache may still hold a part."""
        return self.operands[0]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of all tensors, operands first."""
        return (*self.operands, *self.results)

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.split(":", 1)[0]

    @property
    def bytes(self) -> int:
        """Least memory traffic: operands read once, results written once."""
        return sum(self.nbytes(role) for role in self.roles)

    def layout(self, role: str) -> str:
        """Layout class of the tensor of ``role``, one of :data:`LAYOUTS`."""
        return "contiguous"

    def strides(self, role: str) -> tuple[int, ...]:
        """Strides in elements of an example of the tensor of ``role``, as it is measured and checked with.

        An example of a view has rows of a larger tensor: dense along the last dimension, with gaps between rows.
        """
        shape = self.shape(role)
        if self.layout(role) != "view":
            return dense_strides(shape, self.layout(role))
        gap = max(8, ALIGNMENT // self.torch_dtype(role).itemsize)
        return dense_strides((*shape[:-1], shape[-1] + gap), "contiguous")

    def alignment_of(self, role: str) -> int:
        """Bytes by which the address of the tensor of ``role`` is aligned, :data:`ALIGNMENT` at the most."""
        return ALIGNMENT

    def torch_dtype(self, role: str) -> torch.dtype:
        """Element type of the tensor of ``role``."""
        return DTYPES[self.out_dtype if role in self.results else self.dtype]

    def nbytes(self, role: str) -> int:
        """Bytes of the elements of the tensor of ``role``."""
        return math.prod(self.shape(role)) * self.torch_dtype(role).itemsize

    @property
    def batch_size(self) -> int:
        """How many independent items it computes at once: the extent of its axis ``batch``, or 1."""
        return self.extent("batch") if "batch" in self.cut_axes else 1

    @property
    def constant_operand(self) -> str:
        """Role of the operand that stays the same between calls, so that what is prepared from it may be kept.

        Empty where no operand stays.
        """
        return ""

    @property
    def checked_operand(self) -> bool:
        """Whether every call compares the constant operand with a copy first."""
        return False

    @property
    def copied_bytes(self) -> int:
        """Bytes of an operand that the framework's own choice may copy before it computes."""
        return 0

    @property
    def task(self) -> str:
        """Which of its layer's computations this is, for tables and documents. A layer has each once."""
        return "forward"

    @property
    def layouts_in_words(self) -> tuple[str, ...]:
        """Layouts of its tensors for documents, in an order of its own."""
        return tuple(self.layout(role) for role in self.roles)

    def flags(self, *, deterministic: bool) -> AbstractContextManager[None]:
        """A context that sets torch's flags as the problem wants them while it is computed or measured."""
        return nullcontext()

    def arranged(self, operands: Tensors) -> Tensors:
        """Operands that were just made, where a framework keeps them: some in one piece of memory, for example."""
        return operands

    def on(self, device: str) -> Self:
        """The same problem on another device."""
        return replace(self, device=device)  # type: ignore[type-var]

    def changed(
        self,
        *,
        accumulate: bool | None = None,
        bias: bool | None = None,
        activation: str | None = None,
        residual: bool | None = None,
        out_dtype: str | None = None,
    ) -> Self:
        """The problem with the given properties changed. A kind must have every property that is asked for."""
        asked = {
            "accumulate": accumulate, "bias": bias, "activation": activation, "residual": residual,
            "out_dtype": out_dtype,
        }  # fmt: skip
        changes = {name: value for name, value in asked.items() if value not in (None, getattr(self, name))}
        return replace(self, **changes) if changes else self  # type: ignore[type-var]


def dense_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides in elements of a dense tensor of ``shape`` laid out ``contiguous`` or ``channels_last``."""
    order = list(range(len(shape)))
    if layout == "channels_last":
        order = [*order[:1], *order[2:], *order[1:2]]  # below three axes both orders are one
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Layout class of a tensor: ``contiguous`` where both dense orders fit, ``view`` where neither does.

    >>> from tilewise.problem import layout_of
    >>> images = torch.zeros(1, 3, 8, 8).to(memory_format=torch.channels_last)
    >>> layout_of(images.shape, images.stride())
    'channels_last'
    """
    for layout in ("contiguous", "channels_last"):
        dense = dense_strides(shape, layout)
        if all(n == 1 or got == want for n, got, want in zip(shape, strides, dense, strict=True)):
            return layout
    return "view"


Own = TypeVar("Own", bound=Problem)


def require_sizes(sizes: Sequence[int], axis: str, whole: int) -> None:
    """Raise ``ValueError`` where parts of ``sizes`` along ``axis`` are not the ``whole`` together."""
    if any(size < 1 for size in sizes) or sum(sizes) != whole:
        raise ValueError(f"sizes={list(sizes)}: must be positive and sum to {axis}={whole}")


def parts_of_batch(problem: Own, axis: str, sizes: Sequence[int], roles: Sequence[str]) -> tuple[Part[Own], ...]:
    """Parts of ``sizes`` items each, in order, of a ``problem`` that is cut along the batch alone.

    The batch is the first dimension of the tensors of ``roles``; the parts use all of the others. Raises ``ValueError``
    for another ``axis``, and for sizes that are not the batch together.
    """
    require_sizes(sizes, axis, problem.extent(axis))
    parts, start = [], 0
    for size in sizes:
        child = replace(problem, batch=size)  # type: ignore[type-var]
        parts.append(Part(child, dict.fromkeys(roles, (Range(0, start, size),)), Write.SET))
        start += size
    return tuple(parts)


def read_back(problem: Own, text: str) -> Own:
    """``problem``, which was made of the key ``text``.

    Raises ``ValueError`` where its key is written otherwise, and for one whose tensors are beyond any memory.
    """
    if problem.key != text:
        raise ValueError(f"problem {text[:200]!r}: not as tilewise writes a problem's key")
    if problem.bytes > INT64_MAX // 4:
        raise ValueError(f"problem {text[:200]!r}: its tensors are beyond any memory")
    return problem


def narrow(tensor: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """The part of ``tensor`` that ``ranges`` name, as a view."""
    for r in ranges:
        tensor = tensor.narrow(r.dim, r.start, r.length)
    return tensor


def as_tuple(computed: torch.Tensor | Tensors) -> Tensors:
    """All results, of which a single one may come as it is."""
    return computed if isinstance(computed, tuple) else (computed,)
