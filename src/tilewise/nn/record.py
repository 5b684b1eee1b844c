"""One run of a model that notes how its convolutions are called and leaves no trace in its state."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tilewise import random_states
from tilewise.nn.call import Call, why_torchs
from tilewise.nn.geometry import Geometry
from tilewise.nn.kept_values import buffers_kept, in_inference_mode
from tilewise.nn.layer import Layer
from tilewise.nn.modules import tensors_of

__all__ = ["Recorded", "arguments_of", "record", "state_kept", "with_gradients", "without_gradients"]


@dataclass(frozen=True)
class Recorded:
    """A module was called so that its convolution is ``call`` of ``layer``, and how often in one run."""

    name: str
    layer: Layer
    call: Call
    times: int = field(default=1, compare=False)


class _Differentiates(Exception):
    """The model wants saved tensors back inside its own forward."""


def arguments_of(example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments: a tuple holds the former, a mapping the latter, anything else is the only one."""
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example,), {}


def record(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    example: object,
    layers: Mapping[str, Callable[[Geometry], Layer]],
    *,
    training: bool,
    left: dict[str, str] | None = None,
) -> list[Recorded]:
    """Run ``model`` once on ``example`` and note the calls of ``modules``, each different one once.

    ``layers`` gives each module's layer of a geometry. With ``training`` autograd is on, so that calls show which
    gradients they will need, but keeps no activations. Buffers and random states are put back. ``left`` is told, by
    module, why a call is torch's own affair, where that lies in the tensors or the moment.
    """
    found: dict[tuple[str, int, Call], Recorded] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass' handler has seen the call
            geometry, x, w, b = tensors_of(module, *args, **kwargs)
            if geometry is None:
                return
            calls = list(layers[name](geometry).visit(x, w, b))
        if not calls and left is not None:
            left[name] = why_torchs((x, w, b))
        for layer, call in calls:
            if training and not torch.is_grad_enabled():  # a reentrant checkpoint: gradients come when it runs again
                wants = (True, w.requires_grad, b is not None and b.requires_grad)
                call = replace(call, needs=wants)
            key = name, id(layer), call
            times = found[key].times + 1 if key in found else 1
            found[key] = Recorded(name, layer, call, times)

    args, kwargs = arguments_of(example)
    with ExitStack() as stack:
        stack.enter_context(state_kept(model))
        stack.enter_context(_watched(modules, note))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _run(model, args, kwargs, training, found.clear)
    return list(found.values())


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, again: Callable[[], object]
) -> None:
    """One forward. ``again`` is called where it begins anew, since the first attempt could not be finished."""

    def lean() -> None:
        try:
            with torch.autograd.graph.saved_tensors_hooks(_let_go, _ask_back):
                model(*args, **kwargs)
        except _Differentiates:
            again()
            model(*args, **kwargs)

    def plain() -> None:
        again()
        model(*args, **kwargs)

    if training:
        with_gradients(model, lean, plain)
    else:
        without_gradients(model, plain)


def without_gradients(model: nn.Module, run: Callable[[], object]) -> None:
    """``run()`` without autograd; a model made under ``torch.inference_mode`` may need that mode to write buffers."""
    with torch.inference_mode() if in_inference_mode(model) else torch.no_grad():
        run()


def with_gradients(model: nn.Module, run: Callable[[], object], otherwise: Callable[[], object]) -> None:
    """``run()`` with autograd, or ``otherwise()`` without where torch has no gradients for the model.

    That is where a tensor made under ``torch.inference_mode`` would have to be saved for backward, or written. Raises
    what either raises.
    """
    try:
        with torch.enable_grad():
            run()
    except RuntimeError:
        if not in_inference_mode(model):
            raise
        without_gradients(model, otherwise)


def _let_go(_: torch.Tensor) -> None:
    return None


def _ask_back(_: None) -> torch.Tensor:
    raise _Differentiates


@contextmanager
def _watched(
    modules: Mapping[str, nn.Module], note: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Every module's own ``forward`` calls ``note`` first, then computes as its class does."""
    saved = {name: module.__dict__.get("forward") for name, module in modules.items()}

    def watching(name: str) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = type(self).forward(self, *args, **kwargs)  # first, so that torch refuses what it does not take
            note(name, self, args, kwargs)
            return result

        return forward

    try:
        for name, module in modules.items():
            module.__dict__["forward"] = types.MethodType(watching(name), module)
        yield
    finally:
        for name, module in modules.items():
            if saved[name] is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = saved[name]


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers and random states come back as they were; lazy ones stay initialised."""
    with buffers_kept(model, torch.clone), random_states.kept(model.modules()):
        yield
