"""Convolution in the frequency domain with torch's transforms: blocks of images, products per frequency, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Prepare, Run
from tilewise.solvers.common.bases import meets, placement, result_placement
from tilewise.solvers.common.buffers import Arena, Slot, Strided, dense
from tilewise.solvers.fourier._library_products import PRODUCTS

__all__ = ["FourierPlan"]

Index = tuple[int, int]
"""First row and number of rows: images of a block, or output channels of the filter."""


class Operand:
    """One operand as (rows, groups, channels, space): blocks of rows are padded to the basis and transformed.

    Rows are images, or for the filter the output channels of all groups.
    """

    def __init__(self, p: ConvProblem, role: str, basis: Sequence[int]) -> None:
        shape = p.shape(role)
        self.role, self.basis = role, tuple(basis)
        self.groups = 1 if role == "w" else p.groups
        self.rows, self.channels = shape[0], shape[1] // self.groups
        self.places = [placement(axis, role) for axis in p.axes]
        self.fills = all(place.step == 1 and place.count == n for place, n in zip(self.places, basis, strict=True))
        """Whether the operand fills the basis, so that there is no padding."""
        self.direct = self.fills and shape[2:] == self.basis and p.dtype == "fp32" and p.layout(role) == "contiguous"
        """Whether it is transformed without a copy."""

    @property
    def planes(self) -> int:
        """Planes of one row."""
        return self.groups * self.channels

    def padded(self, rows: int) -> tuple[int, ...]:
        """Sizes of the padded real planes of ``rows`` rows."""
        return (rows, self.groups, self.channels, *self.basis)

    def source(self, strides: Sequence[int], index: Index) -> tuple[Strided, Strided]:
        """Views of the elements of rows ``index``: in the operand, and in the padded planes."""
        row, channel, *space = strides
        sizes = (index[1], self.groups, self.channels, *(place.count for place in self.places))
        inner = dense(self.padded(index[1]))
        offset = index[0] * row + sum(place.start * s for place, s in zip(self.places, space, strict=True))
        lead = sum(place.lead * s for place, s in zip(self.places, inner[3:], strict=True))
        steps = (place.step * s for place, s in zip(self.places, inner[3:], strict=True))
        source = Strided(sizes, (row, self.channels * channel, channel, *space), offset)
        return source, Strided(sizes, (*inner[:3], *steps), lead)


class FourierPlan:
    """Buffers and steps for one basis, form of the product and block of images.

    Spectra lie frequency first, as (frequency, group, row, channel), so that every frequency is a matrix product
    (Vasilache et al. 2014, Table 1). Depthwise spectra stay as the transform gives them and are multiplied there.
    """

    def __init__(self, p: ConvProblem, basis: tuple[int, ...], product: str, images: int) -> None:
        self.p, self.basis, self.product_name = p, basis, product
        self.half = (*basis[:-1], basis[-1] // 2 + 1)
        self.frequencies, self.size = math.prod(self.half), math.prod(basis)
        self.pointwise = product == "pointwise"
        self.images = min(images, p.batch)
        self.arena, self.constants = Arena(), Arena()
        self.operands = {role: Operand(p, role, basis) for role in p.operands}
        planes = self.images * max(p.in_channels, p.out_channels)
        self.filter_rows = max(1, min(p.out_channels, planes * p.groups // p.in_channels))
        self.padded: Slot | None = None
        sizes = [self.rows(role) * o.planes for role, o in self.operands.items() if not o.direct]
        if sizes:
            self.padded = self.arena.add((max(sizes) * self.size,), torch.float32)
        self.spectra = {role: self._add(role) for role in "xwy" if self._kept(role)}

    def rows(self, role: str) -> int:
        """Most rows of an operand that are transformed at a time."""
        return self.filter_rows if role == "w" else self.images

    def _kept(self, role: str) -> bool:
        """Whether the spectrum of ``role`` has a buffer; a depthwise image is multiplied in the transform's result."""
        if not self.pointwise:
            return True
        if self.p.pass_ is Pass.WGRAD:
            return role == "w"
        several = self.p.out_channels > self.p.groups
        return role == "w" or (several and role == self.p.result)

    def _count(self, role: str, images: int) -> int:
        """Elements of a spectrum at one frequency: of the whole filter, or of a block of images."""
        p = self.p
        if role == "w":
            return p.out_channels * p.in_channels // p.groups
        return images * (p.in_channels if role == "x" else p.out_channels)

    def _add(self, role: str) -> Slot:
        """Room for the spectrum of ``role``, among the constants where it is that of a constant filter."""
        arena = self.constants if role == "w" and self.p.constant_weight else self.arena
        return arena.add((self.frequencies * self._count(role, self.images),), torch.complex64)

    def _matrices(self, role: str, images: int) -> tuple[int, int, int]:
        """(frequencies times groups, rows, columns) of a spectrum."""
        p, count = self.p, self.frequencies * self.p.groups
        if role == "w":
            return count, p.out_channels // p.groups, p.in_channels // p.groups
        return count, images, (p.in_channels if role == "x" else p.out_channels) // p.groups

    def spectrum(self, role: str, index: Index, images: int) -> Strided:
        """Rows ``index`` of a spectrum in its buffer, as (rows, groups, channels, half basis)."""
        p, (first, rows) = self.p, index
        channels = (p.out_channels if role == "y" else p.in_channels) // p.groups
        sizes: tuple[int, ...]
        if self.pointwise:
            groups = 1 if role == "w" else p.groups
            channels = channels if role != "w" else p.in_channels // p.groups
            sizes = (rows, groups, channels, *self.half)
            return Strided(sizes, dense(sizes), first * groups * channels * self.frequencies)
        step = self._count(role, images)
        frequency = tuple(n * step for n in dense(self.half))
        if role == "w":
            return Strided((rows, 1, channels, *self.half), (channels, 0, 1, *frequency), first * channels)
        sizes = (rows, p.groups, channels, *self.half)
        return Strided(sizes, (channels, images * channels, 1, *frequency), first * channels)

    def hidden(self) -> int:
        """Bytes that transforms are expected to allocate: results, copies for the inverse, and library scratch."""
        forward = 0
        for role, operand in self.operands.items():
            spectrum = 8 * self.rows(role) * operand.planes * self.frequencies
            forward = max(forward, (4 if self.pointwise and self.p.pass_ is Pass.WGRAD else 2) * spectrum)
        planes = self.rows(self.p.result) * self._result_planes()
        spectrum = 8 * planes * self.frequencies
        # The third is scratch, which libraries take for long axes: of one axis alone twice as much.
        copies = 3 + (self.p.dims == 1) + self.pointwise
        return max(forward, copies * spectrum + 4 * planes * self.size)

    def _result_planes(self) -> int:
        """Planes of one row of the result."""
        p = self.p
        return {"x": p.in_channels, "y": p.out_channels, "w": p.in_channels // p.groups}[p.result]

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run for tensors with the strides of these."""
        strides = dict(zip((*self.p.operands, self.p.result), (t.stride() for t in (a, b, out)), strict=True))
        return Steps(self, strides).run

    def prepare(self, weight: torch.Tensor) -> Prepare:
        """What transforms filters with the strides of ``weight`` into :attr:`constants`."""
        return Steps(self, {"w": weight.stride()}).prepare


class Steps:
    """A :class:`FourierPlan` for tensors with fixed strides."""

    def __init__(self, plan: FourierPlan, strides: Mapping[str, tuple[int, ...]]) -> None:
        p = plan.p
        self.plan, self.p, self.strides = plan, p, strides
        self.axes = tuple(range(3, 3 + p.dims))
        # Libraries do work along an axis of one point too; the last is the one that is halved.
        self.transformed = [d for d in self.axes if plan.basis[d - 3] > 1 or d == self.axes[-1]]
        self.blocks = [(n, min(plan.images, p.batch - n)) for n in range(0, p.batch, plan.images)]
        rows = plan.filter_rows
        self.filter_blocks = [(n, min(rows, p.out_channels - n)) for n in range(0, p.out_channels, rows)]
        self.multiply = None if plan.pointwise else PRODUCTS[plan.product_name](p)
        self.results = [result_placement(axis, p.pass_) for axis in p.axes]
        whole = all(r.count == n for r, n in zip(self.results, p.shape(p.result)[2:], strict=True))
        # Where nothing meets the result is zero, not what rounding leaves of it.
        self.meets = all(meets(axis) for axis in p.axes)
        self.clears = not (whole and self.meets) and not p.accumulate
        self.scale = 1.0 / plan.size

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the pass into ``out`` and return it."""
        assert out is not None
        if self.clears:
            out.zero_()
        if not self.meets:
            return out
        if self.p.pass_ is Pass.WGRAD:
            self._weight_gradient(a, b, out, workspace)
        else:
            self._correlation(a, b, out, workspace)
        return out

    def prepare(self, w: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write the filter's spectrum into ``kept``."""
        if self.meets:
            self._filter(w, self.plan.spectra["w"].of(kept), workspace)

    def _filter(self, w: torch.Tensor, weights: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write the spectrum of filter ``w`` into ``weights``."""
        p, plan = self.p, self.plan
        forward = self._transformer("w", w, workspace)
        for index in self.filter_blocks:
            spectrum = forward(index)
            # Cross-correlation is a product with the conjugate; a full convolution, DGRAD, is not.
            plan.spectrum("w", index, plan.images).of(weights).copy_(
                spectrum.conj() if p.pass_ is Pass.FPROP else spectrum
            )
        if plan.pointwise:
            weights.mul_(self.scale)

    def _correlation(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """FPROP or DGRAD; ``w`` is the filter, or for a constant filter what :meth:`prepare` wrote."""
        p, plan = self.p, self.plan
        data = p.operands[0]
        if p.constant_weight:
            weights = plan.spectra["w"].of(w)
        else:
            weights = plan.spectra["w"].of(workspace)
            self._filter(w, weights, workspace)
        forward = self._transformer(data, a, workspace)
        for index in self.blocks:
            spectrum = forward(index)
            if self.multiply is None:
                product = self._scaled(spectrum, weights, workspace)
            else:
                product = self._products(data, spectrum, weights, index, workspace)
            self._invert(product, out, index)

    def _products(
        self, data: str, spectrum: torch.Tensor, weights: torch.Tensor, index: Index, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of a block's spectrum with the filter's, in the buffer of the result's spectrum."""
        p, plan, rows = self.p, self.plan, (0, index[1])
        images = plan.spectra[data].of(workspace)
        plan.spectrum(data, rows, index[1]).of(images).copy_(spectrum)
        result = plan.spectra[p.result].of(workspace)
        left, right, target = (
            _front(tensor, plan._matrices(role, index[1]))
            for tensor, role in ((images, data), (weights, "w"), (result, p.result))
        )
        assert self.multiply is not None
        self.multiply(left, right.mT if p.pass_ is Pass.FPROP else right, target, self.scale, False)
        return plan.spectrum(p.result, rows, index[1]).of(result)

    def _scaled(self, spectrum: torch.Tensor, weights: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """A depthwise product, in the image's spectrum where the result fits into it."""
        p, plan = self.p, self.plan
        several = p.out_channels // p.groups
        factors = weights.view(1, p.groups, several, *plan.half)
        if several == 1:
            return spectrum.mul_(factors)
        if p.pass_ is Pass.DGRAD:
            spectrum.mul_(factors)
        sizes = (spectrum.shape[0], p.groups, several if p.pass_ is Pass.FPROP else 1, *plan.half)
        target = _front(plan.spectra[p.result].of(workspace), sizes)
        if p.pass_ is Pass.FPROP:
            return torch.mul(spectrum, factors, out=target)
        return torch.sum(spectrum, 2, keepdim=True, out=target)

    def _weight_gradient(
        self, x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None
    ) -> None:
        """WGRAD: the sum of products over blocks of images, then the inverse transform."""
        plan = self.plan
        total = plan.spectra["w"].of(workspace)
        image, gradient = self._transformer("x", x, workspace), self._transformer("y", dy, workspace)
        for number, index in enumerate(self.blocks):
            if self.multiply is None:
                self._add_depthwise(image(index), gradient(index), total, number > 0)
                continue
            rows = (0, index[1])
            left, right = plan.spectra["y"].of(workspace), plan.spectra["x"].of(workspace)
            plan.spectrum("x", rows, index[1]).of(right).copy_(image(index))
            plan.spectrum("y", rows, index[1]).of(left).copy_(gradient(index).conj())
            matrices = (
                _front(tensor, plan._matrices(role, index[1]))
                for tensor, role in ((left, "y"), (right, "x"), (total, "w"))
            )
            first, second, target = matrices
            self.multiply(first.mT, second, target, self.scale, number > 0)
        if plan.pointwise:
            total.mul_(self.scale)
        for index in self.filter_blocks:
            self._invert(plan.spectrum("w", index, plan.images).of(total), out, index)

    def _add_depthwise(self, image: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor, add: bool) -> None:
        """Sum a block's depthwise products into ``total``; ``add`` keeps what is there."""
        p, plan = self.p, self.plan
        target = total.view(p.groups, p.out_channels // p.groups, *plan.half)
        products = gradient.conj_physical_().mul_(image)
        if add:
            target.add_(products.sum(0))
        else:
            torch.sum(products, 0, out=target)

    def _transformer(
        self, role: str, tensor: torch.Tensor, workspace: torch.Tensor | None
    ) -> Callable[[Index], torch.Tensor]:
        """A function that transforms rows of an operand.

        Padding is cleared once, as all blocks fill the same places. WGRAD's two operands share the planes, so there it
        is cleared each time.
        """
        operand, padded, axes = self.plan.operands[role], self.plan.padded, self.transformed
        strides = self.strides[role]
        if operand.direct:
            whole = torch.unflatten(tensor, 1, (operand.groups, operand.channels))
            return lambda index: torch.fft.rfftn(whole.narrow(0, *index), dim=axes)
        assert padded is not None
        buffer = padded.of(workspace)
        shared = self.p.pass_ is Pass.WGRAD
        if not operand.fills:
            _front(buffer, operand.padded(self.plan.rows(role))).zero_()

        def forward(index: Index) -> torch.Tensor:
            planes = _front(buffer, operand.padded(index[1]))
            if shared and not operand.fills:
                planes.zero_()
            source, target = operand.source(strides, index)
            target.of(planes).copy_(source.of(tensor))
            transformed: torch.Tensor = torch.fft.rfftn(planes, dim=axes)
            return transformed

        return forward

    def _invert(self, spectrum: torch.Tensor, out: torch.Tensor, index: Index) -> None:
        """The inverse transform of a spectrum, already scaled; its valid places go to rows ``index`` of ``out``."""
        sizes = [self.plan.basis[d - 3] for d in self.transformed]
        planes = torch.fft.irfftn(spectrum, s=sizes, dim=self.transformed, norm="forward")
        source, target = self._result(planes, index)
        target_view = target.of(out)
        if self.p.accumulate:
            target_view.add_(source)
        else:
            target_view.copy_(source)

    def _result(self, planes: torch.Tensor, index: Index) -> tuple[torch.Tensor, Strided]:
        """The valid part of the inverse transform, and where it goes in the result."""
        row, channel, *space = self.strides[self.p.result]
        groups, channels = planes.shape[1:3]
        source = planes
        for dim, place in zip(self.axes, self.results, strict=True):
            stop = place.lead + max((place.count - 1) * place.step + 1, 0) if place.count else place.lead
            source = source[(slice(None),) * dim + (slice(place.lead, stop, place.step),)]
        sizes = (index[1], groups, channels, *(place.count for place in self.results))
        offset = index[0] * row + sum(place.start * s for place, s in zip(self.results, space, strict=True))
        return source, Strided(sizes, (row, channels * channel, channel, *space), offset)


def _front(buffer: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The first elements of a flat buffer as a contiguous tensor of ``sizes``."""
    return buffer[: math.prod(sizes)].view(tuple(sizes))
