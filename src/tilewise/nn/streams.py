"""Runs a traced forward with its branches on CUDA streams at once, or on one.

**Order.** Side streams begin with what the main stream had queued at the fork, and the main stream goes on when all of
them are done; branches are launched in the order of the original, so that they draw the same random numbers.

**Memory.** The caching allocator keeps memory by the stream it was allocated on and hands it out again as soon as the
host lets go of it. What branches share is held until the main stream waits for them; their results until the side
streams wait for the join. What autograd saved of shared values goes whenever backward lets go of it: that is marked
for the side streams (``record_stream``). Gradients between streams are autograd's own care: every backward node runs
on the stream of its forward, and the engine waits and marks in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from tilewise.device import is_capturing
from tilewise.nn.branches import MAIN, Fork, Program, Slot, Step, mapped
from tilewise.nn.call import disturbed, is_plain
from tilewise.nn.swaps import swap, swapped

__all__ = [
    "CudaLanes",
    "InSequence",
    "Lanes",
    "LanesOf",
    "execute",
    "fork",
    "forked_forward",
    "in_sequence",
    "in_sequence_now",
    "is_forked",
    "lanes_for",
    "program_in",
]

MARK = "_tilewise_branches"
PRIORITY = -1
"""Of side streams: they come from a pool of torch's that few programs draw from."""


