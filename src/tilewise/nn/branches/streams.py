"""Running a traced forward with its branches on CUDA streams at once, or on one stream.

**Order.** Side streams start with what the main stream had queued at the fork, and the main stream continues when all
of them are done. Branches are launched in the order of the forward, so that they draw the same random numbers.

**Memory.** The caching allocator keeps memory by the stream it was allocated on and hands it out again as soon as the
host drops it. Values that branches share are held until the main stream waits for the branches; results of branches are
held until the side streams wait for the join. Shared values that autograd saved are dropped whenever backward has used
them, so they are marked for the side streams (``record_stream``). Gradients between streams are up to autograd: every
backward node runs on the stream of its forward, and the engine waits and marks in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from tilewise.machine.device import is_capturing
from tilewise.nn.branches.find import MAIN, Fork, Program, Slot, Step, mapped
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.swaps import swap, swapped

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
"""The priority of side streams. They come from a pool of torch's that few programs draw from."""


class Lanes(Protocol):
    """The streams on which branches run. ``values`` are the contents of slots, tensors among them."""

    def fork(self, width: int, values: Sequence[Any]) -> None:
        """Let lanes below ``width`` wait for what is queued on the main one. ``values`` are what the branches read."""

    def switch(self, lane: int) -> None:
        """Launch what follows on ``lane``."""

    def join(self, width: int) -> None:
        """Let :data:`MAIN` wait until the lanes below ``width`` are done."""

    def release(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        """Let go of ``values``, which the joins read, once the joins are launched.

        With ``in_place`` a join may have written into one of them, which is then its result and stays alive.
        """


LanesOf = Callable[[Any], Lanes | None]
"""The lanes for a forward of this input, ``None`` where there are none."""


class InSequence:
    """All branches one after the other on the current stream. ``wrote`` says whether one wrote into a shared tensor."""

    def __init__(self) -> None:
        self._shared: list[tuple[torch.Tensor, int]] = []
        self.wrote = False

    def fork(self, width: int, values: Sequence[Any]) -> None:
        """Note the versions of the tensors that branches share."""
        self._shared = [(v, v._version) for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]

    def switch(self, lane: int) -> None:
        pass  # there is one stream

    def join(self, width: int) -> None:
        """Compare the shared tensors' versions with those noted."""
        self.wrote |= any(tensor._version != version for tensor, version in self._shared)
        self._shared = []

    def release(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        pass  # there is one stream


class CudaLanes:
    """Side streams beside the stream ``main``, for the thread that made this object."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._sides: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []
        self._forked = torch.cuda.Event()
        self._joined = torch.cuda.Event()
        self._lane = MAIN

    def fork(self, width: int, values: Sequence[Any]) -> None:
        """As :meth:`Lanes.fork`. With autograd on, shared tensors are marked as used by the side streams."""
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
        """Make side streams until there are ``width``. Raises ``RuntimeError`` where torch has too few."""
        # torch hands out a few streams in turns: one may be the main one, or one that is here already.
        handles = {self._main.cuda_stream, *(side.cuda_stream for side in self._sides)}
        for _ in range(64):
            if len(self._sides) == width:
                return
            stream = torch.cuda.Stream(self._main.device, priority=PRIORITY)
            if stream.cuda_stream not in handles:
                handles.add(stream.cuda_stream)
                self._sides.append(stream)
                self._done.append(torch.cuda.Event())
        raise RuntimeError(f"torch has fewer than {width} streams for branches")

    def switch(self, lane: int) -> None:
        """As :meth:`Lanes.switch`."""
        if lane != self._lane:
            self._lane = lane
            torch.cuda.set_stream(self._main if lane == MAIN else self._sides[lane])

    def join(self, width: int) -> None:
        """As :meth:`Lanes.join`."""
        self.switch(MAIN)
        for side, done in zip(self._sides[:width], self._done, strict=False):
            done.record(side)
            self._main.wait_event(done)

    def release(self, width: int, values: Sequence[Any], *, in_place: bool) -> None:
        """As :meth:`Lanes.release`."""
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
    """The lanes of each device and main stream in one thread. ``off`` counts the open blocks of :func:`in_sequence`."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], CudaLanes] = {}
        self.off = 0


_pool = _Pool()


@contextmanager
def in_sequence() -> Iterator[None]:
    """Within the block, branches run one after the other in this thread."""
    _pool.off += 1
    try:
        yield
    finally:
        _pool.off -= 1


def in_sequence_now() -> bool:
    """Whether this thread is within a block of :func:`in_sequence`."""
    return _pool.off > 0


def lanes_for(x: Any) -> Lanes | None:
    """The lanes for a forward of ``x``; ``None`` where branches must run in sequence.

    They must on a CPU, on a device that is not the current one, and where operators or saved tensors are watched: under
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
    """The result of ``module``'s forward of ``x``, computed by ``program``."""
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
    """Run the branches of one region on their lanes, then the joins on the main one."""
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
    lanes.release(fork.width, [values[index] for index in fork.results], in_place=fork.in_place)
    for index in fork.done:
        values[index] = None


def _run_step(step: Step, module: nn.Module, values: list[Any]) -> None:
    """Run one step: put its result into its slot and empty the slots that are done."""
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
    """The function to bind as the module's ``forward``, which runs ``program`` on lanes.

    The class' own forward runs where ``lanes_of(x)`` is ``None``, where the module is called with anything but one
    tensor, and where its attributes have changed since.
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
    """Whether the module's attributes and mode still are those that the program was traced with."""
    if program.training is not None and program.training is not module.training:
        return False
    attributes = module.__dict__
    for name, value in program.guards:
        now = attributes.get(name)
        if now is not value and (type(now) is not type(value) or now != value):
            return False
    return True


def fork(module: nn.Module, program: Program, lanes_of: LanesOf = lanes_for) -> None:
    """Have ``module`` run its branches at once; :func:`tilewise.nn.layers.swaps.swap_back` undoes it."""
    forward = forked_forward(program, lanes_of)
    forward.__name__ = "forward"
    forward.__qualname__ = f"{type(module).__qualname__}.forward"
    swap(module, forward)


def program_in(module: nn.Module) -> Program | None:
    """The program by which ``module`` runs its branches at once; ``None`` where it does not."""
    program: Program | None = getattr(swapped(module), MARK, None)
    return program


def is_forked(module: nn.Module) -> bool:
    """Whether the module runs its branches at once."""
    return program_in(module) is not None
