"""``graphs="auto"``: a model is captured where it can be, and stays so where replays are surely faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.graphed import captured, device_of, ungraphed
from tilewise.nn.graphs.model import ModelGraphs
from tilewise.nn.graphs.recorder import CannotCapture, Recorder, recorder_of
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.record import arguments_of, state_kept
from tilewise.nn.step.pairs import Pairs, Side, time_pairs
from tilewise.nn.step.step import loss_of

__all__ = ["choose_graphs"]


def choose_graphs(
    model: nn.Module,
    examples: Sequence[Any],
    *,
    training: bool,
    recorder: Callable[[torch.device], Recorder] = recorder_of,
) -> dict[str, Any]:
    """Capture ``model`` for the examples, measure a step both ways, and keep the captures if they are faster.

    Returns what was found, as plain JSON values: whether the captures are ``kept``, the ``reason`` where they are not,
    and, where both ways were measured: the median milliseconds of a step on the first example (``graph_ms``,
    ``plain_ms``), the median ``speedup`` of the ``pairs`` with its 95 % interval (``least``, ``most``), and the
    ``bytes`` that the captures hold. They are kept where the whole interval lies above 1. A step is a forward and, in
    ``training``, the gradients. The model's state is as before. Nothing is raised for a model that cannot be captured.
    """
    try:
        device = device_of(examples)
        with torch.set_grad_enabled(training):
            graphs = captured(model, examples, lambda: recorder(device))
    except (ValueError, CannotCapture) as error:
        return {"kept": False, "reason": str(error)}
    try:
        pairs = _measured(model, graphs, examples[0], device, training=training)
    except Exception as error:  # the model's own forward ran while it was captured: only a replay can have failed
        ungraphed(model)
        lines = str(error).splitlines() or [""]
        return {"kept": False, "reason": f"a replay failed: {type(error).__name__}: {lines[0]}"}
    plain_ms, graph_ms = pairs.medians
    least, speedup, most = pairs.speedup
    found = {"plain_ms": plain_ms, "graph_ms": graph_ms, "speedup": speedup, "least": least, "most": most}
    found |= {"pairs": len(pairs.first_ms), "bytes": graphs.report().bytes}
    if least <= 1.0:
        ungraphed(model)
        return {"kept": False, "reason": "a step is not surely faster with graphs", **found}
    graphs.begin()
    return {"kept": True, "reason": "", **found}


def _measured(model: nn.Module, graphs: ModelGraphs, example: object, device: torch.device, *, training: bool) -> Pairs:
    """The times of a step without graphs and with them, in turns."""
    args, kwargs = arguments_of(example)
    leaves = [t for t in (*model.parameters(), *tensors_in(example)) if training and t.requires_grad]

    def step(forward: Callable[[], Any]) -> None:
        """Run one step. Gradients are not added to those of the parameters."""
        outputs = forward()
        loss = loss_of(outputs) if leaves else None
        if loss is not None:
            torch.autograd.grad(loss, leaves, allow_unused=True)

    plain, replayed = (
        Side(lambda: None, functools.partial(step, way))
        for way in (lambda: graphs.plain(*args, **kwargs), lambda: graphs(args, kwargs))
    )
    with state_kept(model, example), torch.set_grad_enabled(training):
        return time_pairs(plain, replayed, device)
