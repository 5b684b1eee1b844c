"""One run of a model that records how its modules are called and restores the model's state afterwards."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from tilewise.machine import random_states
from tilewise.nn.kept_values import buffers_kept, examples_kept, gradients_kept, in_inference_mode, modes_kept
from tilewise.nn.layers.kinds import Call, Layer, Layers, kind_of
from tilewise.problems.base import Problem

__all__ = ["Recorded", "arguments_of", "record", "state_kept", "with_gradients", "without_gradients"]


@dataclass(frozen=True)
class Recorded:
    """A module named ``name`` made the call ``call`` of ``layer``, ``times`` times in one run."""

    name: str
    layer: Layer
    call: Call
    times: int = field(default=1, compare=False)

    def problems(self, training: bool) -> Mapping[str, Problem]:
        """The problem of each pass: the forward's and, with ``training``, those of the gradients that are needed."""
        try:
            return self.layer.problems(self.call if training else without_gradients_of(self.call))
        except ValueError:  # torch computed it, so it is an empty result or the like: nothing to plan
            return {}

    def kinds(self, training: bool) -> list[Call]:
        """The calls that a model makes with it: with the gradients needed in training, and without gradients."""
        without = without_gradients_of(self.call)
        return list(dict.fromkeys([self.call, without] if training else [without]))


def without_gradients_of(call: Any) -> Any:
    """The same call where no tensor needs a gradient."""
    return replace(call, needs=(False,) * len(call.needs))


class _Differentiates(Exception):
    """The model computes gradients inside its own forward, which needs the saved tensors back."""


def arguments_of(example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments that an example stands for.

    A tuple holds positional arguments, a mapping named ones, and anything else is the only argument. Lists and
    dictionaries are copied for every call, since a forward may remove items from them; their tensors are the same.
    """
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = (example,), {}
    if isinstance(example, tuple):
        arguments = example, {}
    elif isinstance(example, Mapping):
        arguments = (), dict(example)
    copies: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(lambda leaf: leaf, arguments)
    return copies


def record(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    example: object,
    layers: Mapping[str, Layers],
    *,
    training: bool,
    left: dict[str, str] | None = None,
) -> list[Recorded]:
    """Run ``model`` once on ``example`` and record the different calls of ``modules``.

    ``layers`` has each module's layers. With ``training`` autograd is on, so that calls show which
    gradients they will need, but no activations are kept. The state that :func:`state_kept` names is restored. ``left``
    receives, by name of module, why a call is left to torch where the reason lies in its tensors or in the moment.
    """
    recorded: dict[tuple[str, int, Call], Recorded] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record one call of a module."""
        kind = kind_of(module)
        assert kind is not None
        later = training and not torch.is_grad_enabled()  # a reentrant checkpoint: gradients come when it runs again
        calls, reason = kind.calls(module, layers[name], args, kwargs, gradients_later=later)
        if reason and left is not None:
            left[name] = reason
        for layer, call in calls:
            key = name, id(layer), call
            times = recorded[key].times + 1 if key in recorded else 1
            recorded[key] = Recorded(name, layer, call, times)

    with ExitStack() as stack:
        stack.enter_context(state_kept(model, example))
        stack.enter_context(_watched(modules, note))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _run(model, example, training, recorded.clear)
    return list(recorded.values())


def _run(model: nn.Module, example: object, training: bool, again: Callable[[], object]) -> None:
    """Run one forward. ``again`` is called before it is repeated, where the first attempt could not be finished."""

    def forward() -> None:
        """Call the model on the example."""
        args, kwargs = arguments_of(example)
        if training:
            args, kwargs = tree_map_only(torch.Tensor, _normal, (args, kwargs))
        model(*args, **kwargs)

    def lean() -> None:
        """Call it without keeping activations, or with them where its own forward needs them."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(_let_go, _ask_back):
                forward()
        except _Differentiates:
            again()
            forward()

    def plain() -> None:
        """Begin anew and call it without autograd."""
        again()
        forward()

    if training:
        with_gradients(model, lean, plain)
    else:
        without_gradients(model, plain)


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one made under ``torch.inference_mode``, which torch refuses to save for backward."""
    with torch._C.DisableTorchFunctionSubclass():
        usual = not tensor.is_inference() or torch.is_inference_mode_enabled()
    return tensor if usual else tensor.clone()


def without_gradients(model: nn.Module, run: Callable[[], object]) -> None:
    """Call ``run()`` without autograd.

    A model made under ``torch.inference_mode`` is run in that mode, which it may need to write its buffers.
    """
    with torch.inference_mode() if in_inference_mode(model) else torch.no_grad():
        run()


def with_gradients(model: nn.Module, run: Callable[[], object], otherwise: Callable[[], object]) -> None:
    """Call ``run()`` with autograd; where torch has no gradients for the model, call ``otherwise()`` without.

    Torch has none where a tensor made under ``torch.inference_mode`` would have to be saved for backward, or written.
    Raises what either function raises.
    """
    try:
        with torch.enable_grad():
            run()
    except RuntimeError:
        if not in_inference_mode(model):
            raise
        without_gradients(model, otherwise)


def _let_go(_: torch.Tensor) -> None:
    # Nothing is saved for backward.
    return None


def _ask_back(_: None) -> torch.Tensor:
    """Raise :class:`_Differentiates`, since nothing was saved."""
    raise _Differentiates


@contextmanager
def _watched(
    modules: Mapping[str, nn.Module], note: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Meanwhile have each module's ``forward`` call ``note`` after it has computed as its class does."""
    saved = {name: module.__dict__.get("forward") for name, module in modules.items()}

    def watching(name: str) -> Callable[..., Any]:
        """The ``forward`` of the module called ``name``."""

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
def state_kept(
    model: nn.Module, examples: object, copied: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> Iterator[None]:
    """Restore buffers, gradients, modes, random states and the examples at the end; lazy modules stay initialised.

    Everything else that a forward writes (parameters and attributes) stays: a model may remember in an attribute that
    it was run, or that something it registered exists. ``copied`` makes the copies, on a device of its choice.
    """
    with (
        buffers_kept(model, copied),
        examples_kept(examples, copied),
        gradients_kept(model.parameters(), copied),
        modes_kept(model),
        random_states.kept(model.modules(), examples),
    ):
        yield
