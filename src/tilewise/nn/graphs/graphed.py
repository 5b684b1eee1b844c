"""``tilewise.graphed``: capturing a model, telling what became of it, and undoing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tilewise.nn.arguments import check_model, examples_of, unwrapped
from tilewise.nn.example_errors import with_tensors
from tilewise.nn.graphs.model import GraphReport, ModelGraphs
from tilewise.nn.graphs.obstacles import region_in
from tilewise.nn.graphs.recorder import CannotCapture, Recorder, recorder_of
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.record import arguments_of

__all__ = ["CannotCapture", "GraphReport", "captured", "device_of", "graph_report", "graphed", "graphs_of", "ungraphed"]

Model = TypeVar("Model", bound=nn.Module)

_graphs: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModelGraphs]] = weakref.WeakKeyDictionary()
"""The captures of each model. They are held by the ``forward`` of the model, and refer to it."""


def graphs_of(model: nn.Module) -> ModelGraphs | None:
    """The captures of ``model``, or of the model inside it; ``None`` where there are none."""
    reference = _graphs.get(unwrapped(model))
    return None if reference is None else reference()


def graphed(model: Model, example_inputs: object) -> Model:
    """Replay ``model`` from CUDA graphs, forward and backward, for arguments like those of ``example_inputs``.

    The model is captured in the mode it is in, with gradients where autograd is on, and under the autocast of the
    call. It is returned, changed in place. A call with arguments of the same shapes, strides, dtypes and devices is
    then one replay, and its backward another. In another mode (``train()``, ``eval()``, ``torch.no_grad()``, autocast)
    the model is captured once more when it is first called so, and also after what a capture depends on has changed.
    Every other call runs the model's own forward, by plan after :func:`optimize`; :func:`tilewise.nn.graph_report`
    says why. Capturing changes no parameter, buffer, gradient or random state. :func:`tilewise.nn.ungraphed` and
    :func:`restore` undo it.

    - ``example_inputs``: what ``model`` is called with: a tuple of positional arguments, a mapping of named ones, a
      single value, or a list of such examples. Whether a tensor requires a gradient must be as in training.

    Raises ``ValueError`` for anything but a module, and where the example is not on a CUDA device. Raises
    :class:`tilewise.nn.CannotCapture`, a ``RuntimeError``, with the reason where the model cannot be captured, such as
    hooks on its parts, a random number drawn on the host, or a result that waits for the GPU. The model then runs
    without graphs.

    On a GPU:

    >>> model = tilewise.graphed(tilewise.optimize(model, images, cuda_graphs=True), images)  # doctest: +SKIP
    >>> for images, labels in batches:  # doctest: +SKIP
    ...     loss(model(images), labels).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> print(tilewise.nn.graph_report(model))  # doctest: +SKIP
    """
    check_model(model)
    examples = with_tensors(examples_of(example_inputs))
    device = device_of(examples)
    captured(unwrapped(model), examples, lambda: recorder_of(device))
    return model


def captured(model: nn.Module, examples: Sequence[Any], recorder: Callable[[], Recorder]) -> ModelGraphs:
    """Capture ``model`` for each example, in place of earlier captures. Raises what :func:`graphed` raises."""
    recorder()  # raises where there is none for the device, before earlier captures are given up
    ungraphed(model)
    region = region_in(model)
    if region:
        raise CannotCapture(region)
    graphs = ModelGraphs(model, recorder)
    try:
        for example in examples:
            graphs.expect(*arguments_of(example))
    except BaseException:
        graphs.release()
        raise
    _graphs[model] = weakref.ref(graphs)
    return graphs


def ungraphed(model: Model) -> Model:
    """Give a captured model its own forward back, let go of its captures, and return it. Plans stay.

    Nothing happens to a model that is not captured. Raises ``ValueError`` for anything but a module.

    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> tilewise.nn.ungraphed(model) is model
    True
    """
    check_model(model)
    graphs = graphs_of(model)
    if graphs is not None:
        graphs.release()
    _graphs.pop(unwrapped(model), None)
    return model


def graph_report(model: nn.Module) -> GraphReport:
    """What has become of the calls of a model since it was captured: how many were replayed, and why others were not.

    Raises ``ValueError`` for a model that is not captured, or is a copy of one that is.

    On a GPU:

    >>> model = tilewise.graphed(model, images)  # doctest: +SKIP
    >>> tilewise.nn.graph_report(model).replayed  # doctest: +SKIP
    """
    check_model(model)
    graphs = graphs_of(model)
    if graphs is None:
        raise ValueError(f"model={type(model).__name__}: tilewise.graphed has not been called on it, or was undone")
    return graphs.report()


def device_of(examples: Sequence[Any]) -> torch.device:
    """The device of the examples' tensors. Raises ``ValueError`` where there is no tensor or no single device."""
    devices = {t.device for t in tensors_in(examples)}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"example_inputs: tensors on one CUDA device would do; those given are on: {names}")
    return devices.pop()
