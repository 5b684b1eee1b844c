"""What a region computes from parameters and buffers alone: folded filters and biases, kept until their sources change.

Every call asks whether a source has changed. With frozen weights that is its version counter, else every source is
compared bit by bit with a copy, so that no change is missed. What has changed is computed anew into the same memory,
whose own version counter tells the plans that keep prepared filters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewise.execute.kept_filter import same_bits
from tilewise.kernels.native.programs import unchanged
from tilewise.nn.layers.weights import Weights

__all__ = ["Constants", "Gathered", "Wanted"]


@dataclass(frozen=True)
class Gathered:
    """Constants one after the other in a vector: nodes whose elements follow each other, and numbers of zeros.

    At least one is a node: zeros lie where that one does.
    """

    pieces: tuple[fx.Node | int, ...]


@dataclass(frozen=True)
class Wanted:
    """A constant as a step takes it: what gives it, its shape, its strides and its dtype."""

    node: fx.Node | Gathered
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Constants:
    """The constants of a rewritten graph, computed from ``sources``, which are tensors by names of attributes.

    ``weights`` says how a change of a source is seen. Raises ``ValueError`` for weights that change.
    """

    def __init__(self, sources: Mapping[str, Tensor], weights: Weights) -> None:
        if weights is Weights.CHANGING:
            raise ValueError("weights=CHANGING: CHECKED or FROZEN would do; training changes weights")
        self._sources = dict(sources)
        self._frozen = weights is Weights.FROZEN
        self._kept: dict[Wanted, Tensor] = {}
        self._lock = threading.Lock()
        self._copies: list[Tensor] = []
        self._planned: dict[fx.Node, Tensor] = {}
        """Values of nodes while a region is planned."""
        self._list = list(self._sources.values())
        self._note()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: constants, and copies of sources where these are compared."""
        return sum(t.numel() * t.element_size() for t in (*self._kept.values(), *self._copies))

    def keep(self, wanted: Wanted) -> Tensor:
        """The tensor of a constant, computed now. It stays the same object, and follows its sources."""
        found = self._kept.get(wanted)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                value = self._value(wanted.node, self._planned)
                found = torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype, device=value.device)
                found.copy_(value.reshape(wanted.shape))
            self._kept[wanted] = found
        return found

    def settle(self) -> None:
        """Let go of what is needed while a region is planned alone."""
        self._planned.clear()

    def renew(self, sources: Mapping[str, Tensor]) -> None:
        """Take other tensors of the same shapes as sources, and compute everything from them."""
        with self._lock:
            self._sources, self._list = dict(sources), list(sources.values())
            self._compute()

    def refresh(self) -> bool:
        """Compute everything anew where a source has changed, and return whether one has."""
        if not self._changed():
            return False
        with self._lock:
            if self._changed():  # not by another thread, meanwhile
                self._compute()
        return True

    def _changed(self) -> bool:
        """Whether a source is not as it was."""
        if self._frozen:
            native = self._native
            return not native.same_versions() if native else [t._version for t in self._list] != self._versions
        return not all(map(same_bits, self._list, self._copies))

    def _note(self) -> None:
        """Take the sources as they are as those that constants were computed from."""
        self._versions = [t._version for t in self._list]
        self._native = unchanged(self._list, ())
        if not self._frozen:
            with torch.inference_mode(False), torch.no_grad():
                self._copies = [t.detach().clone(memory_format=torch.preserve_format) for t in self._list]

    def _compute(self) -> None:
        """Compute all constants from the sources, noted first: a change meanwhile is seen at the next call."""
        self._note()
        with torch.inference_mode(False), torch.no_grad():
            values: dict[fx.Node, Tensor] = {}
            for wanted, tensor in self._kept.items():
                tensor.copy_(self._value(wanted.node, values).reshape(wanted.shape))

    def _value(self, node: fx.Node | Gathered, values: dict[fx.Node, Tensor]) -> Tensor:
        """The value of a constant; ``values`` are those of nodes that are known, to which it is added."""
        if isinstance(node, Gathered):
            values_of = {each: self._value(each, values) for each in node.pieces if isinstance(each, fx.Node)}
            device = next(iter(values_of.values())).device
            # Zeros are in the widest type, so that what is added up in float64 is rounded once.
            return torch.cat(
                [
                    torch.zeros(piece, dtype=torch.float64, device=device)
                    if isinstance(piece, int)
                    else values_of[piece].reshape(-1)
                    for piece in node.pieces
                ]
            )
        if node not in values:
            if node.op == "get_attr":
                values[node] = self._sources[str(node.target)].detach()
            else:
                target = node.target
                assert callable(target)
                args: Any = fx.node.map_arg(node.args, lambda each: self._value(each, values))
                kwargs: Any = fx.node.map_arg(node.kwargs, lambda each: self._value(each, values))
                values[node] = target(*args, **kwargs)
        return values[node]
