"""One step by torch, recorded: every operator's time of host and device, in order, and which passes it computes.

torch's profiler gives the times. Hooks on the modules, and on the nodes of their graph, mark where a pass begins and
ends. A profiler makes the host slower, so its times are brought to what the step takes without one.
"""

from __future__ import annotations

import bisect
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _autograd as autograd
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tilewise.nn.step.search import Key

__all__ = ["Operator", "Trace", "Traceable", "profiled", "trace_step", "why_not_traced"]

MARK = "tilewise::"
CHATTER = (b"USDT:", b"INFO:", b"STAGE:")
"""How lines begin that the profiler's library writes to stderr whatever happens."""
LAUNCH_MOST_MS = 0.2
"""The host's longest launch. One that takes longer waited for room in the device's queue."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
RUNTIME = re.compile(r"cu(da)?[A-Z]\w*$")
"""Calls of CUDA's runtime and driver. Other events of the host count in numbers of their own."""
WRAPPERS = ("autograd::engine::evaluate_function", "torch::autograd::")
"""What runs other operators, by the beginnings of their names."""


@dataclass(frozen=True)
class Operator:
    """One operator of a step, or a pass of a module: ``host_ms`` until it is launched, ``device_ms`` to compute it.

    On a CPU the host computes it, and ``device_ms`` is 0. ``passes`` are the problems that it computes, which may run
    by plan. ``waits`` says that the host waits for the device first.
    """

    name: str
    host_ms: float
    device_ms: float = 0.0
    waits: bool = False
    passes: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The operators of one step in their order, as torch's own choice computes them."""

    operators: tuple[Operator, ...]

    @property
    def on_device(self) -> bool:
        """Whether a device works beside the host; else the host computes all itself, in one queue."""
        return any(operator.device_ms > 0 for operator in self.operators)

    def at_host_ms(self, host_ms: float) -> Trace:
        """The same step where the host needs ``host_ms`` in all: a profiler makes it slower, by as much everywhere."""
        profiled = sum(operator.host_ms for operator in self.operators)
        share = min(1.0, host_ms / profiled) if profiled > 0 else 1.0
        return Trace(tuple(replace(operator, host_ms=operator.host_ms * share) for operator in self.operators))


class Traceable(Protocol):
    """Modules whose calls in a step can be told apart."""

    @property
    def candidates(self) -> Mapping[str, nn.Module]:
        """The modules, by name."""
        ...

    def keys_of_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Key], list[Key]]:
        """The problems of a call's forward, and those of its gradients."""
        ...


def why_not_traced() -> str:
    """Why no step can be recorded now; empty where one can."""
    if not torch.profiler.kineto_available():
        return "torch has no profiler of devices"
    return "another profiler is running" if autograd._profiler_enabled() else ""


Interval = tuple[float, float, int]
"""Where a pass begins and ends on the host, in ms, and its number."""


def trace_step(run: Callable[[], object], modules: Traceable, device: torch.device) -> Trace | None:
    """Record one step of ``run()``, which is run three times whatever is found. Raises what it raises.

    ``None`` where nothing can be told: the profiler sees no kernels, or the step has other calls each time.
    """
    noted: list[tuple[list[Key], list[Key]]] = []
    with _noting(modules, noted):
        run()
    _synchronize(device)
    begin = time.perf_counter()
    run()
    host_ms = (time.perf_counter() - begin) * 1e3
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    _synchronize(device)
    with profiled(activities) as recorded, _marking(modules.candidates) as calls:
        with record_function(f"{MARK}step"):
            run()
        _synchronize(device)
    if calls[0] != len(noted):
        return None
    kineto = recorded.profiler.kineto_results if recorded.profiler is not None else None
    events = [] if kineto is None else [Event.of(event) for event in kineto.events()]
    operators = operators_of(events, noted, on_gpu=device.type == "cuda")
    return Trace(tuple(operators)).at_host_ms(host_ms) if operators else None


@dataclass(frozen=True)
class Event:
    """One event of a profile, in milliseconds. ``launch`` is the number by which a launch and its kernel are told."""

    name: str
    start: float
    end: float
    on_device: bool = False
    launch: int = 0

    @classmethod
    def of(cls, event: Any) -> Event:
        """The event of the profiler's own kind."""
        on_device = event.device_type() == autograd.DeviceType.CUDA
        start = event.start_ns() / 1e6
        return cls(event.name(), start, start + event.duration_ns() / 1e6, on_device, event.correlation_id())


