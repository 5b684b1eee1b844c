"""Whether a model is still what its replicas are copies of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewise.nn.graphs.standing import Contents, Standing

__all__ = ["Watch"]


class Watch:
    """The parts, attributes and hooks of ``model`` and where its tensors lie, as they are now.

    Modes (``train()`` and ``eval()``) and which parameters need a gradient may change: replicas follow them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._standing = Standing(model)
        self._tables = [(what, table, _kept(table)) for what, table in Contents(model).tables]
        self._places = [_place(t) for t in self._standing.tensors]

    def look(self) -> tuple[bool, str]:
        """Whether anything may have changed, and what has that replicas cannot follow, as text; empty for nothing."""
        if self._standing.holds():
            return False, ""
        reason = self._difference()
        if not reason:
            self._standing = Standing(self._model)
        return True, reason

    def _difference(self) -> str:
        for what, table, before in self._tables:
            now = _kept(table)
            if len(now) != len(before) or any(before.get(key, self) is not value for key, value in now.items()):
                changed = [key for key in {**before, **now} if before.get(key, self) is not now.get(key, self)]
                return f"{what.format(changed[0])} has changed" if changed else f"{what} have changed"
        for tensor, place in zip(self._standing.tensors, self._places, strict=True):
            if _place(tensor) != place:
                return f"a tensor of shape {tuple(tensor.shape)} lies elsewhere, or has another shape or dtype"
        return ""


def _kept(table: dict[str, Any]) -> dict[str, Any]:
    """What replicas have of their own."""
    return {key: value for key, value in table.items() if key != "training"}


def _place(t: torch.Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device
