"""The captures of one model: which of them a call replays, when another is made, and why a call runs without."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.attached import Attached
from tilewise.nn.graphs.capture import capture
from tilewise.nn.graphs.inputs import Inputs
from tilewise.nn.graphs.modes import in_words, modes, watched
from tilewise.nn.graphs.recorder import CannotCapture, Recorder
from tilewise.nn.graphs.replay import Capture
from tilewise.nn.graphs.standing import Standing
from tilewise.plan import format_bytes

__all__ = ["MOST_ALIVE", "MOST_CAPTURES", "GraphReport", "ModelGraphs"]

MOST_CAPTURES = 16
"""Captures made of one model at most, so that a program which keeps changing it does not capture all the time."""
MOST_ALIVE = 4
"""Captures kept at a time. Each has memory of its own."""
MOST_REASONS = 16
"""Different reasons that are counted."""

COMPILED = "called in a function that torch.compile traced, which runs the model's own operators"
PENDING = (
    "called before the backward of an earlier call, whose tensors a replay would overwrite; without gradients, "
    "torch.no_grad() would do"
)
ELSEWHERE = "called while another thread calls it"
RECORDING = "called while a CUDA graph is captured"


@dataclass(frozen=True)
class GraphReport:
    """What has become of a model's calls since it was captured.

    ``captures`` names each capture by its arguments and mode. ``replayed`` counts the calls that were replayed, and
    ``without`` the others by reason. ``reason`` is that of the last call, empty where it was replayed or there was
    none. ``bytes`` is the memory that captures hold on the device.

    >>> report = tilewise.nn.GraphReport(captures=(), replayed=3, without={"another shape": 1})
    >>> report.replayed, sum(report.without.values())
    (3, 1)
    """

    captures: tuple[str, ...]
    replayed: int
    without: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    bytes: int = 0

    def __str__(self) -> str:
        lines = [f"captured: {words}" for words in self.captures] or ["nothing is captured"]
        lines.append(f"replayed {self.replayed} times, {format_bytes(self.bytes)} held")
        return "\n".join([*lines, *[f"{count} times without a graph: {why}" for why, count in self.without.items()]])


@dataclass(frozen=True)
class _Refused:
    """A capture that could not be made, and the state of the model in which it could not."""

    key: tuple[object, ...]
    standing: Standing
    reason: str

    @property
    def stands(self) -> bool:
        """Whether the model is still in that state."""
        return self.standing.holds() or not self.standing.difference()


class ModelGraphs:
    """Replays ``model`` where a capture fits, and runs its own forward elsewhere.

    ``recorder`` makes a recorder for each capture, so that captures share no memory and may be replayed in any order.
    Captures are made for the arguments that :meth:`expect` has seen, in every mode in which they come.
    """

    def __init__(self, model: nn.Module, recorder: Callable[[], Recorder]) -> None:
        self.model = model
        self.plain: Callable[..., Any] = model.forward
        self._new_recorder, self._recorder = recorder, recorder()
        self._expected: list[Inputs] = []
        self._captures: list[Capture] = []
        self._last: Capture | None = None
        self._refused: _Refused | None = None
        self._made = 0
        self._lock = threading.Lock()
        self._replayed = 0
        self._without: Counter[str] = Counter()
        self._reason = ""
        self.resting = False
        """Whether all calls run without graphs for now, and are not counted."""
        self.attached = Attached(model, _forward_of(self, self.plain))

    def expect(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture the model for such arguments, now and in modes to come.

        Raises :class:`CannotCapture` with the reason where it cannot be captured as it is now.
        """
        inputs, state = Inputs.of(args, kwargs), modes(self._recorder.device.type)
        reason = watched() or (RECORDING if self._recorder.recording() else "")
        if reason:
            raise CannotCapture(reason)
        self._last = self._capture(inputs, state)
        self._expected.append(Inputs((), inputs.shape, tuple(t.requires_grad for t in inputs.tensors)))

    def begin(self) -> None:
        """Count calls from now on."""
        self._replayed, self._reason = 0, ""
        self._without.clear()

    def settle(self) -> None:
        """Let go of captures of the model as it is not any more, and count calls from now on."""
        self._captures = [each for each in self._captures if not each.standing.difference()]
        self._last = None
        self.begin()

    def release(self) -> None:
        """Give the model its own forward back and let go of the captures."""
        self.attached.remove()
        self._captures, self._last, self._refused, self._expected = [], None, None, []

    def report(self) -> GraphReport:
        """What has become of the calls."""
        held = sum(each.bytes for each in self._captures)
        captures = tuple(each.words for each in self._captures)
        return GraphReport(captures, self._replayed, dict(self._without), self._reason, held)

    def note(self, reason: str) -> None:
        """Count a call that runs without a graph."""
        self._reason = reason
        if reason in self._without or len(self._without) < MOST_REASONS:
            self._without[reason] += 1

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns, by a replay where that is possible."""
        if self.resting:
            return self.plain(*args, **kwargs)
        reason = watched()
        if not reason:
            if not self._lock.acquire(blocking=False):
                reason = ELSEWHERE
            else:
                try:
                    inputs = Inputs.of(args, kwargs)
                    found = self._fitting(inputs)
                    if isinstance(found, Capture):
                        result = found(inputs.tensors)
                        self._replayed += 1
                        self._reason = ""
                        return result
                    reason = found
                finally:
                    self._lock.release()
        self.note(reason)
        return self.plain(*args, **kwargs)

    def _fitting(self, inputs: Inputs) -> Capture | str:
        """The capture that a call may replay, or why there is none."""
        if self._recorder.recording():
            return RECORDING
        state = modes(self._recorder.device.type)
        last = self._last
        if (
            last is None
            or last.shape != inputs.shape
            or last.needs != inputs.needs
            or last.state != state
            or not last.standing.holds()
        ):
            found = self._found(inputs, state)
            if isinstance(found, str):
                return found
            last = self._last = found
        return PENDING if last.pending() else last

    def _found(self, inputs: Inputs, state: tuple[object, ...]) -> Capture | str:
        """The capture for a call unlike the last, made where there is none; or why there is none."""
        changed = ""
        for each in self._captures:
            if each.shape == inputs.shape and each.needs == inputs.needs and each.state == state:
                changed = each.standing.difference()
                if not changed:
                    return each
        reason = self._unexpected(inputs)
        if reason:
            return reason
        if any(each.pending() for each in self._captures):
            return f"{changed or 'called in another mode'} while the backward of an earlier call may still come"
        key = inputs.shape, inputs.needs, state
        refused = self._refused
        if refused is not None and refused.key == key and refused.stands:
            return refused.reason
        if self._made >= MOST_CAPTURES:
            return f"{changed or self._mode_in_words(state)}, and the model has been captured {self._made} times"
        try:
            return self._capture(inputs, state)
        except CannotCapture as error:
            reason = f"{changed}; not captured again: {error}" if changed else str(error)
            self._refused = _Refused(key, Standing(self.model), reason)
            return reason

    def _unexpected(self, inputs: Inputs) -> str:
        """Why no capture is to be made for such arguments; empty where one is."""
        if inputs.obstacle:
            return inputs.obstacle
        alike = [each for each in self._expected if each.shape == inputs.shape]
        if not alike:
            return f"called with {inputs.in_words()}, unlike any example that was captured"
        if torch.is_grad_enabled() and all(each.needs != inputs.needs for each in alike):
            return "called with arguments of which others need a gradient than in the example"
        return ""

    def _mode_in_words(self, state: tuple[object, ...]) -> str:
        """How the flags differ from those of the last capture."""
        last = self._captures[-1:] or []
        return f"called with other flags: {in_words(last[0].state, state)}" if last else "called in another mode"

    def _capture(self, inputs: Inputs, state: tuple[object, ...]) -> Capture:
        """Capture the model as it is, in place of captures of what it will hardly be again."""
        self._captures = [each for each in self._captures if not each.standing.gone(self.model)][1 - MOST_ALIVE :]
        self._last = None
        self._made += 1
        made = capture(self.model, self.plain, self._new_recorder(), inputs)
        self._captures.append(made)
        return made


def _forward_of(graphs: ModelGraphs, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` that is set on the model.

    ``torch.compile`` traces the model's own. (``note_compiled`` runs once for each trace, as it takes no part in it.)
    """

    def note_compiled() -> bool:
        graphs.note(COMPILED)
        return True

    note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_compiled()
            return plain(*args, **kwargs)
        return graphs(args, kwargs)

    return forward
