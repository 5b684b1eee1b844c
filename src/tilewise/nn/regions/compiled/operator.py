"""A planned region inside ``torch.compile``: one operator, which finds its region by name.

Compiled as torch's operators, a region would lose its plans. So where Dynamo traces a call that has a program, it sees
one operator in place of all of them. When that operator is called first, the program is timed beside what the same
compiler makes of the region, and the faster one runs from then on.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec

__all__ = ["Form", "Known", "Run", "publish", "returned", "returns_of"]

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Computes a region's results from its tensors."""

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("region(Tensor[] tensors, str name) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


@dataclass(frozen=True)
class Form:
    """A tensor without its numbers: what decides whether a program fits, and what its results promise."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: torch.Tensor) -> Form:
        """The form of ``t``."""
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype, t.device)

    def empty(self) -> torch.Tensor:
        """A tensor of this form whose numbers are not set."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Known(NamedTuple):
    """A kind of calls, as tracing recognises it: constants alone, which Dynamo need not guard.

    ``tensors`` are the arguments, each by shape, strides, dtype and device, ``name`` is the operator's, and ``returns``
    says how results are returned, as :func:`returns_of` has it.
    """

    name: str
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]
    returns: tuple[Any, ...]


def returns_of(structure: TreeSpec, leaves: Iterator[tuple[bool, Any]]) -> tuple[Any, ...] | None:
    """A structure of results as nested tuples, for :func:`returned`; ``None`` where a part of it is of another type.

    >>> from torch.utils._pytree import tree_structure
    >>> returns_of(tree_structure((0, {"mask": 0})), iter([(True, 0), (False, "none")]))
    ('tuple', (('tensor', 0), ('dict', ('mask',), (('constant', 'none'),))))
    """
    if structure.is_leaf():
        is_tensor, leaf = next(leaves)
        return ("tensor" if is_tensor else "constant", leaf)
    parts = tuple(returns_of(child, leaves) for child in structure.children())
    if None in parts or structure.type not in (tuple, list, dict):
        return None
    if structure.type is dict:
        return ("dict", tuple(structure.context), parts)
    return (structure.type.__name__, parts)


def returned(returns: tuple[Any, ...], results: Sequence[torch.Tensor]) -> Any:
    """The results in the structure that ``returns`` describes. Dynamo traces this."""
    kind = returns[0]
    if kind == "tensor":
        return results[returns[1]]
    if kind == "constant":
        return returns[1]
    if kind == "dict":
        return {key: returned(part, results) for key, part in zip(returns[1], returns[2], strict=True)}
    parts = [returned(part, results) for part in returns[1]]
    return parts if kind == "list" else tuple(parts)


@dataclass(frozen=True)
class _Published:
    """What a name stands for. ``run`` gives ``None`` once the module is gone."""

    run: weakref.ref[Run]
    tensors: tuple[Form, ...]
    results: tuple[Form, ...]


_published: dict[str, _Published] = {}


def publish(run: Run, tensors: tuple[Form, ...], results: tuple[Form, ...]) -> str:
    """A name by which the operator finds ``run``, for as long as somebody else holds it.

    No other process can have the same name: a compiled graph that is kept on disk names a region of one process.
    """
    name = uuid.uuid4().hex
    _published[name] = _Published(weakref.ref(run), tensors, results)
    weakref.finalize(run, _published.pop, name, None)
    return name


def _find(name: str, tensors: Sequence[torch.Tensor]) -> _Published:
    """What is published as ``name``.

    Raises ``RuntimeError`` where that is nothing, or where tensors have other shapes than those it was traced with.
    """
    found = _published.get(name)
    if found is None:
        raise RuntimeError(
            f"name={name!r} is no region of this process: the model is gone or was compiled elsewhere; compile it here"
        )
    given, wanted = [tuple(t.shape) for t in tensors], [form.shape for form in found.tensors]
    if given != wanted:
        raise RuntimeError(f"name={name!r} is a region for tensors of {wanted}, not of {given}")
    return found


def _region(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The operator: the region's results, in the forms that were promised."""
    found = _find(name, tensors)
    run = found.run()
    if run is None:
        raise RuntimeError(f"name={name!r}: the model of this region is gone; keep it while its compiled form is used")
    results = run(tensors)
    return [_in_form(t, form) for t, form in zip(results, found.results, strict=True)]


def _in_form(t: torch.Tensor, form: Form) -> torch.Tensor:
    """``t`` as it was promised: a result of torch's own, as after a change of the model, may lie otherwise."""
    return t if t.stride() == form.stride else form.empty().copy_(t)


def _region_fake(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Results without numbers, for tracing."""
    return [form.empty() for form in _find(name, tensors).results]


_library.impl("region", _region, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::region", _region_fake, lib=_library)
