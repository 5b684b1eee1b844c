"""What a bound plan does on a CPU, written down as a list that native code can run without Python.

The plan runs twice, on memory in two places. Launches of compiled workers and calls of torch's operators are written
down as they happen. A word of a launch that differs between the two runs is an address, of the tensor in whose memory
it lies both times; all other words are constants. A plan that does anything else is told apart, with the reason, and
stays in Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import solvers
from tilewise.kernels.cpu.recording import Launched, recorder
from tilewise.machine.workspaces import GRAIN, Workspaces
from tilewise.plan import Plan
from tilewise.solvers import Split

__all__ = ["Called", "Launch", "NotRecorded", "Recorded", "Shown", "TwoPlaces", "recorded"]

CPU = torch.device("cpu")
MAKE_EMPTY = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}
"""Operators that only allocate."""


class NotRecorded(Exception):
    """A plan does what native code cannot repeat. The message says what."""


class Shown(NamedTuple):
    """A tensor in the memory of value number ``value``, from byte ``offset`` on."""

    value: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Launch(NamedTuple):
    """A launch of the compiled function at ``worker`` with ``words``, on at most ``threads`` threads.

    ``addresses`` has (word, value, offset): that word is the address of a value's memory, or with the value -1 of the
    words themselves, plus an offset in bytes.
    """

    worker: int
    words: tuple[int, ...]
    addresses: tuple[tuple[int, int, int], ...]
    threads: int


class Called(NamedTuple):
    """A call of one of torch's operators, with :class:`Shown` for tensors; ``gives`` is its new value, or -1."""

    overload: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    gives: int


class Recorded(NamedTuple):
    """What a plan does: ``does`` in order, over values.

    The first values are the plan's operands, then its bias and residual where it has them, its result, and its
    workspace. The others follow in ``made``: a description, and whether an operator returns it; else it is memory for
    the time between its first and its last use. ``held`` must stay in memory as long as the list is in use.
    """

    does: tuple[Launch | Called, ...]
    made: tuple[tuple[Shown, bool], ...]
    held: tuple[Any, ...]
    workspace: int


class _Operated(NamedTuple):
    """A call of an operator, as it was."""

    overload: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    found: Any


