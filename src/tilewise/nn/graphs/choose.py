"""``graphs="auto"``: a model is captured where it can be, and stays so where replays are measured to be faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.graphed import captured, device_of, ungraphed
from tilewise.nn.graphs.model import ModelGraphs
from tilewise.nn.graphs.recorder import CannotCapture, Recorder, recorder_of
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.record import arguments_of, state_kept
from tilewise.nn.step.step import loss_of

__all__ = ["choose_graphs"]

ROUNDS = 7
"""Rounds of timing. In each the model runs with and without graphs, in turns that change their order."""
STEPS = 3
"""Steps in one turn, at the end of which the device is waited for: within it the host may run ahead."""


def choose_graphs(
    model: nn.Module,
    examples: Sequence[Any],
    *,
    training: bool,
    recorder: Callable[[torch.device], Recorder] = recorder_of,
) -> dict[str, Any]:
    """Capture ``model`` for the examples, measure a step both ways, and keep the captures if they are faster.

    Returns what was found, as plain JSON values: whether the captures are ``kept``, the ``reason`` where they are not,
    and, where both ways were measured, the milliseconds of a step on the first example (``graph_ms``, ``plain_ms``)
    and the ``bytes`` that the captures hold. A step is a forward and, in ``training``, the gradients. The model's
    state is as before. Nothing is raised for a model that cannot be captured.
    """
    try:
        device = device_of(examples)
        with torch.set_grad_enabled(training):
            graphs = captured(model, examples, lambda: recorder(device))
    except (ValueError, CannotCapture) as error:
        return {"kept": False, "reason": str(error)}
    try:
        plain_ms, graph_ms = _measured(model, graphs, examples[0], training=training, recorder=recorder(device))
    except Exception as error:  # the model's own forward ran while it was captured: only a replay can have failed
        ungraphed(model)
        lines = str(error).splitlines() or [""]
        return {"kept": False, "reason": f"a replay failed: {type(error).__name__}: {lines[0]}"}
    found = {"plain_ms": plain_ms, "graph_ms": graph_ms, "bytes": graphs.report().bytes}
    if graph_ms >= plain_ms:
        ungraphed(model)
        return {"kept": False, "reason": "a step is not faster with graphs", **found}
    graphs.begin()
    return {"kept": True, "reason": "", **found}


def _measured(
    model: nn.Module, graphs: ModelGraphs, example: object, *, training: bool, recorder: Recorder
) -> tuple[float, float]:
    """The median milliseconds of a step without and with graphs."""
    args, kwargs = arguments_of(example)
    leaves = [t for t in (*model.parameters(), *tensors_in(example)) if training and t.requires_grad]

    def step(forward: Callable[[], Any]) -> None:
        """Run one step. Gradients are not added to those of the parameters."""
        outputs = forward()
        loss = loss_of(outputs) if leaves else None
        if loss is not None:
            torch.autograd.grad(loss, leaves, allow_unused=True)

    def turn(forward: Callable[[], Any]) -> float:
        """The milliseconds of a step in one turn."""
        recorder.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step(forward)
        recorder.synchronize()
        return (time.perf_counter() - begin) * 1e3 / STEPS

    ways = (lambda: graphs.plain(*args, **kwargs), lambda: graphs(args, kwargs))
    times: tuple[list[float], list[float]] = ([], [])
    with state_kept(model, example), torch.set_grad_enabled(training):
        for way in ways:
            step(way)
        for number in range(ROUNDS):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(turn(ways[which]))
    return statistics.median(times[0]), statistics.median(times[1])
