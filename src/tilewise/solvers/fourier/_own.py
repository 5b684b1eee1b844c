"""Convolution with this package's transforms: tiles of images straight from and into tensors, products per frequency.

Images are planes or signals. Each tile is read, padded and transformed in one pass, and each result is clipped and
written in one (Vasilache et al. 2014, section 5). Spectra lie frequency first, so that every frequency is a matrix and
nothing is transposed. Operands' spectra are complex64 numbers, which the products scale by their peaks, or fp16 parts,
which are scaled by the operands' peaks as they are made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tilewise.kernels.building.target import sought
from tilewise.kernels.cuda import fft1d, fft2d
from tilewise.kernels.cuda.irfft2_summed import bind as bind_summed
from tilewise.kernels.cuda.launch import Bound
from tilewise.kernels.cuda.operands import PARTS, Memory
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Prepare, Run, SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Slot, dense
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.fourier import _magnitudes as magnitudes
from tilewise.solvers.fourier._frequency_products import (
    FUSED,
    PLANES,
    Block,
    Matrices,
    Scaled,
    by_library,
    factors,
    launches,
    matrices,
    part_launches,
    summands,
)
from tilewise.solvers.fourier._plane_products import launches as plane_launches
from tilewise.solvers.fourier._stretches import Batch, Place, Stretch, batches, stretches
from tilewise.solvers.fourier._windows import Window, covered, windows

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["OwnPlan", "Transform", "in_order", "launched"]

Tensors = Sequence[torch.Tensor | None]
Step = Callable[[Tensors, Sequence[int]], None]
"""One kernel over (first operand, second, result, workspace) and their addresses."""
Shifted = Callable[[int], Step]
"""Makes a kernel on a tensor's images, given the bytes before the first image of its chunk."""
NUMBERS = {False: torch.complex64, True: torch.float16}
"""dtype of spectra, by whether they are held in parts."""
Tile = tuple[Window, ...]
"""A tile's window along each axis."""
Transform = Callable[..., None]
KEPT, OUT, WORKSPACE = 1, 2, 3
INVERSE = "inverse C"
PRODUCT_AND_INVERSE = "product and inverse C"
ALIGNED = 256
ACCESS = 16
"""Bytes of the widest memory access. Addresses that are equal modulo it can share a kernel."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is computed at a time: ``images`` from ``first`` on, and tiles. One ``kind`` differs in ``first`` only."""

    kind: int
    first: int
    images: int
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> int:
        """Tiles of all images, which are the rows of a matrix."""
        return self.images * len(self.tiles)


@functools.lru_cache(maxsize=1024)
def _tiles(
    axes: tuple[Axis, ...], pass_: Pass, sizes: tuple[int, ...]
) -> tuple[tuple[Tile, ...], bool, dict[str, int]]:
    """All tiles of an image, whether their results cover the result, and the most elements of a tile by operand."""
    by_axis = [windows(axis, pass_, size)[0] for axis, size in zip(axes, sizes, strict=True)]
    all_tiles = tuple(itertools.product(*by_axis))
    extents = (axis.size if pass_ is Pass.DGRAD else axis.out for axis in axes)
    complete = pass_ is Pass.WGRAD or all(covered(tiles, n) for tiles, n in zip(by_axis, extents, strict=True))
    most = max((math.prod(w.count for w in tile) for tile in all_tiles), default=1)
    other = max((math.prod(w.other_count for w in tile) for tile in all_tiles), default=1)
    taps = math.prod(axis.kernel for axis in axes)
    return all_tiles, bool(all_tiles) and complete, {"x": most, "w": taps, "y": other if pass_ is Pass.WGRAD else most}


