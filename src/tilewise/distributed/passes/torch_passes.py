"""The passes of a convolution by torch, with padding that may be negative and may differ between the two sides."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tilewise.distributed.passes.contracts import Axes, Terms
from tilewise.distributed.passes.share import Share
from tilewise.distributed.passes.terms import LoopedTerms
from tilewise.problems.base import dense_strides, layout_of

__all__ = ["PaddingSplit", "TorchPasses", "split_padding"]


@dataclass(frozen=True, slots=True)
class PaddingSplit:
    """The padding of a convolution in two steps, as torch's own convolution pads both sides equally.

    The input is first padded, or cropped, by ``pads``, in the order of :func:`torch.nn.functional.pad`; ``None`` for
    nothing. It then has the sizes ``padded``, and torch's convolution pads it by ``native`` on both sides. ``even`` are
    the axes of that convolution. ``stride``, ``dilation`` and ``zeros`` are further arguments of it, one number for
    each axis.
    """

    pads: tuple[int, ...] | None
    native: tuple[int, ...]
    even: Axes
    padded: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    zeros: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def split_padding(axes: Axes) -> PaddingSplit:
    """Split the padding of ``axes``: torch's convolution does as much as is equal on both sides.

    It also pads natively where equal padding on both sides gives the same outputs as the padding of the axis.
    """
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
    return PaddingSplit(
        pads if any(pads) else None,
        tuple(native),
        tuple(replace(a, size=n, before=p, after=p) for a, n, p in zip(axes, padded, native, strict=True)),
        padded,
        tuple(a.stride for a in axes),
        tuple(a.dilation for a in axes),
        (0,) * len(axes),
    )


class TorchPasses:
    """Computes passes by torch's own convolutions."""

    def fprop(
        self, x: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the convolution of ``x`` and ``w``, with the bias ``b`` where one is given."""
        split = split_padding(axes)
        if split.pads is not None:
            x = F.pad(x, split.pads)
        return torch.convolution(x, w, b, split.stride, split.native, split.dilation, False, split.zeros, groups)

    def dgrad(self, y: torch.Tensor, w: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the input, from that of the result ``y`` and the filter ``w``."""
        split = split_padding(axes)
        x = _stand_in(y, (y.shape[0], w.shape[1] * groups, *split.padded))
        dx, _, _ = self._backward(y, x, w, split, groups, (True, False, False))
        assert dx is not None
        return dx if split.pads is None else F.pad(dx, [-pad for pad in split.pads])

    def wgrad(self, x: torch.Tensor, y: torch.Tensor, axes: Axes, groups: int) -> torch.Tensor:
        """The gradient of the filter, from the input ``x`` and the gradient of the result ``y``."""
        split = split_padding(axes)
        if split.pads is not None:
            x = F.pad(x, split.pads)
        shape = (y.shape[1], x.shape[1] // groups, *(axis.kernel for axis in axes))
        _, dw, _ = self._backward(y, x, _stand_in(x, shape), split, groups, (False, True, False))
        assert dw is not None
        return dw

    def terms(self, share: Share, groups: int, x: torch.Tensor, w: torch.Tensor) -> Terms:
        """Terms that are each computed by these passes."""
        return LoopedTerms(self, share, groups)

    @staticmethod
    def _backward(
        y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, split: PaddingSplit, groups: int, mask: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of input, filter and bias that ``mask`` asks for, from the gradient ``y`` of the result."""
        gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
        gradients = torch.ops.aten.convolution_backward.default(
            y, x, w, None, split.stride, split.native, split.dilation, False, split.zeros, groups, mask
        )
        return gradients


def _stand_in(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without values of which torch's backward reads no more than the shape.

    On a GPU it has one element. On a CPU torch would copy an operand that is not dense, or not in the layout of the
    other operand ``like``. There it is dense, and takes no physical memory, as nothing touches its pages.
    """
    if like.device.type != "cpu":
        return like.new_empty(1).expand(shape)
    last = like.dim() > 2 and layout_of(like.shape, like.stride()) == "channels_last"
    return like.new_empty_strided(shape, dense_strides(shape, "channels_last" if last else "contiguous"))
