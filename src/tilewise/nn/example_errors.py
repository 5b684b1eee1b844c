"""What is said beside the error that a model raises on its example inputs: what it was given, and what would do.

A model's own error comes from deep inside torch and knows nothing of ``example_inputs``. So the error gets a note with
what the model was called with. Where the examples hold no tensor at all, but something that people give in place of
one, such as a shape, that is the error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from tilewise.nn.kept_values import tensors_in

__all__ = ["explained", "with_tensors"]

MOST_SHOWN = 6
"""Tensors of an example that a note describes."""


@contextmanager
def explained(
    model: nn.Module, examples: Sequence[object], number: int, *, argument: str = "example_inputs"
) -> Iterator[None]:
    """Say of an error that ``model`` raises meanwhile what it was called with: example ``number`` of ``examples``.

    The error stays what it is and gets a note. Raises ``ValueError`` in its place where the examples hold no tensor,
    but a shape, a NumPy array, a data loader or text. Both name ``argument``.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        instead = _in_place_of_tensors(examples)
        if instead:
            # What torch says of a number or an array in place of an image helps nobody, and is long.
            raise ValueError(f"{argument}={instead}") from None
        error.add_note(f"{argument}: {_note(model, examples, number)}")
        raise


def with_tensors(examples: list[Any]) -> list[Any]:
    """The examples. Raises ``ValueError`` where they hold no tensor, but what people give in place of one."""
    instead = _in_place_of_tensors(examples)
    if instead:
        raise ValueError(f"example_inputs={instead}")
    return examples


def _in_place_of_tensors(examples: Sequence[object]) -> str:
    """What the examples are in place of tensors, and what would do; empty where they hold a tensor, or unknown things.

    Other things may be what the model takes, so its own error stays.
    """
    if tensors_in(list(examples)):
        return ""
    shown = repr(examples[0] if len(examples) == 1 else list(examples))
    leaves = [
        number for leaf in tree_leaves(list(examples)) for number in (leaf if type(leaf) is torch.Size else [leaf])
    ]
    if len(leaves) > 1 and all(type(leaf) is int and leaf >= 0 for leaf in leaves):  # one number is no shape
        of_shape = f"a tensor of that shape would do, such as torch.randn({', '.join(map(str, leaves))})"
        return f"{shown:.80}: a shape, and no input; {of_shape:.120}"
    for leaf in leaves:
        if leaf is None and len(leaves) == 1:
            return "None: what the model is called with would do, such as torch.randn(1, 3, 224, 224)"
        if isinstance(leaf, np.ndarray):
            return f"(a NumPy array of shape {leaf.shape}): a tensor would do, such as torch.from_numpy(array)"
        if isinstance(leaf, DataLoader | Dataset):
            words = "the images of one batch would do, such as next(iter(loader))[0]"
            return f"{type(leaf).__name__}: what the model is called with, {words}"
        if isinstance(leaf, torch.optim.Optimizer | nn.Module | Generator):
            kind = "a generator" if isinstance(leaf, Generator) else type(leaf).__name__
            return f"{kind}: what the model is called with would do, such as torch.randn(1, 3, 224, 224)"
        if isinstance(leaf, str | bytes):
            return f"{leaf!r:.80}: what the model is called with would do, such as torch.randn(1, 3, 224, 224)"
    return ""


def _note(model: nn.Module, examples: Sequence[object], number: int) -> str:
    """What the model was called with, in a line."""
    example = examples[number]
    given = ", ".join(map(_described, tensors_in(example)[:MOST_SHOWN])) or f"{example!r:.80}"
    parameter = next(model.parameters(), None)
    has = "" if parameter is None else f"; its parameters are {_kind(parameter)}"
    if len(examples) > 1:
        among = f"example {number + 1} of {len(examples)}, "
        would_do = "a list holds several examples; a tuple of all arguments of one call would do"
    else:
        among = ""
        would_do = f"what {type(model).__name__} takes would do" + (", by name" if isinstance(example, Mapping) else "")
    return f"the model raised this on {among}{given}{has}; {would_do}"


def _described(tensor: torch.Tensor) -> str:
    """The shape, dtype and device of a tensor."""
    return f"{tuple(tensor.shape)} {_kind(tensor)}"


def _kind(tensor: torch.Tensor) -> str:
    """The dtype and device of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