@dataclass
class OwnPlan:
    """Buffers and steps. ``tile`` is the size of tiles along each axis, ``basis`` that of their transforms.

    ``images`` images and ``tiles`` tiles of each are in flight at a time; with fewer tiles than all, one image is.
    ``form`` says how numbers of the operands' spectra are held (see ``PARTS``). The result's are complex64; with the
    product ``FUSED`` they are nowhere in memory. Spectra lie frequency first; with the product ``PLANES`` plane after
    plane.
    """

    p: ConvProblem
    basis: tuple[int, ...]
    tile: tuple[int, ...]
    product: str
    block: Block
    images: int
    tiles: int
    form: str = "interleaved"
    arena: Arena = field(default_factory=Arena)
    constants: Arena = field(default_factory=Arena)
    """Workspace that is kept between calls, for a constant filter."""

    def __post_init__(self) -> None:
        p = self.p
        self.every, self.covered, self.largest = _tiles(p.axes, p.pass_, self.tile)
        self.frequencies = math.prod(self.basis[:-1]) * (self.basis[-1] // 2 + 1)
        self.kinds = list(self._kinds())
        """Chunks that differ in more than the image they begin with, and how many there are of each."""
        self.rows = max((chunk.rows for chunk, _ in self.kinds), default=0)
        channels = {"x": p.in_channels, "y": p.out_channels}
        counts = {role: self.rows * channels[role] for role in "xy"}
        counts["w"] = p.out_channels * p.in_channels // p.groups
        self.fused, self.plain = self.product == FUSED, self.product == PLANES
        if self.fused:
            del counts[p.result]
        arenas = {role: self.constants if role == "w" and p.constant_weight else self.arena for role in counts}
        self.forms = {role: self.form if role in p.operands else "interleaved" for role in counts}
        self.parts = {role: PARTS[form] for role, form in self.forms.items()}
        self.spectra = {
            role: arenas[role].add((self.frequencies * self.parts[role] * n,), NUMBERS[self.parts[role] > 1])
            for role, n in counts.items()
        }
        self.in_parts = PARTS[self.form] > 1
        # A transform has at most one block for each plane, and a last cluster of them.
        transforms = {"w": 1, **dict.fromkeys("xy", max((len(chunk.tiles) for chunk, _ in self.kinds), default=0))}
        scaled = () if self.fused or self.plain else p.operands
        blocks = {role: counts[role] + fft2d.MOST_CLUSTER * transforms[role] for role in scaled}
        peaks = {role: magnitudes.PROGRAMS if self.in_parts else blocks[role] for role in scaled}
        self.peaks = {role: arenas[role].add((n,), torch.int32) for role, n in peaks.items()}
        self.top = self.arena.add((len(scaled),), torch.int32)
        self.scales = self._scales() if self.in_parts else {}

    def _scales(self) -> dict[str, Scaled]:
        """Where each operand's peak is, and the logarithm of how many of its numbers make up a plane."""
        p = self.p
        places = {role: Slot((1,), torch.int32, self.top.offset + 4 * i) for i, role in enumerate(p.operands)}
        if p.constant_weight and "w" in places:
            places["w"] = self.constants.add((1,), torch.int32)
        return {role: Scaled(place, max(0, self.largest[role] - 1).bit_length()) for role, place in places.items()}

    def places(self, role: str, tiles: Sequence[Tile]) -> list[tuple[Place, ...]]:
        """Where tiles of the images of ``role`` lie along each axis. WGRAD's gradient lies at 0 of the basis."""
        if role == self.p.result:
            return [tuple((w.result_start, w.result_count, w.result_lead) for w in tile) for tile in tiles]
        if self.p.pass_ is Pass.WGRAD and role == "y":
            return [tuple((w.other_start, w.other_count, 0) for w in tile) for tile in tiles]
        return [tuple((w.start, w.count, w.lead) for w in tile) for tile in tiles]

    def transforms(self, chunk: Chunk) -> int:
        """Most launches of transforms, forward and back, for the images of a chunk."""
        return sum(
            1 if self.p.layout(role) == "contiguous" else min(chunk.images, stretch.tiles)
            for role in "xy"
            for stretch in stretches(self.places(role, chunk.tiles))
        )

    def _kinds(self) -> Iterator[tuple[Chunk, int]]:
        """Chunks that differ in more than their first image, and how many there are of each."""
        if self.tiles < len(self.every):
            for kind, start in enumerate(range(0, len(self.every), self.tiles)):
                yield Chunk(kind, 0, 1, self.every[start : start + self.tiles]), self.p.batch
        elif self.every:
            times, rest = divmod(self.p.batch, self.images)
            if times:
                yield Chunk(0, 0, self.images, self.every), times
            if rest:
                yield Chunk(1, times * self.images, rest, self.every), 1

    @property
    def chunks(self) -> Iterator[Chunk]:
        """All chunks in order: all tiles of one image, or block of images, before those of the next."""
        if self.tiles < len(self.every):
            for first, (chunk, _) in itertools.product(range(self.p.batch), self.kinds):
                yield Chunk(chunk.kind, first, chunk.images, chunk.tiles)
        else:
            for chunk, times in self.kinds:
                for number in range(times):
                    yield Chunk(chunk.kind, chunk.first + number * chunk.images, chunk.images, chunk.tiles)

    def bind(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        launch: Callable[[Bound], Transform] | None = None,
    ) -> Run:
        """A run for tensors with these strides; ``launch`` compiles a transform. Raises ``SolverUnavailable``."""
        queue = in_order(self.steps(tensors, device, launch))

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            queue(a, b, out, workspace)
            return out

        return at_precision(self.p, run) if self.product == "library" else run

    def steps(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        launch: Callable[[Bound], Transform] | None = None,
    ) -> list[tuple[str, Step]]:
        """The kernels in order, named as in Table 5: clear, scale, transform A and B, product, inverse C (or both in
        one).
        """
        given = dict(zip((*self.p.operands, self.p.result), tensors, strict=True))
        with _unavailable():
            return list(Steps(self, given, device, launch or launched(device)).all())

    def prepare(
        self, weight: torch.Tensor, device: torch.device, launch: Callable[[Bound], Transform] | None = None
    ) -> Prepare:
        """What transforms filters with the strides of ``weight``. Raises as :meth:`bind`."""
        with _unavailable():
            queue = in_order(Steps(self, {"w": weight}, device, launch or launched(device)).filter())
        return lambda weight, kept, workspace: queue(weight, kept, None, workspace)


def in_order(steps: Iterable[tuple[str, Step]], mark: Callable[[str], None] | None = None) -> Callable[..., None]:
    """A function that queues all steps on the tensors it is given. ``mark`` is called with each step's name first."""
    named = list(steps)

    def queue(*tensors: torch.Tensor | None) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        for name, step in named:
            if mark is not None:
                mark(name)
            step(tensors, addresses)

    return queue


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Turn errors of kernels and compilers into ``SolverUnavailable``."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SolverUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}") from error