class _Watch(TorchDispatchMode):
    """Writes down the operators that run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """That it should would import all of Dynamo, which takes longer than loading a network."""
        return False

    def __init__(self, events: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._events.append(_Operated(func, args, kwargs or {}, found))
        return found


class TwoPlaces:
    """The memory of the two runs, which plans that are recorded one after the other use again.

    New memory is mapped page by page as it is first written, which takes longer than most plans take to run.
    """

    def __init__(self) -> None:
        self._buffers = Workspaces(), Workspaces()

    def given(
        self, place: int, tensors: Sequence[Tensor], constants: Mapping[int, Tensor], workspace: int
    ) -> tuple[list[Tensor], Tensor | None]:
        """What a plan runs on at ``place``, 0 or 1: zeros that lie as ``tensors`` do, and a workspace."""
        sizes = [0 if i in constants else _extent(t) for i, t in enumerate(tensors)]
        begins = list(itertools.accumulate((size + GRAIN - size % GRAIN for size in (*sizes, workspace)), initial=0))
        buffer = self._buffers[place].take(begins[-1], CPU)  # pieces do not touch: ends of one are no part of another
        pieces = [buffer.narrow(0, begin, size) for begin, size in zip(begins, (*sizes, workspace), strict=False)]
        given = [
            constants[i] if i in constants else piece.zero_().view(t.dtype).as_strided(t.shape, t.stride())
            for i, (t, piece) in enumerate(zip(tensors, pieces, strict=False))
        ]
        return given, pieces[-1] if workspace else None


def recorded(
    bound: Any, tensors: Sequence[Tensor], constants: Mapping[int, Tensor], places: TwoPlaces | None = None
) -> Recorded:
    """What ``bound`` does for ``tensors``: operands, bias and residual where the problem has them, and the result.

    ``constants`` are those of them that are the same at every call, by their index; the others only say how tensors
    lie. The plan runs in the memory of ``places``, or in new memory. Raises :class:`NotRecorded`.
    """
    problem = bound.problem
    if len(problem.operands) != 2 or len(problem.results) != 1:
        raise NotRecorded(f"{problem.key} has other operands than two, or several results")
    if problem.device_type != "cpu" or problem.accumulate:
        raise NotRecorded(f"{problem.key} is not on a CPU, or adds to its result")
    if problem.constant_operand and problem.checked_operand:
        raise NotRecorded("every call looks whether the weight has changed")
    if name := _runs_at_once(bound.plan):
        raise NotRecorded(f"the parts of {name} run at once, in threads of their own")

    def run(given: Sequence[Tensor], workspace: Tensor | None) -> None:
        operands, out = given[:2], given[-1]
        rest = list(given[2:-1])
        bias = rest.pop(0) if problem.bias else None
        bound.run_in(workspace, *operands, bias, out, rest.pop(0) if rest else None)

    with torch.no_grad(), torch.inference_mode(False):
        places = places or TwoPlaces()
        one, other = (places.given(place, tensors, constants, bound.workspace) for place in (0, 1))
        run(*one)  # prepares constant filters
        first, second = _watched(run, *one), _watched(run, *other)
    return _Comparison(first, second, bound).recorded()


class _Run(NamedTuple):
    """One of the two runs: the tensors, what happened, and what was held."""

    tensors: tuple[Tensor, ...]
    events: list[Any]
    held: list[Any]


def _watched(run: Callable[..., None], given: list[Tensor], workspace: Tensor | None) -> _Run:
    """Run and write down what happens."""
    with recorder.recording() as (events, held), _Watch(events):
        run(given, workspace)
    return _Run((*given, *(() if workspace is None else (workspace,))), events, held)


def _runs_at_once(plan: Plan) -> str:
    """The name of a split in ``plan`` whose parts run at once; empty where there is none."""
    solver = solvers.get(plan.solver)
    if isinstance(solver, Split) and (solver.at_once or solver.across):
        return plan.solver
    return next(filter(None, map(_runs_at_once, plan.children)), "")


class _Known:
    """The memory of the values of one run."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        for value, tensor in enumerate(tensors):
            self.add(value, tensor)

    def add(self, value: int, tensor: Tensor) -> None:
        """Let ``tensor``'s memory be that of ``value``."""
        self._ranges.append((tensor.data_ptr(), tensor.data_ptr() + max(1, _extent(tensor)), value))

    def find(self, address: int) -> tuple[int, int] | None:
        """The value in whose memory ``address`` lies, and the offset from its beginning."""
        return next(((v, address - begin) for begin, end, v in self._ranges if begin <= address < end), None)

    def ending(self, address: int) -> set[tuple[int, int]]:
        """The values whose memory ends at ``address``, with their sizes: kernels are told where scratch ends."""
        return {(v, address - begin) for begin, end, v in self._ranges if address == end}


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((reach + 1) * tensor.element_size())


