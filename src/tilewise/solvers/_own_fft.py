"""Convolution over our own transforms: tiles of images straight from and into the tensors, products per frequency.

Images are planes or signals. Each tile is read, padded and transformed in one pass, and each result is clipped and
written in one (Vasilache et al. 2014, section 5); spectra lie frequency first, so that every frequency is a matrix and
nothing is transposed. Those of operands are complex64, scaled for the products after a look at all of them, or fp16
parts, scaled before there are any.
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

from tilewise.axis import Axis
from tilewise.kernels.cuda import fft1d, fft2d
from tilewise.kernels.cuda.irfft2_summed import bind as bind_summed
from tilewise.kernels.cuda.launch import Bound
from tilewise.kernels.cuda.operands import PARTS, Memory
from tilewise.problem import ROLES, ConvProblem, Pass
from tilewise.solvers import _magnitudes as magnitudes
from tilewise.solvers._buffers import Arena, Slot, dense
from tilewise.solvers._fft_stretches import Batch, Place, Stretch, batches, stretches
from tilewise.solvers._fft_windows import Window, covered, windows
from tilewise.solvers._frequency_products import (
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
from tilewise.solvers._matmul import at_precision
from tilewise.solvers._plane_products import launches as plane_launches
from tilewise.solvers.base import Prepare, Run, SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["OwnPlan", "Transform", "in_order", "launched"]

Tensors = Sequence[torch.Tensor | None]
Step = Callable[[Tensors, Sequence[int]], None]
"""One kernel over (first operand, second, result, workspace) and their addresses."""
Shifted = Callable[[int], Step]
"""A kernel on images of a tensor, by how many bytes lie before the first image of its chunk."""
NUMBERS = {False: torch.complex64, True: torch.float16}
"""What spectra are made of, in parts or not."""
Tile = tuple[Window, ...]
"""Along each axis."""
Transform = Callable[..., None]
KEPT, OUT, WORKSPACE = 1, 2, 3
INVERSE = "inverse C"
PRODUCT_AND_INVERSE = "product and inverse C"
ALIGNED = 256
ACCESS = 16
"""Bytes of the widest access to memory: for addresses equal in the rest by it kernels are the same."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is in flight at a time: ``images`` from ``first`` on, and tiles of each.

    Those of one ``kind`` differ by ``first`` alone.
    """

    kind: int
    first: int
    images: int
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> int:
        """Tiles of images, which are the rows of a matrix."""
        return self.images * len(self.tiles)


@functools.lru_cache(maxsize=1024)
def _tiles(
    axes: tuple[Axis, ...], pass_: Pass, sizes: tuple[int, ...]
) -> tuple[tuple[Tile, ...], bool, dict[str, int]]:
    """All tiles of an image, whether their results are all of it, and the most elements of one by operand.

    Plans that differ by what is in flight share them.
    """
    found = [windows(axis, pass_, size)[0] for axis, size in zip(axes, sizes, strict=True)]
    every = tuple(itertools.product(*found))
    extents = (axis.size if pass_ is Pass.DGRAD else axis.out for axis in axes)
    complete = pass_ is Pass.WGRAD or all(covered(tiles, n) for tiles, n in zip(found, extents, strict=True))
    most = max((math.prod(w.count for w in tile) for tile in every), default=1)
    other = max((math.prod(w.other_count for w in tile) for tile in every), default=1)
    taps = math.prod(axis.kernel for axis in axes)
    return every, bool(every) and complete, {"x": most, "w": taps, "y": other if pass_ is Pass.WGRAD else most}


@dataclass
class OwnPlan:
    """Buffers and steps. ``tile`` is the size of tiles along each axis, ``basis`` that of their transforms.

    ``images`` and ``tiles`` of each are in flight at a time; fewer tiles than all go with one image. ``form`` says how
    numbers of the operands' spectra are held (see ``PARTS``); the result's are complex64, and nowhere with the product
    ``FUSED``. Spectra lie frequency first, with the product ``PLANES`` one after another.
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
    """What is kept of a constant filter."""

    def __post_init__(self) -> None:
        p = self.p
        self.every, self.covered, self.largest = _tiles(p.axes, p.pass_, self.tile)
        self.frequencies = math.prod(self.basis[:-1]) * (self.basis[-1] // 2 + 1)
        self.kinds = list(self._kinds())
        """Chunks that differ by more than the image they start at, and how many there are of each."""
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
        """Where the largest magnitude of each operand is, and the logarithm of how many of its numbers make a plane."""
        p = self.p
        places = {role: Slot((1,), torch.int32, self.top.offset + 4 * i) for i, role in enumerate(p.operands)}
        if p.constant_weight and "w" in places:
            places["w"] = self.constants.add((1,), torch.int32)
        return {role: Scaled(place, max(0, self.largest[role] - 1).bit_length()) for role, place in places.items()}

    def places(self, role: str, tiles: Sequence[Tile]) -> list[tuple[Place, ...]]:
        """Where tiles of the images of ``role`` lie along each axis; WGRAD's gradient lies at 0."""
        if role == self.p.result:
            return [tuple((w.result_start, w.result_count, w.result_lead) for w in tile) for tile in tiles]
        if self.p.pass_ is Pass.WGRAD and role == "y":
            return [tuple((w.other_start, w.other_count, 0) for w in tile) for tile in tiles]
        return [tuple((w.start, w.count, w.lead) for w in tile) for tile in tiles]

    def transforms(self, chunk: Chunk) -> int:
        """Launches for the images of a chunk, there and back; where those and channels do not join, the most."""
        return sum(
            1 if self.p.layout(role) == "contiguous" else min(chunk.images, stretch.tiles)
            for role in "xy"
            for stretch in stretches(self.places(role, chunk.tiles))
        )

    def _kinds(self) -> Iterator[tuple[Chunk, int]]:
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
        """All of them in order: all tiles of one image, or images, before those of the next."""
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
        """``run`` for the strides of these operands and result; ``launch`` compiles a transform.

        Raises ``SolverUnavailable`` with the reason where a kernel does not compile or fit.
        """
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
        """The kernels in order, named as in Table 5: clear, scale, transform A, transform B, product, inverse C.

        The last two may be one: product and inverse C.
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
    """Queues all steps over the tensors it is called with; ``mark`` is told each one's name before."""
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
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SolverUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}") from error


