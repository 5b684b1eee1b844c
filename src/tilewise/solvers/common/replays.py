"""Functions of many small kernels that are recorded as a CUDA graph once, and replayed for tensors that look alike.

A replay costs the host as much as a launch or two, whatever the number of kernels. A graph reads and writes fixed
addresses. So the tensors of a call are copied to where its graph reads them, and its results are copied out: what a
caller has is never changed by a later call.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tilewise.machine.device import is_capturing
from tilewise.machine.recent import Recent
from tilewise.machine.recording import Recorder, recorder_of
from tilewise.machine.torch_state import read_precision

__all__ = ["MOST_GRAPHS", "Replays"]

MOST_GRAPHS = 64
"""Graphs that a process keeps. Where there are as many, further functions are launched singly."""
MOST_OWN = 8
"""Graphs that are kept for one user: of each pass and direction, for whole blocks of steps and the last one."""
MOST_SEEN = 64
"""Kinds of calls that are remembered, of which one is recorded when it comes again."""
GRAIN = {"cpu": 64, "cuda": 256}
"""Bytes: libraries may choose kernels by how addresses are aligned, up to this. Allocators align to as much."""

Run = Callable[..., Any]


@dataclass(eq=False)
class _Graph:
    """A recorded function: where it reads and writes, what replays it, and its results."""

    recorder: Recorder
    statics: list[Tensor | None]
    replay: Callable[[], object]
    results: Any


_alive: weakref.WeakSet[_Graph] = weakref.WeakSet()
_told: set[str] = set()


class Replays:
    """Graphs of one user's functions, by their names and by what their tensors look like.

    ``replays(name, run, given, written)`` returns what ``run(*given, *written)`` returns, in new tensors, and leaves in
    ``written`` what it writes there; it may also overwrite what is ``given``. ``run`` must do the same work for equal
    names and tensors of equal shapes, strides, types and alignment, and nothing on the host that a replay would miss.

    A kind of call is recorded when it comes for the second time, or ``at_once``. It runs as it is while a graph is
    being captured, as part of that, and where it cannot be recorded: :attr:`reasons` says why and how often, and a
    warning says each reason once. ``recorder`` makes what records on a device.

    Example::

        replays = Replays()
        (doubled,) = replays("twice", lambda a: (a + a,), [torch.ones(3, device="cuda")], at_once=True)
    """

    def __init__(self, recorder: Callable[[torch.device], Recorder] = recorder_of) -> None:
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Recent[Hashable, bool] = Recent(MOST_SEEN)
        self._lock = threading.Lock()
        self.reasons: dict[str, int] = {}

    def __call__(
        self,
        name: Hashable,
        run: Run,
        given: Sequence[Tensor | None],
        written: Sequence[Tensor] = (),
        *,
        at_once: bool = False,
    ) -> Any:
        tensors = [*given, *written]
        device = next(t.device for t in tensors if t is not None)
        if is_capturing(device):
            return run(*tensors)
        key = name, _flags(), device, *map(_looks, tensors)
        with self._lock:  # whoever copies to a graph's tensors also takes the results
            graph = self._graphs.get(key)
            if graph is None and self._is_due(key, at_once):
                graph = self._recorded(key, run, tensors, device)
            if graph is not None:
                return _replayed(graph, tensors, len(given))
        return run(*tensors)

    def __len__(self) -> int:
        """The number of graphs that are kept."""
        return len(self._graphs)

    def _is_due(self, key: Hashable, at_once: bool) -> bool:
        """Whether a kind of call is to be recorded now. One that could not be is not tried again."""
        tried = self._seen.get(key)
        if tried is None and not at_once:
            self._seen[key] = False
        if tried or (tried is None and not at_once):
            return False
        if len(self._graphs) >= MOST_OWN or len(_alive) >= MOST_GRAPHS:
            self._note(f"{MOST_GRAPHS} CUDA graphs, or {MOST_OWN} of one layer, are kept at the most")
            return False
        self._seen[key] = True
        return True

    def _recorded(self, key: Hashable, run: Run, tensors: Sequence[Tensor | None], device: torch.device) -> Any:
        """The graph of a call; ``None`` where it cannot be recorded, with the reason noted."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                recorder = self._recorder(device)
                statics = [None if t is None else _alike(t) for t in tensors]
                _copied(statics, tensors)
                recorder.warm_up(lambda: run(*statics))
                replay, results = recorder.record(lambda: run(*statics))
        except (RuntimeError, ValueError) as error:
            text = str(error).strip().splitlines()
            self._note(text[0] if text else type(error).__name__, warn=True)
            return None
        graph = self._graphs[key] = _Graph(recorder, statics, replay, results)
        _alive.add(graph)
        return graph

    def _note(self, reason: str, *, warn: bool = False) -> None:
        """Count a reason why a call was not recorded."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if warn and reason not in _told:
            _told.add(reason)
            warnings.warn(f"kernels are launched singly, as no CUDA graph could record them: {reason}", stacklevel=4)


def _replayed(graph: _Graph, tensors: Sequence[Tensor | None], given: int) -> Any:
    """Replay a graph for ``tensors``, of which the first were ``given`` and the others are written."""
    graph.recorder.ordered()
    with torch.no_grad():
        _copied(graph.statics[:given], tensors[:given])
        graph.replay()
        _copied(tensors[given:], graph.statics[given:])
        return tree_map_only(Tensor, torch.clone, graph.results)


def _copied(to: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> None:
    """Copy each tensor that is there."""
    for target, source in zip(to, of, strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def _looks(t: Tensor | None) -> tuple[object, ...] | None:
    """What a graph for a tensor depends on, its values aside."""
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % GRAIN[t.device.type])


def _alike(t: Tensor) -> Tensor:
    """A new tensor with the strides and the alignment of another, so that libraries choose the same kernels."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    first = t.data_ptr() % GRAIN[t.device.type] // t.element_size()
    whole = torch.zeros(first + last + 1, dtype=t.dtype, device=t.device)
    return whole.as_strided(t.shape, t.stride(), first)


def _flags() -> tuple[object, ...]:
    """torch's flags on which matrix products depend, as they are now."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        read_precision("cuda", "matmul"),
    )
