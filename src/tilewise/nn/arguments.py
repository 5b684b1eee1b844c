"""Checks of the arguments that users give, and the merging of single options into one ``Settings``."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

import torch
from torch import nn

from tilewise.nn.notices.channel import warn
from tilewise.plan import UNIT_FORGOTTEN
from tilewise.settings import OPTIONS, Settings, described, listed

__all__ = ["check_function", "check_model", "examples_of", "in_line", "settings_of", "takes", "unwrapped"]

Function = TypeVar("Function", bound=Callable[..., Any])
ARGUMENTS = {
    "settings": "options as one value, :class:`tilewise.Settings`; options given besides replace its own.",
    "filter_fn": "``filter_fn(name, module)`` says which modules may be swapped; all by default.",
    "progress": "``progress(done, total, text)`` is called as problems are planned; by default a bar on stderr where "
    "that takes more than two seconds.",
    "planner": "the planner, with its wisdom and its own progress; a new one by default.",
    "schedule": "a :class:`Schedule`, or a file that holds one, to run by under its own options. Its plans are "
    "checked, not timed. What it does not have, or what was planned for another device, other versions or turns out "
    "wrong or too large here, is planned anew; one warning tells how many and why, the report which. With several "
    "ranks rank 0 reads it.",
    "step": "``step(model)`` runs one step as the program does it, with its own loss and optimizer, gradient "
    "accumulation and checkpoints. It is what is timed, and what ``memory_limit`` is of. What it does to parameters, "
    "buffers, gradients and random states is undone; other objects' state, an optimizer's say, is its own. By default: "
    "forward, the mean square of the outputs, and backward, for each example in turn. ``memory_step`` is its older "
    "name.",
}
"""What arguments are that several functions take and that are no options, by name."""

OF_THE_MODEL = {
    "device": "plans are made for the device of model and inputs; model.to(device) before would do",
    "dtype": "plans are made for the dtype of model and inputs; model.to(dtype) before would do, or autocast in step=",
    "batch_size": "plans are made for the batch of the inputs; inputs of that batch would do",
}
"""What people give as options, and where it comes from instead."""


def in_line(value: object) -> str:
    """A value in one line of at most 80 characters, for messages: of tensors what they are, and not their numbers."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping) and value and all(isinstance(each, torch.Tensor) for each in value.values()):
        return f"{type(value).__name__} of {len(value)} tensors"
    return " ".join(f"{value!r:.160}".split())[:80]


def check_model(model: object) -> None:
    """Raise ``ValueError`` where ``model`` is not a ``torch.nn.Module``."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(f"model={model.__name__}: a class; a torch.nn.Module would do, such as {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        would_do = "the torch.nn.Module that loads them" if isinstance(model, Mapping) else "a torch.nn.Module"
        raise ValueError(f"model={in_line(model)}: {would_do} would do")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or ``torch.compile``; any other model as it is."""
    unwrapped_model = getattr(model, "_orig_mod", model)
    if isinstance(unwrapped_model, nn.parallel.DistributedDataParallel):
        unwrapped_model = unwrapped_model.module
    assert isinstance(unwrapped_model, nn.Module)
    return unwrapped_model


def check_function(argument: str, given: object, takes: str) -> None:
    """Raise ``ValueError`` naming ``argument`` where ``given`` is neither ``None`` nor can be called as it will be.

    ``takes`` are the parameters that it is called with, and are said in the message.
    """
    if given is None:
        return
    if not callable(given):
        raise ValueError(f"{argument}={in_line(given)}: a function of ({takes}), or None, would do")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        signature.bind(*takes.split(", "))
    except TypeError as error:
        shown = f"{getattr(given, '__name__', type(given).__name__)}{signature}"
        raise ValueError(f"{argument}={shown:.80}: a function of ({takes}) would do") from error


def examples_of(example_inputs: object) -> list[Any]:
    """The examples as a list. A list holds several examples; anything else is one.

    Raises ``ValueError`` for an empty list.
    """
    examples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not examples:
        raise ValueError("example_inputs=[]: at least one example would do, such as [images]")
    return examples


def takes(taken: type, example: str = "") -> Callable[[Function], Function]:
    """Show each option of the ``TypedDict`` ``taken`` in the signature and the docstring of a function.

    The function takes them as ``**options``. In the docstring they replace the line ``{options}``, and those of its own
    arguments that are in ``ARGUMENTS`` replace ``{arguments}``. An ``example``, lines for doctest, goes to its end. The
    function itself stays as it is.
    """
    types = get_type_hints(taken)
    names = [name for name in OPTIONS if name in types]

    def shown(function: Function) -> Function:
        """Set the signature and the docstring of ``function``, and return it."""
        signature = inspect.signature(function)
        parameters = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default, annotation=types[name]
            )
            for name in names
        ]
        function.__signature__ = signature.replace(parameters=[*parameters.values(), *added])  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # python -OO has none
            arguments = {name: text for name, text in ARGUMENTS.items() if name in parameters}
            text = function.__doc__.replace("{options}", described(names))
            text = text.replace("{arguments}", listed(arguments))
            function.__doc__ = f"{text}\n{textwrap.indent(example, ' ' * 4)}" if example else text
        return function

    return shown


def settings_of(function: str, taken: type, settings: Settings | None, options: Mapping[str, Any]) -> Settings:
    """The options that ``function`` was given by keyword, merged into ``settings``, which they override.

    ``taken`` is the ``TypedDict`` of the options that the function takes. Raises ``TypeError`` for another keyword, and
    ``ValueError`` for an option of ``settings`` that the function does not take or a value that is not allowed.
    """
    allowed = taken.__annotations__
    for name in options:
        if name not in allowed:
            close = [] if name in OPTIONS else difflib.get_close_matches(name, allowed, n=1, cutoff=0.75)
            would_do = f"{close[0]} would do" if close else f"its options are {', '.join(allowed)}"
            would_do = OF_THE_MODEL.get(name, would_do)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {would_do}")
    if settings is not None and not isinstance(settings, Settings):
        raise ValueError(f"settings={in_line(settings)}: a tilewise.Settings, or None, would do")
    base = Settings() if settings is None else settings
    for name in base.others_than(allowed):
        raise ValueError(
            f"settings: {function} does not take {name}={getattr(base, name)!r}; settings without it would do"
        )
    merged = replace(base, **options)
    _warn_of_few_bytes(merged)
    return merged


def _warn_of_few_bytes(settings: Settings) -> None:
    """Warn where a limit of memory is a number that was surely meant as MiB: ``workspace=64``.

    It is no error, as whole numbers are bytes and programs compute them. Text such as ``"64B"`` says so itself.
    """
    for name in ("workspace", "total_workspace", "memory_limit"):
        size = getattr(settings, name)
        if isinstance(size, int) and 0 < size < UNIT_FORGOTTEN:
            warn(f"{name}={size} is {size} bytes; {name}='{size}MiB' would do for 2^20 of them", UserWarning)
