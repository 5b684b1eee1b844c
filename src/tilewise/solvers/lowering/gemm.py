"""Convolutions that are matrix products: pointwise kernels, and windows that do not overlap."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.lowering._gather import Order
from tilewise.solvers.lowering._lowering import Lowering, Product
from tilewise.solvers.lowering._patches import PatchGradient


class Gemm(Lowering):
    """One matrix product where windows do not overlap, so that lowering only permutes the image.

    Without a copy for pointwise kernels of stride 1 and for kernels as large as the image, in either layout. With one
    copy otherwise (patch embeddings, strided pointwise kernels). Its data gradient writes each input once. A kernel as
    large as the image has one window, whatever the stride: a fully connected layer.
    """

    name, version = "gemm", 1

    def lowered(self, p: ConvProblem) -> tuple[bool, ...]:
        """Which axes are lowered: all of them."""
        return (True,) * p.dims

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: windows that overlap, or that reach over the edge."""
        reasons = super().unsupported(p)
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.kernel > 1 and not axis.side_by_side:
                reasons.append(
                    f"along {name} needs one tap, or a stride equal to the kernel or one output, without dilation; "
                    f"this is kernel {axis.kernel}, stride {axis.stride}, dilation {axis.dilation}, {axis.out} outputs"
                )
            if axis.before > 0 or axis.after > 0:
                reasons.append(f"along {name} takes no padding, not ({axis.before}, {axis.after})")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The whole batch where no copy is made, as blocks would gain nothing; else blocks too."""
        for order in self.orders(p):
            whole = Config(order=order.value)
            if not order.merges and self.workspace(p, whole) == 0:
                yield whole
            else:
                yield from self.blocks(p, order)

    def orders(self, p: ConvProblem) -> list[Order]:
        """Orders of the matrix worth trying; windows keep the order that they have in the image's memory."""
        image = "x" if p.pass_ is Pass.DGRAD else p.operands[0]
        if p.layout(image) == "channels_last":
            return [Order.PIXELS]
        pointwise = all(axis.kernel == 1 for axis in p.axes)
        single = all(axis.out == 1 for axis in p.axes)
        if not pointwise or single:
            return [Order.PATCHES] if single or p.batch == 1 else [Order.PATCHES, Order.TOKENS]
        if p.pass_ is Pass.DGRAD:
            return [Order.IMAGES]
        return super().orders(p)

    def plan(self, p: ConvProblem, order: Order, images: int, rows: int) -> Product:
        """As in :class:`Lowering`, but DGRAD writes the windows of its product with at most one copy."""
        if p.pass_ is Pass.DGRAD:
            return _planned(p, order, images, rows)
        return super().plan(p, order, images, rows)


@functools.lru_cache(maxsize=256)
def _planned(p: ConvProblem, order: Order, images: int, rows: int) -> Product:
    """The products of a data gradient, kept for further calls."""
    return PatchGradient(p, order, images, rows)