class Lanes(Protocol):
    """Where branches run. ``values`` are whatever the slots hold, tensors among them."""

    def fork(self, width: int, values: Sequence[Any]) -> None:
        """Lanes below ``width`` begin with what was queued; ``values`` are what they read."""

    def switch(self, lane: int) -> None:
        """What follows is launched on ``lane``."""

    def join(self, width: int) -> None:
        """:data:`MAIN` goes on when the lanes below ``width`` are done."""

    def settle(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        """The joins are launched: ``values``, which they read, may go; ``in_place``: they may also be what is left."""


LanesOf = Callable[[Any], Lanes | None]
"""The lanes for a forward of this input, ``None`` where there are none."""


class InSequence:
    """One after the other on the current stream. Notes when a branch writes into what branches share."""

    def __init__(self) -> None:
        self._shared: list[tuple[torch.Tensor, int]] = []
        self.wrote = False

    def fork(self, width: int, values: Sequence[Any]) -> None:
        self._shared = [(v, v._version) for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]

    def switch(self, lane: int) -> None:
        pass

    def join(self, width: int) -> None:
        self.wrote |= any(tensor._version != version for tensor, version in self._shared)
        self._shared = []

    def settle(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        pass


class CudaLanes:
    """Side streams beside the ``main`` one, for the thread that made it."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._sides: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []
        self._forked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._joined = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lane = MAIN

    def fork(self, width: int, values: Sequence[Any]) -> None:
        if len(self._sides) < width:
            self._grow(width)
        self._forked.record(self._main)
        keeps = torch.is_grad_enabled()
        for side in self._sides[:width]:
            side.wait_event(self._forked)
            if keeps:
                for value in values:
                    if isinstance(value, torch.Tensor):
                        value.record_stream(side)

    def _grow(self, width: int) -> None:
        # torch hands out a few streams in turns: one may be the main one, or one that is here already.
        seen = {self._main.cuda_stream, *(side.cuda_stream for side in self._sides)}
        for _ in range(64):
            if len(self._sides) == width:
                return
            stream = torch.cuda.Stream(self._main.device, priority=PRIORITY)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in seen:
                seen.add(stream.cuda_stream)
                self._sides.append(stream)
                self._done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        raise RuntimeError(f"torch has fewer than {width} streams for branches")

    def switch(self, lane: int) -> None:
        if lane != self._lane:
            self._lane = lane
            torch.cuda.set_stream(self._main if lane == MAIN else self._sides[lane])

    def join(self, width: int) -> None:
        self.switch(MAIN)
        for side, done in zip(self._sides[:width], self._done, strict=False):
            done.record(side)
            self._main.wait_event(done)

    def settle(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        if in_place:
            for value in values:
                if isinstance(value, torch.Tensor):
                    value.record_stream(self._main)
        # In a capture the next fork says the same, and a side stream must not be left with work of its own.
        if not is_capturing(self._main.device):
            self._joined.record(self._main)
            for side in self._sides[:width]:
                side.wait_event(self._joined)


class _Pool(threading.local):
    """Lanes by device and main stream, and whether they may be used."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], CudaLanes] = {}
        self.off = 0


_pool = _Pool()


@contextmanager
def in_sequence() -> Iterator[None]:
    """In this thread, branches run one after the other."""
    _pool.off += 1
    try:
        yield
    finally:
        _pool.off -= 1


def in_sequence_now() -> bool:
    """Whether this thread is in :func:`in_sequence`."""
    return _pool.off > 0


def lanes_for(x: Any) -> Lanes | None:
    """Where branches of a forward of ``x`` run at once; ``None`` where they must run in sequence.

    That is on a CPU, on another device than the current, and where somebody watches operators or saved tensors: under
    tracing and transforms, and in a checkpoint, which computes again on whichever stream asks first.
    """
    if in_sequence_now() or not is_plain(x) or not x.is_cuda or disturbed():
        return None
    device = x.get_device()
    if device != torch._C._cuda_getDevice() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    if x.is_leaf and x.requires_grad and torch.is_autocast_enabled("cuda"):
        return None  # autocast would keep what one branch casts for the others
    key = device, torch._C._cuda_getCurrentRawStream(device)
    lanes = _pool.lanes.get(key)
    if lanes is None:
        lanes = _pool.lanes[key] = CudaLanes(torch.cuda.current_stream(device))
    return lanes


def execute(program: Program, module: nn.Module, x: torch.Tensor, lanes: Lanes) -> Any:
    """What ``module``'s forward gives for ``x``, by its program."""
    values: list[Any] = [None] * program.size
    values[0] = x
    del x
    for stage in program.stages:
        if isinstance(stage, Fork):
            _run_fork(stage, module, values, lanes)
        else:
            _run_step(stage, module, values)
    return mapped(program.output, lambda slot: values[slot.index], Slot)


def _run_fork(fork: Fork, module: nn.Module, values: list[Any], lanes: Lanes) -> None:
    lanes.fork(fork.width, [values[index] for index in fork.shared])
    try:
        for step in fork.steps:
            lanes.switch(step.lane)
            _run_step(step, module, values)
    finally:
        lanes.switch(MAIN)
        lanes.join(fork.width)
    for step in fork.joins:
        _run_step(step, module, values)
    lanes.settle(fork.width, [values[index] for index in fork.results], in_place=fork.in_place)
    for index in fork.done:
        values[index] = None


def _run_step(step: Step, module: nn.Module, values: list[Any]) -> None:
    args = [mapped(value, lambda slot: values[slot.index], Slot) for value in step.args]
    kwargs = step.kwargs and {k: mapped(v, lambda slot: values[slot.index], Slot) for k, v in step.kwargs.items()}
    kind, target = step.kind, step.target
    if kind == "function":
        result = target(*args, **kwargs)
    elif kind == "method":
        result = getattr(args[0], target)(*args[1:], **kwargs)
    else:
        result = module
        for name in target:
            result = getattr(result, name)
        if kind == "module":
            result = result(*args, **kwargs)
    values[step.result] = result
    for index in step.done:
        values[index] = None


def forked_forward(program: Program, lanes_of: LanesOf = lanes_for) -> Callable[..., Any]:
    """The function to bind as the module's ``forward``. Where ``lanes_of`` its input is none, the class' own runs.

    So it does where the module is called otherwise than with one tensor, or its attributes have been changed since.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or len(args) != 1 or kwargs:
            return type(self).forward(self, *args, **kwargs)
        lanes = lanes_of(args[0])
        if lanes is None or not _holds(program, self):
            return type(self).forward(self, *args)
        return execute(program, self, args[0], lanes)

    setattr(forward, MARK, program)
    return forward


def _holds(program: Program, module: nn.Module) -> bool:
    if program.training is not None and program.training is not module.training:
        return False
    attributes = module.__dict__
    for name, value in program.guards:
        now = attributes.get(name)
        if now is not value and (type(now) is not type(value) or now != value):
            return False
    return True


def fork(module: nn.Module, program: Program, lanes_of: LanesOf = lanes_for) -> None:
    """Have ``module`` run its branches at once; :func:`tilewise.nn.swaps.swap_back` undoes it."""
    forward = forked_forward(program, lanes_of)
    forward.__name__ = "forward"
    forward.__qualname__ = f"{type(module).__qualname__}.forward"
    swap(module, forward)


def program_in(module: nn.Module) -> Program | None:
    """The program by which ``module`` runs its branches at once, ``None`` where it does not."""
    found: Program | None = getattr(swapped(module), MARK, None)
    return found


def is_forked(module: nn.Module) -> bool:
    """Whether the module runs its branches at once."""
    return program_in(module) is not None