def operators_of(
    events: Iterable[Event], noted: Sequence[tuple[list[Key], list[Key]]], *, on_gpu: bool
) -> list[Operator]:
    """The operators of a profiled step; empty where it is not whole, or there are no kernels on a GPU.

    ``noted`` has the problems of each call, whose marks are numbered: twice the call's number for its forward, and one
    more for its gradients.
    """
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    step = next((event for event in ordered if event.name == f"{MARK}step" and not event.on_device), None)
    if step is None:
        return []
    within = [event for event in ordered if event.on_device or step.start <= event.start < step.end]
    passes = _intervals(within)
    found = list(_launches(within, passes) if on_gpu else _computed(within, passes))
    if on_gpu and not any(ms > 0 for _, _, _, ms, _ in found):
        return []
    operators, before = [], step.start
    for name, start, end, device_ms, number in found:
        keys = () if number is None else tuple(noted[number // 2][number % 2])
        waits = name in WAITS
        operators.append(Operator(name, max(0.0, (start if waits else end) - before), device_ms, waits, keys))
        before = max(before, end)
    return [*_merged(operators, [number for *_, number in found]), Operator("end", max(0.0, step.end - before))]


Found = tuple[str, float, float, float, int | None]
"""Name, start, end, the device's ms and the number of the pass, of what the host does next."""


def _computed(events: Sequence[Event], passes: Sequence[Interval]) -> Iterator[Found]:
    """On a CPU: each pass as one, and the outermost operators between them."""
    waiting = list(passes)
    until = -float("inf")
    for event in events:
        while waiting and waiting[0][0] <= event.start:
            begin, end, number = waiting.pop(0)
            yield f"pass {number}", begin, end, 0.0, number
            until = max(until, end)
        holds_pass = bool(waiting) and waiting[0][0] < event.end
        if event.start >= until and not holds_pass and not event.name.startswith((MARK, *WRAPPERS)):
            yield event.name, event.start, event.end, 0.0, None
            until = event.end


def _launches(events: Sequence[Event], passes: Sequence[Interval]) -> Iterator[Found]:
    """On a GPU: each launch with its kernel's time, and each wait of the host's."""
    kernels: dict[int, float] = {}
    for event in events:
        if event.on_device and event.launch:
            kernels[event.launch] = kernels.get(event.launch, 0.0) + event.end - event.start
    begins = [begin for begin, _, _ in passes]
    for event in events:
        if event.on_device or not RUNTIME.match(event.name):
            continue
        if event.name in WAITS:
            yield event.name, event.start, event.end, 0.0, None
        elif event.launch in kernels:
            place = bisect.bisect_right(begins, event.start) - 1
            inside = place >= 0 and event.start < passes[place][1]
            number = passes[place][2] if inside else None
            end = min(event.end, event.start + LAUNCH_MOST_MS)
            yield event.name, event.start, end, kernels.pop(event.launch), number


def _merged(operators: Sequence[Operator], numbers: Sequence[int | None]) -> Iterator[Operator]:
    """The operators with those of one pass, in a row, as one."""
    last: int | None = None
    whole: Operator | None = None
    for operator, number in zip(operators, numbers, strict=True):
        if whole is not None and number is not None and number == last:
            host_ms, device_ms = whole.host_ms + operator.host_ms, whole.device_ms + operator.device_ms
            whole = replace(whole, host_ms=host_ms, device_ms=device_ms)
        else:
            if whole is not None:
                yield whole
            whole = operator
        last = number
    if whole is not None:
        yield whole


def _intervals(events: Iterable[Event]) -> list[Interval]:
    """The passes that the marks tell of, in order; what lies within another, or has no end, is left out."""
    begun: dict[int, float] = {}
    found: list[Interval] = []
    for event in events:
        kind, _, number = event.name.removeprefix(MARK).partition(" ")
        if event.on_device or not event.name.startswith(MARK) or not number:
            continue
        if kind == "begin":
            begun[int(number)] = event.end
        elif int(number) in begun:
            begin = begun.pop(int(number))
            if not found or begin >= found[-1][1]:
                found.append((begin, event.start, int(number)))
    return sorted(found)


@contextmanager
def profiled(activities: list[ProfilerActivity]) -> Iterator[profile]:
    """Meanwhile profile. What the profiler's library says on stderr of its beginning and end is not passed on."""
    recorded = profile(activities=activities, acc_events=True)
    with _lines_dropped(CHATTER):
        recorded.start()
    try:
        yield recorded
    finally:
        with _lines_dropped(CHATTER):
            recorded.stop()


@contextmanager
def _lines_dropped(beginnings: tuple[bytes, ...]) -> Iterator[None]:
    """Leave out lines with such ``beginnings`` of what native code writes to stderr meanwhile."""
    try:
        stderr_copy = os.dup(2)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            aside.seek(0)
            kept = b"".join(line for line in aside if not line.startswith(beginnings))
            if kept:
                os.write(2, kept)


def _mark(text: str) -> None:
    """Leave a mark in the profile."""
    with record_function(f"{MARK}{text}"):
        pass


@contextmanager
def _noting(modules: Traceable, noted: list[tuple[list[Key], list[Key]]]) -> Iterator[None]:
    """Meanwhile note the problems of each call of the modules."""

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: object) -> None:
        """Note one call."""
        noted.append(modules.keys_of_call(name, args, kwargs))

    with ExitStack() as stack:
        for name, module in modules.candidates.items():
            stack.callback(module.register_forward_hook(functools.partial(note, name), with_kwargs=True).remove)
        yield


@contextmanager
def _marking(candidates: Mapping[str, nn.Module]) -> Iterator[list[int]]:
    """Meanwhile mark where each call, and the node of its gradients, begins and ends; yields the number of calls."""
    calls = [0]
    hooks: list[Any] = []

    def begins(_: nn.Module, __: object) -> None:
        """A call begins."""
        _mark(f"begin {2 * calls[0]}")

    def ends(_: nn.Module, __: object, output: object) -> None:
        """A call is over: its node in the graph, where there is one, is watched."""
        number = 2 * calls[0]
        calls[0] += 1
        _mark(f"end {number}")
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None:
            hooks.append(node.register_prehook(lambda _: _mark(f"begin {number + 1}")))
            hooks.append(node.register_hook(lambda *_: _mark(f"end {number + 1}")))

    with ExitStack() as stack:
        for module in candidates.values():
            stack.callback(module.register_forward_pre_hook(begins).remove)
            stack.callback(module.register_forward_hook(ends).remove)
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
