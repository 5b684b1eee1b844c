"""What a program of steps is made of: the slots that tensors lie in, and the steps that read and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "Operator", "Place", "Slot", "Step", "copied", "filled", "offset_in_root", "places_in", "root"]

KINDS = ("input", "constant", "intermediate", "output")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place for one tensor of a program: its shape, its strides in elements, and its dtype.

    ``kind`` is one of :data:`KINDS`. An input is given at each call. A constant holds its ``tensor``. An intermediate
    lies in memory that calls share one after the other. An output is new memory at each call. A slot with ``view_of``
    is a view of the slot with that index, which comes before it: it starts ``offset`` elements behind that slot's first
    one, and no step is needed for it.

    Example: a contiguous input, and the same numbers seen as a matrix::

        Slot((1, 8, 4, 4), (128, 16, 4, 1), torch.float32, "input")
        Slot((1, 128), (128, 1), torch.float32, view_of=0)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "intermediate"
    tensor: Tensor | None = None
    view_of: int | None = None
    offset: int = 0

    @classmethod
    def like(cls, tensor: Tensor, kind: str = "intermediate") -> Slot:
        """A slot for tensors with the shape, strides and dtype of ``tensor``, which a constant slot also holds."""
        held = tensor if kind == "constant" else None
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, kind, held)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one in memory, both included; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element in memory."""
        return self.extent * self.dtype.itemsize

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies as this slot says. Strides along axes of size 1 say nothing and are not compared."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, tensor.stride(), strict=True))
        )

    def __str__(self) -> str:
        return described(self.dtype, self.shape, self.strides)


def described(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> str:
    """A tensor's type and places as text for errors."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} with strides {tuple(strides)}"


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a step's input among an operator's arguments: ``Place(0)`` is the first one of ``Step.inputs``."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A call of one of torch's operators: an overload, its arguments and its keyword arguments.

    :class:`Place` stands for tensors, also inside lists; all other arguments are constants. ``out`` names the keyword
    argument into which the result is written, for an overload that has one; else the operator returns its result.
    Of several results ``result`` is the index of the one that is taken. An operator that writes into one of its
    arguments (``relu_``) has a step whose output is a view of that input.

    Example: ``Operator(torch.ops.aten.cat.out, ([Place(0), Place(1)], 1), out="out")``.
    """

    overload: torch._ops.OpOverload
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    out: str = ""
    result: int = 0

    def places(self) -> set[int]:
        """The indices of all :class:`Place` in the arguments."""
        return places_in((*self.arguments, *self.keywords.values()))

    @property
    def mutates(self) -> bool:
        """Whether it writes into one of its arguments other than ``out``."""
        return any(
            a.alias_info is not None and a.alias_info.is_write and a.name != self.out
            for a in self.overload._schema.arguments
        )

    @property
    def may_alias(self) -> bool:
        """Whether its result may share memory with one of its arguments, as its schema says."""
        return any(result.alias_info is not None for result in self.overload._schema.returns)

    def run(self, *tensors: Tensor) -> Tensor:
        """Call it on the step's inputs; behind them follows the output where :attr:`out` names a keyword."""
        keywords = {name: filled(value, tensors) for name, value in self.keywords.items()}
        if self.out:
            keywords[self.out] = tensors[-1]
        found = self.overload(*filled(self.arguments, tensors), **keywords)
        taken: Tensor = found[self.result] if isinstance(found, tuple | list) else found
        return taken


def places_in(values: Iterable[Any]) -> set[int]:
    """The indices of all :class:`Place` among ``values`` and in lists of them."""
    return {place.index for place in _places(values)}


def _places(values: Iterable[Any]) -> Iterable[Place]:
    """All places among ``values`` and in lists of them."""
    for value in values:
        if isinstance(value, Place):
            yield value
        elif isinstance(value, tuple | list):
            yield from _places(value)


def copied(source: Tensor, out: Tensor) -> None:
    """Copy a tensor into one that lies otherwise: the ``run`` of steps that change a layout."""
    out.copy_(source)


def filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """``value`` with tensors in place of places."""
    if isinstance(value, Place):
        return tensors[value.index]
    return type(value)(filled(v, tensors) for v in value) if isinstance(value, tuple | list) else value


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a program: it reads the slots ``inputs`` and gives the slot ``output``.

    ``name`` is the layer's, for errors and reports. A step has one of these:

    - ``plan``, a :class:`~tilewise.execute.Bound`. The inputs are the plan's operands, then the bias and then the
      residual where its problem has them.
    - ``operator``, an :class:`Operator`.
    - neither: then ``run`` is a callable, ``run(*inputs, out)``. It writes into ``out``, or with ``returns_new`` it is
      called without ``out`` and returns the tensor.

    ``run`` may be left out for a plan and for an operator. The result of an operator without ``out`` is new.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    run: Callable[..., Any] | None = None
    returns_new: bool = False
    plan: Any = None
    operator: Operator | None = None

    @property
    def gives_new(self) -> bool:
        """Whether the output is a tensor that the step returns, rather than one that it writes into."""
        if self.operator is not None:
            return not self.operator.out and not self.operator.mutates
        return self.returns_new

    @property
    def may_alias(self) -> bool:
        """Whether the tensor that the step returns may share memory with one of its inputs."""
        if not self.gives_new or self.plan is not None:
            return False
        return self.operator is None or self.operator.may_alias

    def call(self) -> Callable[..., Any]:
        """What runs it in Python: ``call(*inputs, out)``, or ``call(*inputs)`` for one that gives a new tensor."""
        if self.run is not None:
            return self.run
        if self.operator is not None:
            return self.operator.run if self.operator.out or self.gives_new else _in_place(self.operator)
        if self.plan is None:
            raise ValueError(f"step {self.name!r} has no run: a callable, a plan or an operator would do")
        return planned(self.plan)


def _in_place(operator: Operator) -> Callable[..., Any]:
    """The call of an operator that writes into an argument, and so needs no output."""

    def run(*tensors: Tensor) -> None:
        operator.run(*tensors[:-1])

    return run


def planned(bound: Any) -> Callable[..., Any]:
    """The call of a bound plan on operands, bias, residual and result."""
    problem = bound.problem
    count, has_bias = len(problem.operands), problem.bias
    if not getattr(problem, "residual", False):

        def run(*tensors: Tensor) -> None:
            bound(*tensors[:count], tensors[count] if has_bias else None, tensors[-1])

        return run

    def run_with_residual(*tensors: Tensor) -> None:
        bias = tensors[count] if has_bias else None
        bound(*tensors[:count], bias, tensors[-1], residual=tensors[-2])

    return run_with_residual


def offset_in_root(slots: Sequence[Slot], index: int) -> int:
    """Elements from where the memory that slot ``index`` shows begins to where the slot does."""
    offset = 0
    while (base := slots[index].view_of) is not None:
        offset, index = offset + slots[index].offset, base
    return offset


def root(slots: Sequence[Slot], index: int) -> int:
    """The slot whose memory slot ``index`` shows: itself, unless it is a view."""
    while (base := slots[index].view_of) is not None:
        index = base
    return index