def launched(device: torch.device) -> Callable[[Bound], Transform]:
    """A function that compiles transforms for a GPU: the one that is sought, or ``device``."""
    if (architecture := sought()) is not None:
        return lambda bound: bound.compile_for(architecture)
    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda bound: bound.launch(index)


class Steps:
    """The kernels of an :class:`OwnPlan` in order, for tensors of fixed strides."""

    def __init__(
        self,
        plan: OwnPlan,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        launch: Callable[[Bound], Transform],
    ) -> None:
        self.plan, self.p, self.device, self.launch, self.tensors = plan, plan.p, device, launch, tensors
        roles = (*plan.p.operands, plan.p.result)
        self.number = {role: number for number, role in enumerate(roles)} if len(tensors) > 1 else {"w": 0}
        self.spectra = {role: KEPT if role == "w" and plan.p.constant_weight else WORKSPACE for role in "xwy"}
        """Numbers of the tensors that hold each role's spectra."""
        self.peaks = dict.fromkeys("xwy", 0)
        """How many blocks each operand's transforms have so far."""
        self.products: dict[tuple[object, ...], Step] = {}
        """Compiled products of chunks so far; equal chunks share one."""
        self.launches: dict[tuple[object, ...], tuple[Bound, Transform]] = {}
        """Transforms compiled so far; those that differ only in addresses share one."""
        self.shifted: dict[tuple[object, ...], tuple[list[Shifted], int]] = {}
        """Kernels on images of chunks so far, with their peaks; those that differ only by a shift are made once."""

    def all(self) -> Iterator[tuple[str, Step]]:
        """Every kernel in order, with its name."""
        p, plan = self.p, self.plan
        if not plan.covered:
            yield "clear", _clear
        if not plan.every:
            return
        yield from self._scale([role for role in p.operands if role != "w" or not p.constant_weight])
        if p.pass_ is not Pass.WGRAD:
            steps = list(self._filter())
            if not p.constant_weight:
                yield from steps
        layouts = functools.cache(lambda rows: matrices(p, rows, plan.spectra, plan.parts))
        for number, chunk in enumerate(plan.chunks):
            spectra = layouts(chunk.rows)
            for role in p.operands:
                if role != "w":
                    self.peaks[role] = 0
                    yield from self._images(f"transform {'AB'[self.number[role]]}", role, chunk)
            if plan.fused:
                yield from self._fused(chunk, spectra)
                continue
            accumulate = p.pass_ is Pass.WGRAD and number > 0
            key = (chunk.rows, accumulate, *self.peaks.items())
            if key not in self.products:
                self.products[key] = self._products(chunk, spectra, accumulate)
            yield "product", self.products[key]
            if p.pass_ is not Pass.WGRAD:
                yield from self._images(INVERSE, p.result, chunk, inverse=True)
        if p.pass_ is Pass.WGRAD:
            yield INVERSE, self._filters(inverse=True)

    def filter(self) -> Iterator[tuple[str, Step]]:
        """The search for the filter's scale, then its transform."""
        yield from self._scale(["w"])
        yield from self._filter()

    def _scale(self, roles: Sequence[str]) -> Iterator[tuple[str, Step]]:
        """The search for the operands' peaks, where their spectra are scaled by these."""
        plan = self.plan
        if not plan.in_parts:
            return
        searched = [
            magnitudes.Searched(
                self.tensors[role], self.number[role], plan.peaks[role], plan.scales[role].peak, self.spectra[role]
            )
            for role in roles
        ]
        alignment = [ALIGNED] * 4
        for role in roles:
            alignment[self.number[role]] = self.p.alignment[ROLES.index(role)]
        yield "scale", self._program(magnitudes.launches(searched), alignment)

    def _filter(self) -> Iterator[tuple[str, Step]]:
        """The filter's transform."""
        self.peaks["w"] = 0
        yield "transform B", self._filters()

    def _filters(self, inverse: bool = False) -> Step:
        """The transform of all filters, each as one tile."""
        count, _, *sizes = self.p.shape("w")
        place = tuple((0, n, 0) for n in sizes)
        return self._transform("w", count, inverse, Batch(Stretch(place), 0, count, 0, count), 0)(0)

    def _images(self, name: str, role: str, chunk: Chunk, inverse: bool = False) -> Iterator[tuple[str, Step]]:
        """The transforms of each tile of a chunk's images."""
        return self._each(name, role, chunk, functools.partial(self._transform, role, chunk.rows, inverse))

    def _each(
        self, name: str, role: str, chunk: Chunk, make: Callable[[Batch, int], Shifted]
    ) -> Iterator[tuple[str, Step]]:
        """What ``make`` returns for each launch over a chunk's images of ``role``."""
        tensor = self.tensors[role]
        shift = chunk.first * tensor.stride(0) * tensor.element_size()
        key = (name, chunk.kind, shift % ACCESS)
        if key not in self.shifted:
            image_batches = batches(
                self.plan.places(role, chunk.tiles), 0, chunk.images, tensor.shape[1], tensor.stride()
            )
            self.shifted[key] = [make(batch, shift) for batch in image_batches], self.peaks[role]
        steps, self.peaks[role] = self.shifted[key]
        return ((name, step(shift)) for step in steps)

    def _fused(self, chunk: Chunk, spectra: Mapping[str, Matrices]) -> Iterator[tuple[str, Step]]:
        """For each tile the products and their inverse transforms in one kernel."""
        p, plan = self.p, self.plan
        left, right, conjugate = factors(p.pass_)
        target = self.number[p.result]

        def make(batch: Batch, shift: int) -> Shifted:
            image, offset = self._memory(p.result, batch, shift)
            at = batch.row * spectra[left].row
            first, second = summands(p, batch.images, plan.frequencies, spectra, at)
            a = self.spectra[left], plan.spectra[left].offset + 8 * at
            b = self.spectra[right], plan.spectra[right].offset
            lead = tuple(lead for _, _, lead in batch.stretch.place)
            planes = Memory(image.shape[1:], image.strides[1:], image.dtype, image.alignment)
            key = (FUSED, planes, first, second, lead)
            if key not in self.launches:
                bound = bind_summed(
                    planes, first, second, plan.basis, lead, conjugate == "b", None, 1.0 / math.prod(plan.basis)
                )
                self.launches[key] = bound, self.launch(bound)
            call = self.launches[key][1]
            return lambda shift: _on(call, a, b, (target, offset + shift))

        return self._each(PRODUCT_AND_INVERSE, p.result, chunk, make)

    def _memory(self, role: str, batch: Batch, shift: int) -> tuple[Memory, int]:
        """A tensor as (tiles, images, channels, ...) for a launch, and its offset in bytes beyond ``shift``."""
        tensor, stretch = self.tensors[role], batch.stretch
        strides = tensor.stride()
        starts = (batch.first, 0, *(start for start, _, _ in stretch.place))
        offset = tensor.element_size() * sum(n * s for n, s in zip(starts, strides, strict=True))
        alignment = math.gcd(self.p.alignment[ROLES.index(role)], offset + shift, ACCESS)
        sizes = (stretch.tiles, batch.images, tensor.shape[1], *(n for _, n, _ in stretch.place))
        return Memory(sizes, (stretch.step * strides[-1], *strides), tensor.dtype, alignment), offset

    def _transform(self, role: str, rows: int, inverse: bool, batch: Batch, shift: int) -> Shifted:
        """A transform between images (or filters) and spectra in matrices of ``rows``; see :data:`Shifted`."""
        plan, channels = self.plan, self.tensors[role].shape[1]
        image, offset = self._memory(role, batch, shift)
        parts, slot = plan.parts[role], plan.spectra[role]
        before, sizes = batch.row * channels, image.shape[:3]
        shape: tuple[int, ...] = (plan.frequencies, *sizes)
        apart: tuple[int, ...] = (rows * channels, batch.apart * channels, channels, 1)
        if plan.plain:
            inside = (*plan.basis[:-1], plan.basis[-1] // 2 + 1)
            shape, apart = (*sizes, *inside), (*(plan.frequencies * n for n in apart[1:]), *dense(inside))
            before *= plan.frequencies
        elif parts > 1:
            shape, apart = (plan.frequencies, parts, *sizes), (parts * rows * channels, *apart)
        base = slot.offset + slot.dtype.itemsize * before
        spectrum = Memory(shape, apart, slot.dtype, math.gcd(base, ACCESS))
        lead = tuple(lead for _, _, lead in batch.stretch.place)
        key = (role, inverse, image, spectrum, lead)
        if key not in self.launches:
            bound = self._bind(role, image, spectrum, lead, inverse)
            self.launches[key] = bound, self.launch(bound)
        (bound, call), source, target = self.launches[key], self.number[role], self.spectra[role]
        if inverse:
            return lambda shift: _on(call, (target, base), (source, offset + shift))
        if bound.pointers == 2:
            return lambda shift: _on(call, (source, offset + shift), (target, base))
        top = 0
        if plan.in_parts:
            top = plan.scales[role].peak.offset
        elif role in plan.peaks:
            top = plan.peaks[role].offset + 4 * self.peaks[role]
            self.peaks[role] += bound.grid
        return lambda shift: _on(call, (source, offset + shift), (target, base), (target, top))

    def _bind(self, role: str, image: Memory, spectrum: Memory, lead: tuple[int, ...], inverse: bool) -> Bound:
        """The transform of one shape, not yet compiled."""
        plan = self.plan
        scale, peaks = 1.0 / math.prod(plan.basis), not inverse and role in plan.peaks and not plan.in_parts
        layout = "plain" if plan.plain else "frequency_major"
        if len(plan.basis) == 1:
            return fft1d.bind(image, spectrum, plan.basis, lead, layout, inverse, None, scale, peaks)
        spread = plan.scales[role].spread if plan.parts[role] > 1 else 0
        return fft2d.bind(
            image, spectrum, plan.basis, lead, layout, inverse, None, scale, peaks, plan.forms[role], spread
        )

    def _products(self, chunk: Chunk, spectra: dict[str, Matrices], accumulate: bool) -> Step:
        """The product of a chunk's spectra."""
        p, plan = self.p, self.plan
        if plan.product == "library":
            multiply = by_library(p, chunk.rows, plan.frequencies, spectra, accumulate, self.spectra)
            return lambda tensors, addresses: multiply(tensors)
        if plan.plain:
            queued = plane_launches(p, chunk.rows, plan.frequencies, plan.spectra, accumulate, self.spectra)
            return self._program(queued, [ALIGNED] * 4)
        common = p, chunk.rows, plan.frequencies, spectra, plan.product, plan.block
        if plan.in_parts:
            return self._program(part_launches(*common, plan.scales, accumulate, self.spectra), [ALIGNED] * 4)
        left, right, _ = factors(p.pass_)
        peaks = [(plan.peaks[role], self.peaks[role]) for role in (left, right)]
        return self._program(launches(*common, peaks, plan.top, accumulate, self.spectra), [ALIGNED] * 4)

    def _program(self, queued: Sequence[Launch], alignment: Sequence[int]) -> Step:
        """Triton launches as one step."""
        from tilewise.kernels.triton.launch import Program

        program = Program(queued, alignment, self.device)
        if self.device.type == "cpu":
            return lambda tensors, addresses: program(tensors)
        return lambda tensors, addresses: program.at(addresses)


def _on(call: Transform, first: tuple[int, int], second: tuple[int, int], *third: tuple[int, int]) -> Step:
    """``call`` with two or three addresses, each given as the number of a tensor and an offset in bytes."""
    (a, i), (b, j) = first, second
    if not third:
        return lambda tensors, addresses: call(addresses[a] + i, addresses[b] + j)
    ((c, k),) = third
    return lambda tensors, addresses: call(addresses[a] + i, addresses[b] + j, addresses[c] + k)


def _clear(tensors: Tensors, addresses: Sequence[int]) -> None:
    """Fill the result with zeros."""
    out = tensors[OUT]
    assert out is not None
    out.zero_()