class _Comparison:
    """Two runs of one plan, compared event by event."""

    def __init__(self, first: _Run, second: _Run, bound: Any) -> None:
        self._first, self._second, self._workspace = first, second, bound.workspace
        self._known = _Known(first.tensors), _Known(second.tensors)
        self._count = len(first.tensors)
        self._made: list[tuple[Shown, bool]] = []
        self._held: list[Any] = [bound, first.held]

    def recorded(self) -> Recorded:
        """The list. Raises :class:`NotRecorded`."""
        if [_kind(e) for e in self._first.events] != [_kind(e) for e in self._second.events]:
            raise NotRecorded("two runs did different things")
        does = tuple(self._does())
        return Recorded(does, tuple(self._made), tuple(self._held), self._workspace)

    def _does(self) -> Iterator[Launch | Called]:
        for one, other in zip(self._first.events, self._second.events, strict=True):
            if isinstance(one, Launched):
                yield self._launch(one, other)
            elif (called := self._called(one, other)) is not None:
                yield called

    def _launch(self, one: Launched, other: Launched) -> Launch:
        addresses = []
        if len(one.words) != len(other.words) or one.threads != other.threads:
            raise NotRecorded("two runs launched a kernel in different ways")
        for place, (a, b) in enumerate(zip(one.words, other.words, strict=True)):
            if a == b and not 0 <= a - one.data < 8 * len(one.words):
                continue
            if a - one.data == b - other.data and 0 <= a - one.data < 8 * len(one.words):
                addresses.append((place, -1, a - one.data))
                continue
            addresses.append((place, *self._address(place, a, b)))
        return Launch(one.worker, one.words, tuple(addresses), one.threads)

    def _address(self, place: int, one: int, other: int) -> tuple[int, int]:
        """The value and offset that word ``place`` refers to."""
        first, second = self._known
        found = first.find(one)
        if found is not None and found == second.find(other):
            return found
        ends = first.ending(one) & second.ending(other)
        if len(ends) != 1:
            raise NotRecorded(f"word {place} of a launch is the address of something else than the plan's tensors")
        return ends.pop()

    def _called(self, one: _Operated, other: _Operated) -> Called | None:
        """A call of an operator; ``None`` for one that only allocates or makes a view."""
        overload = one.overload
        results = overload._schema.returns
        if results and all(r.alias_info is not None and not r.alias_info.is_write for r in results):
            return None  # a view: found by its address where it is used
        if overload._schema.name in MAKE_EMPTY:
            self._make(one.found, other.found, returned=False)
            return None
        arguments = self._both(one.arguments, other.arguments)
        keywords = {name: self._both(value, other.keywords[name]) for name, value in one.keywords.items()}
        pairs = [(one.found, other.found)] if isinstance(one.found, Tensor) else []
        if isinstance(one.found, tuple | list):
            pairs = list(zip(one.found, other.found, strict=True))
        elif not pairs and one.found is not None:
            raise NotRecorded(f"{overload} returns a {type(one.found).__name__}")
        new = [pair for pair in pairs if self._known[0].find(pair[0].data_ptr()) is None and pair[0].numel()]
        if len(new) > 1:
            raise NotRecorded(f"{overload} returns several tensors")
        return Called(overload, tuple(arguments), keywords, self._make(*new[0], returned=True) if new else -1)

    def _make(self, one: Tensor, other: Tensor, *, returned: bool) -> int:
        """The number of a new value."""
        value = self._count + len(self._made)
        self._made.append((Shown(value, 0, tuple(one.shape), tuple(one.stride()), one.dtype), returned))
        for known, tensor in zip(self._known, (one, other), strict=True):
            known.add(value, tensor)
        return value

    def _both(self, one: Any, other: Any) -> Any:
        """An argument of both runs, with :class:`Shown` in place of tensors."""
        if isinstance(one, tuple | list):
            return type(one)(self._both(a, b) for a, b in zip(one, other, strict=True))
        if not isinstance(one, Tensor):
            if one != other:
                raise NotRecorded(f"two runs gave an operator {one!r} and {other!r}")
            return one
        if one is other and one.layout is not torch.strided:
            self._held.append(one)
            return one
        if one.layout is not torch.strided:
            raise NotRecorded(f"an operator takes a tensor in the layout {one.layout}, another one at each call")
        found = self._known[0].find(one.data_ptr())
        if found is not None and found == self._known[1].find(other.data_ptr()):
            return Shown(*found, tuple(one.shape), tuple(one.stride()), one.dtype)
        if found is None and one.data_ptr() == other.data_ptr():
            self._held.append(one)  # a prepared constant
            return one
        raise NotRecorded("an operator takes a tensor that is none of the plan's")


def _kind(event: Any) -> tuple[Any, ...]:
    """What two runs must have in common of an event."""
    return (event.worker,) if isinstance(event, Launched) else (event.overload,)
