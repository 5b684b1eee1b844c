"""The passes of a convolution with signed padding that may differ by side, by torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from tilewise.axis import Axis
from tilewise.distributed.share import Share
from tilewise.distributed.terms import LoopedTerms, Terms
from tilewise.problem import dense_strides, layout_of

__all__ = ["Passes", "Settled", "TorchPasses", "settle"]

Axes = tuple[Axis, ...]


class Passes(Protocol):
    """What computes one rank's convolutions. Axes are exact: they give the result's sizes."""

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``y``, with a bias of its channels where one is given."""
        ...

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``x``, of the axes' sizes."""
        ...

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``w``."""
        ...

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """What computes the terms of the boxes of ``share``, for a layer whose input here is ``x``."""
        ...


@dataclass(frozen=True, slots=True)
class Settled:
    """How torch is to compute axes: ``pads`` for :func:`torch.nn.functional.pad` first, then ``native`` ones.

    ``even`` are the axes of what is then convolved: of the padded sizes, and padded by as much on both sides.
    """

    pads: tuple[int, ...] | None
    native: tuple[int, ...]
    even: Axes
    padded: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    zeros: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def settle(axes: Axes) -> Settled:
    """Pad natively where the same padding on both sides gives the same outputs."""
    explicit: list[tuple[int, int]] = []
    native: list[int] = []
    for a in axes:
        if a.before >= 0 and (a.size + 2 * a.before - a.reach) // a.stride + 1 == a.out:
            explicit.append((0, 0))
            native.append(a.before)
            continue
        both = max(min(a.before, a.after), 0)
        explicit.append((a.before - both, a.after - both))
        native.append(both)
    pads = tuple(side for pair in reversed(explicit) for side in pair)
    padded = tuple(a.size + before + after for a, (before, after) in zip(axes, explicit, strict=True))
    return Settled(
        pads if any(pads) else None,
        tuple(native),
        tuple(replace(a, size=n, before=p, after=p) for a, n, p in zip(axes, padded, native, strict=True)),
        padded,
        tuple(a.stride for a in axes),
        tuple(a.dilation for a in axes),
        (0,) * len(axes),
    )


class TorchPasses:
    """Passes by torch's own convolutions."""

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``y`` of ``x`` and ``w``, and ``b`` of the channels."""
        s = settle(axes)
        if s.pads is not None:
            x = F.pad(x, s.pads)
        return torch.convolution(x, w, b, s.stride, s.native, s.dilation, False, s.zeros, groups)

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``x`` of ``y`` and ``w``."""
        s = settle(axes)
        x = _stand_in(y, (y.shape[0], w.shape[1] * groups, *s.padded))
        dx, _, _ = self._backward(y, x, w, s, groups, (True, False, False))
        assert dx is not None
        return dx if s.pads is None else F.pad(dx, [-n for n in s.pads])

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """``w`` of ``x`` and ``y``."""
        s = settle(axes)
        if s.pads is not None:
            x = F.pad(x, s.pads)
        shape = (y.shape[1], x.shape[1] // groups, *(a.kernel for a in axes))
        _, dw, _ = self._backward(y, x, _stand_in(x, shape), s, groups, (False, True, False))
        assert dw is not None
        return dw

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """Each by these passes."""
        return LoopedTerms(self, share, groups)

    @staticmethod
    def _backward(
        y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, s: Settled, groups: int, mask: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        found: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
        found = torch.ops.aten.convolution_backward.default(
            y, x, w, None, s.stride, s.native, s.dilation, False, s.zeros, groups, mask
        )
        return found


def _stand_in(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An operand of ``shape`` of which torch reads no more than that.

    On a CPU it copies one that is not dense, or in another order than the other operand. One that is dense takes no
    memory there: nobody touches its pages.
    """
    if like.device.type != "cpu":
        return like.new_empty(1).expand(shape)
    last = like.dim() > 2 and layout_of(like.shape, like.stride()) == "channels_last"
    return like.new_empty_strided(shape, dense_strides(shape, "channels_last" if last else "contiguous"))