def launched(device: torch.device) -> Callable[[Bound], Transform]:
    """Compiles transforms for a GPU."""
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
        """The tensors that spectra lie in."""
        self.peaks = dict.fromkeys("xwy", 0)
        """Blocks of an operand's transforms so far."""
        self.products: dict[tuple[object, ...], Step] = {}
        """Of chunks so far: equal ones share theirs, which is compiled."""
        self.launches: dict[tuple[object, ...], tuple[Bound, Transform]] = {}
        """Transforms so far: what differs by addresses alone is one."""
        self.shifted: dict[tuple[object, ...], tuple[list[Shifted], int]] = {}
        """Kernels on images of chunks so far, and the peaks with them: what differs by a shift alone is made once."""

    def all(self) -> Iterator[tuple[str, Step]]:
        """Every kernel and its name."""
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
        """The filter's transform, and before it the search for its scale."""
        yield from self._scale(["w"])
        yield from self._filter()

    def _scale(self, roles: Sequence[str]) -> Iterator[tuple[str, Step]]:
        """The search for the largest magnitudes of operands, where their spectra are scaled by them."""
        plan = self.plan
        if not plan.in_parts:
            return
        found = [
            magnitudes.Searched(
                self.tensors[role], self.number[role], plan.peaks[role], plan.scales[role].peak, self.spectra[role]
            )
            for role in roles
        ]
        alignment = [ALIGNED] * 4
        for role in roles:
            alignment[self.number[role]] = self.p.alignment[ROLES.index(role)]
        yield "scale", self._program(magnitudes.launches(found), alignment)

    def _filter(self) -> Iterator[tuple[str, Step]]:
        self.peaks["w"] = 0
        yield "transform B", self._filters()

    def _filters(self, inverse: bool = False) -> Step:
        """The transform of all filters, each as one tile."""
        count, _, *sizes = self.p.shape("w")
        place = tuple((0, n, 0) for n in sizes)
        return self._transform("w", count, inverse, Batch(Stretch(place), 0, count, 0, count), 0)(0)

    def _images(self, name: str, role: str, chunk: Chunk, inverse: bool = False) -> Iterator[tuple[str, Step]]:
        """Transforms of each tile of images."""
        return self._each(name, role, chunk, functools.partial(self._transform, role, chunk.rows, inverse))

    def _each(
        self, name: str, role: str, chunk: Chunk, make: Callable[[Batch, int], Shifted]
    ) -> Iterator[tuple[str, Step]]:
        """What ``make`` gives for each launch over a chunk's images of ``role``."""
        tensor = self.tensors[role]
        shift = chunk.first * tensor.stride(0) * tensor.element_size()
        key = (name, chunk.kind, shift % ACCESS)
        if key not in self.shifted:
            found = batches(self.plan.places(role, chunk.tiles), 0, chunk.images, tensor.shape[1], tensor.stride())
            self.shifted[key] = [make(batch, shift) for batch in found], self.peaks[role]
        steps, self.peaks[role] = self.shifted[key]
        return ((name, step(shift)) for step in steps)

    def _fused(self, chunk: Chunk, spectra: Mapping[str, Matrices]) -> Iterator[tuple[str, Step]]:
        """Of each tile the products and their inverse transforms, in one kernel."""
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
        """(tiles, images, channels, ...) of a tensor that a launch takes, and how far it is behind ``shift`` bytes."""
        tensor, stretch = self.tensors[role], batch.stretch
        strides = tensor.stride()
        starts = (batch.first, 0, *(start for start, _, _ in stretch.place))
        offset = tensor.element_size() * sum(n * s for n, s in zip(starts, strides, strict=True))
        alignment = math.gcd(self.p.alignment[ROLES.index(role)], offset + shift, ACCESS)
        sizes = (stretch.tiles, batch.images, tensor.shape[1], *(n for _, n, _ in stretch.place))
        return Memory(sizes, (stretch.step * strides[-1], *strides), tensor.dtype, alignment), offset

    def _transform(self, role: str, rows: int, inverse: bool, batch: Batch, shift: int) -> Shifted:
        """Between images of a tensor, or filters, and their spectra in matrices of ``rows``; see :data:`Shifted`."""
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
        p, plan = self.p, self.plan
        if plan.product == "library":
            multiply = by_library(p, chunk.rows, plan.frequencies, spectra, accumulate, self.spectra)
            return lambda tensors, addresses: multiply(tensors)
        if plan.plain:
            found = plane_launches(p, chunk.rows, plan.frequencies, plan.spectra, accumulate, self.spectra)
            return self._program(found, [ALIGNED] * 4)
        common = p, chunk.rows, plan.frequencies, spectra, plan.product, plan.block
        if plan.in_parts:
            return self._program(part_launches(*common, plan.scales, accumulate, self.spectra), [ALIGNED] * 4)
        left, right, _ = factors(p.pass_)
        peaks = [(plan.peaks[role], self.peaks[role]) for role in (left, right)]
        return self._program(launches(*common, peaks, plan.top, accumulate, self.spectra), [ALIGNED] * 4)

    def _program(self, found: Sequence[Launch], alignment: Sequence[int]) -> Step:
        from tilewise.kernels.triton.launch import Program

        program = Program(found, alignment, self.device)
        if self.device.type == "cpu":
            return lambda tensors, addresses: program(tensors)
        return lambda tensors, addresses: program.at(addresses)


def _on(call: Transform, first: tuple[int, int], second: tuple[int, int], *third: tuple[int, int]) -> Step:
    """``call`` on two addresses or three, each so many bytes into a tensor of that number."""
    (a, i), (b, j) = first, second
    if not third:
        return lambda tensors, addresses: call(addresses[a] + i, addresses[b] + j)
    ((c, k),) = third
    return lambda tensors, addresses: call(addresses[a] + i, addresses[b] + j, addresses[c] + k)


def _clear(tensors: Tensors, addresses: Sequence[int]) -> None:
    out = tensors[OUT]
    assert out is not None
    out.zero_()
