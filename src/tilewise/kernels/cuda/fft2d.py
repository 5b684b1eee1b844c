"""Batched 2-D Fourier transforms of small real planes in one pass over memory (Vasilache et al. 2014, section 5).

Layouts of a spectrum of n1 x n2 planes, with half = n2 / 2 + 1:

``plain``
    ``(..., n1, half)``, as ``torch.fft.rfft2`` gives it.
``frequency_major``
    ``(n1 * half, ...)``: frequency ``k1 * half + k2`` first and planes innermost, so that every frequency is a matrix.
``packed``
    ``(n1 * n2 / 2, ...)``: as many numbers as the plane has. Row k1 = 1 .. n1/2 - 1 is kept whole, ``Y[k1, k2]`` at
    ``k1 * n2 + k2``; the other rows follow by symmetry. ``Y[0, k2]`` is at k2 and ``Y[n1/2, k2]`` at ``n2/2 + k2``, for
    k2 = 1 .. n2/2 - 1. Four frequencies are real: number 0 holds ``Y[0, 0] + i Y[0, n2/2]``, number n2/2 holds
    ``Y[n1/2, 0] + i Y[n1/2, n2/2]``. In products of spectra these two are multiplied part by part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.kernels.codelets import fft, rotation
from tilewise.kernels.cuda.launch import Bound, Launch, block_limits, has_clusters, read_source
from tilewise.kernels.cuda.operands import (
    LAYOUTS,
    PARTS,
    REALS,
    Leading,
    Memory,
    check,
    constants,
    known_layout,
    leading,
    numbers,
    on_gpu,
    spectrum_shape,
)

__all__ = [
    "LAYOUTS",
    "MOST_CLUSTER",
    "SIZES",
    "Config",
    "bind",
    "checked_size",
    "default_config",
    "irfft2",
    "program_of",
    "rfft2",
    "spectrum_shape",
]

SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
MOST_CLUSTER = 8
"""Most blocks of a cluster that every device with clusters takes."""
LARGEST_IN_PARTS = 64
"""Largest sizes in fp16 parts: of larger planes a cluster holds so few that parts fill no 32-byte sector."""
LARGEST_IN_REGISTERS = 64
"""Points of a transform that one thread holds: 128 registers, of 255."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a transform is spread over a GPU.

    ``planes`` of one thread block, or of a ``cluster`` of so many blocks, which needs compute capability 9.0 and a
    layout other than plain; ``split``, threads that share one transform (1 or 2; None: 2 above 64 points);
    ``resident`` blocks that a multiprocessor is to hold, which bounds registers (0: no bound); ``vector``: access two
    columns at a time where strides and alignment allow it; ``stream``: tell the cache not to keep results.
    """

    planes: int
    split: int | None = None
    resident: int = 0
    vector: bool = True
    stream: bool = True
    cluster: int = 1


FORWARD = {
    8: Config(64, resident=5), 16: Config(32, resident=4), 24: Config(32), 32: Config(16, resident=2),
    48: Config(8, 2, resident=2), 64: Config(8), 96: Config(4, stream=False), 128: Config(4, cluster=2, stream=False),
}  # fmt: skip
"""Into frequency-major and packed spectra. Memory is accessed in pieces of 8 bytes times ``planes``: sectors have 32
bytes, lines 128."""
INVERSE = {
    8: Config(32, resident=10), 16: Config(32, resident=4), 24: Config(32, resident=2), 32: Config(16, resident=2),
    48: Config(8), 64: Config(8), 96: Config(4), 128: Config(4, cluster=2),
}  # fmt: skip
PLAIN_INVERSE = {
    8: Config(32), 16: Config(16), 24: Config(8), 32: Config(8), 48: Config(4), 64: Config(4), 96: Config(1),
    128: Config(1, resident=3),
}  # fmt: skip
"""At 128 points three blocks fit into shared memory, and into registers if a few numbers are spilled."""
CLIPPED = PLAIN_INVERSE | {128: Config(1)}
"""From plain spectra to a part of each plane, where spilling costs more than a third block gains."""
PLAIN_FORWARD = PLAIN_INVERSE | {24: Config(8, resident=9), 48: Config(4, 2, resident=4)}
LEAST_PLANES = 4
IN_PARTS = {
    8: Config(64, stream=False), 16: Config(32, stream=False), 24: Config(32, resident=2, stream=False),
    32: Config(16, stream=False), 48: Config(16, 2, stream=False, cluster=2),
    64: Config(16, stream=False, cluster=4), 96: Config(8, stream=False, cluster=4),
    128: Config(8, stream=False, cluster=4),
}  # fmt: skip
"""Into fp16 parts: pieces have 2 bytes times ``planes``. They fill sectors, but lines have to wait for other blocks."""
LEAST_IN_PARTS = 8
BLOCKS = 264
"""Fewer blocks leave multiprocessors without work."""


def default_config(
    s: Sequence[int], layout: str = "plain", inverse: bool = False, count: int = 2**31, clusters: bool = True,
    spectra: str = "interleaved", padded: bool = False,
) -> Config:  # fmt: skip
    """The config for ``count`` planes where none is given.

    ``clusters`` says whether the device has them, ``padded`` whether planes are smaller than the transform.
    """
    n = max(s)
    if layout == "plain":
        return ((CLIPPED if padded else PLAIN_INVERSE) if inverse else PLAIN_FORWARD)[n]
    table, least = (INVERSE if inverse else FORWARD), LEAST_PLANES
    if PARTS[spectra] > 1:
        table, least = IN_PARTS, LEAST_IN_PARTS
    chosen = table[n]
    if chosen.cluster > 1 and not clusters:
        return Config(2)
    planes = chosen.planes
    while planes > least and count < planes * BLOCKS:
        planes //= 2
    return chosen if planes == chosen.planes else replace(chosen, planes=planes, resident=0)


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a kernel is compiled for."""

    n1: int
    n2: int
    inverse: bool
    layout: str
    dtype: torch.dtype
    config: Config
    padded: bool
    vector: bool
    aligned: bool
    image_planes_first: bool
    peaks: bool = False
    dense: bool = False
    parts: int = 1
    summed: int = 0
    """Products that are summed for each number of an inverse transform's spectrum; 0 where it lies in memory."""
    conjugated: bool = False
    wide: tuple[bool, bool] = (False, False)
    """For either factor, whether its numbers are read two at a time."""
    together: bool = False
    """Whether the second factor's numbers are neighbours in memory."""

    def split(self, n: int) -> int:
        """Threads that share a transform of n points."""
        return self.config.split or (1 if n <= LARGEST_IN_REGISTERS else 2)

    @property
    def spectrum_planes_first(self) -> bool:
        """Whether neighbouring threads take neighbouring planes of the spectrum."""
        return self.layout != "plain"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        c = self.config
        count = c.planes * max(self.n2 // 2 * self.split(self.n1), self.n1 // 2 * self.split(self.n2)) // c.cluster
        # Threads that share a row exchange numbers, for which a whole warp has to be there.
        return -(-count // 32) * 32 if self.inverse and self.split(self.n2) == 2 else count

    @property
    def held(self) -> tuple[int, int]:
        """Pairs of rows and pairs of columns of each plane that a block keeps in shared memory."""
        rows, columns = self.n1 // 2, self.n2 // 2
        return (rows, columns // self.config.cluster) if self.inverse else (rows // self.config.cluster, columns)

    @property
    def plane_pad(self) -> int:
        """Extra 16-byte units between planes in shared memory, so that neighbouring planes use different banks."""
        if not (self.spectrum_planes_first or self.image_planes_first):
            return 0
        wanted = {1: 0, 2: 4, 4: 2}.get(self.config.planes, 1)
        rows, columns = self.held
        return (wanted - rows * (columns + 1)) % 8

    @property
    def flat(self) -> bool:
        """Whether spectra are stored as one piece by all threads of a block, or of each warp.

        Where each plane has whole warps, these store pieces as long by themselves, with fewer registers.
        """
        whole = self.threads // self.config.planes % 32 == 0
        return self.dense and self.aligned and not self.plane_pad and self.threads % 32 == 0 and not whole

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        rows, columns = self.held
        return 16 * self.config.planes * (rows * (columns + 1) + self.plane_pad)

    def problems(self) -> list[str]:
        """Why the config cannot run; empty when it can."""
        reasons = block_limits(str(self.config), self.threads, self.shared)
        if any(n // self.split(n) > LARGEST_IN_REGISTERS for n in (self.n1, self.n2)):
            reasons.append(f"{self.config}: more than {LARGEST_IN_REGISTERS} points do not fit a thread's registers")
        if self.config.cluster > 1 and not self.spectrum_planes_first:
            reasons.append(f"{self.config}: clusters take frequency_major and packed spectra, not {self.layout}")
        if not 1 <= self.config.cluster <= MOST_CLUSTER:
            reasons.append(f"{self.config}: a cluster has 1 to {MOST_CLUSTER} blocks, not {self.config.cluster}")
        elif self.n1 // 2 % self.config.cluster or self.n2 // 2 % self.config.cluster:
            reasons.append(f"{self.config}: {self.config.cluster} blocks do not share {self.n1} x {self.n2} evenly")
        return reasons

    @property
    def name(self) -> str:
        """The name of the kernel's function in CUDA C++."""
        return "irfft2" if self.inverse else "rfft2"

    def source(self) -> str:
        """The CUDA C++; :func:`compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


@functools.lru_cache(maxsize=256)
def _source(p: Program) -> str:
    """The CUDA C++ of a program."""
    sign = 1 if p.inverse else -1
    split1, split2 = p.split(p.n1), p.split(p.n2)
    codelets, macros = {}, []
    for axis, n, split in ((1, p.n1, split1), (2, p.n2, split2)):
        m = n // split
        used = [fft(m, sign), *([rotation(m, n, sign)] if split > 1 else [])]
        codelets.update({c.name: c for c in used})
        macros.append(f"#define transform{axis} {used[0].name}")
        macros.append(f"#define rotate{axis} {used[1].name}" if split > 1 else f"#define rotate{axis}(r)")
    bounds = f"{p.threads}, {p.config.resident}" if p.config.resident else f"{p.threads}"
    attributes = f"__launch_bounds__({bounds})"
    if p.config.cluster > 1:
        attributes += f" __cluster_dims__({p.config.cluster}, 1, 1)"
    values = {
        "N1": p.n1, "N2": p.n2, "SPLIT1": split1, "SPLIT2": split2,
        "PLANES": p.config.planes, "THREADS": p.threads, "PLANE_PAD": p.plane_pad, "CLUSTER": p.config.cluster,
        "HELD_ROWS": p.held[0], "HELD_COLUMNS": p.held[1],
        "PLAIN": 0, "FREQUENCY_MAJOR": 1, "PACKED": 2, "LAYOUT": LAYOUTS.index(p.layout),
        "PADDED": p.padded, "VECTOR": p.vector, "ALIGNED": p.aligned, "FLAT": p.flat,
        "IMAGE_PLANES_FIRST": p.image_planes_first, "SPECTRUM_PLANES_FIRST": p.spectrum_planes_first,
        "REAL": REALS[p.dtype], "STREAM_STORES": p.config.stream, "PEAKS": p.peaks,
        "PARTS": p.parts,
    }  # fmt: skip
    if p.summed:
        values |= {"CONJUGATED": p.conjugated, "TOGETHER": p.together, "WIDE_A": p.wide[0], "WIDE_B": p.wide[1]}
    head = [constants(values), f"#define BOUNDS {attributes}", *macros, f"#define SUMMED {p.summed}"]
    texts = (*head, read_source("memory.cu"), *(c.cpp() for c in codelets.values()), read_source("fft2d.cu"))
    return "\n".join((*texts, read_source(f"{p.name}.cu")))


@functools.lru_cache(maxsize=1024)
def bind(
    image: Memory,
    spectrum: Memory,
    s: tuple[int, ...],
    offset: tuple[int, ...],
    layout: str,
    inverse: bool,
    config: Config | None,
    scale: float = 1.0,
    peaks: bool = False,
    spectra: str = "interleaved",
    spread: int = 0,
) -> Bound:
    """A transform between planes ``(..., h, w)``, placed at ``offset`` inside n1 x n2, and their spectra.

    With ``peaks`` a forward transform takes a third address, of an int32 for each block. There each block writes the
    bits of a finite fp32 number that no finite part of its spectra exceeds in magnitude.

    ``spectra`` other than interleaved are in fp16 parts (see ``PARTS``) and can only be written. They take as the third
    address that of the bits of the largest finite magnitude of all real data; planes have at most 2^``spread`` numbers.
    Both give the power of two by which they are multiplied; ``split_gemm.py`` says what is lost.

    Raises ``ValueError`` naming the values where shapes do not fit, sizes have no kernel or planes leave the basis.
    """
    checked_size(s)
    check(image, spectrum, s, offset, layout, spectra)
    h, w = image.shape[-2:]
    lead = image.shape[:-2]
    parts = PARTS[spectra]
    if parts > 1 and (inverse or h * w > 2**spread):
        raise ValueError(
            f"spread={spread}, inverse={inverse}: spectra={spectra!r} are written only, of at most 2^spread numbers"
        )
    before = spectrum.strides[:-2] if layout == "plain" else spectrum.strides[1 if parts == 1 else 2 :]
    planes = leading(lead, image.strides[:-2], before)
    program = program_of(image, spectrum, planes, s, offset, layout, inverse, config, peaks and not inverse, spectra)
    problems = program.problems()
    if problems:
        raise ValueError("; ".join(problems))
    row, column = (n if size > 1 else 0 for n, size in zip(image.strides[-2:], (h, w), strict=True))
    (x_outer, y_outer), (x_inner, y_inner) = planes.outer, planes.inner
    lines = (x_outer, x_inner, row, column, h, w, *offset)
    lying = (y_outer, y_inner, 1 if layout == "plain" else spectrum.strides[0])
    part = 0 if parts == 1 else spectrum.strides[1]
    sides = (*lying, *lines, float(scale)) if inverse else (*lines, *lying, part, spread)
    count = planes.count
    c = program.config
    grid = -(-count // c.planes) * c.cluster
    return Bound(program, grid, (count, planes.inner_count, *sides), 2 if inverse else 3, c.cluster)


def program_of(
    image: Memory,
    spectrum: Memory,
    planes: Leading,
    s: tuple[int, ...],
    offset: tuple[int, ...],
    layout: str,
    inverse: bool,
    config: Config | None,
    peaks: bool,
    spectra: str,
) -> Program:
    """The program of a transform as in :func:`bind`; strides in ``planes`` are (image's, spectrum's)."""
    n1, n2 = s
    h, w = image.shape[-2:]
    padded = (h, w) != (n1, n2)
    config = config or default_config(s, layout, inverse, planes.count, has_clusters(), spectra, padded)
    column = image.strides[-1]
    even = [planes.outer[0], planes.inner[0], image.strides[-2] if h > 1 else 0, w, offset[1]]
    vector = column == 1 and not any(n % 2 for n in even) and image.alignment % (2 * image.dtype.itemsize) == 0
    aligned = spectrum.alignment % 16 == 0 and planes.outer[1] % 2 == 0 and planes.inner[1] % 2 == 0
    contiguous = planes.count == planes.inner_count
    return Program(
        n1, n2, inverse, layout, image.dtype, config, padded, vector and config.vector,
        aligned and layout == "plain", w > 1 and 0 < planes.inner[0] < abs(column), peaks,
        dense=contiguous and planes.inner[1] == n1 * (n2 // 2 + 1), parts=PARTS[spectra],
    )  # fmt: skip


def checked_size(s: Sequence[int]) -> tuple[int, int]:
    """``s``, if planes of that size can be transformed. Raises ``ValueError``."""
    n1, n2 = s
    if n1 not in SIZES or n2 not in SIZES:
        raise ValueError(f"s={tuple(s)}: sizes are {', '.join(map(str, SIZES))}")
    return n1, n2


def rfft2(
    x: torch.Tensor,
    s: Sequence[int] | None = None,
    *,
    offset: Sequence[int] = (0, 0),
    layout: str = "plain",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Spectra (complex64) of real planes ``x`` (..., h, w), each with zeros around it in a plane of ``s`` = (n1, n2).

    The upper left corner is put at ``offset``; s defaults to (h, w). ``x`` is fp32, fp16 or bf16 on a GPU, with any
    strides; its leading dimensions must be two at most, or join into two. For layouts see the module. Unscaled, like
    ``torch.fft.rfft2``. Raises ``ValueError`` or ``TypeError`` naming what does not fit, ``RuntimeError`` where
    cuda.core is absent.
    """
    if x.dim() < 2:
        raise ValueError(f"x has {x.dim()} dimensions: planes need two")
    size = checked_size(numbers("s", x.shape[-2:] if s is None else s, 2))
    if out is None:
        out = x.new_empty(spectrum_shape(x.shape[:-2], size, layout), dtype=torch.complex64)
    place = numbers("offset", offset, 2)
    run = _launch(on_gpu("x", x, "out", out), Memory.of(x), Memory.of(out), size, place, layout, False, config, 1.0)
    run(x.data_ptr(), out.data_ptr())
    return out


def irfft2(
    y: torch.Tensor,
    s: Sequence[int],
    *,
    size: Sequence[int] | None = None,
    offset: Sequence[int] = (0, 0),
    layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Real planes (..., h, w) of spectra ``y`` (complex64): the window of ``size`` = (h, w) at ``offset``.

    ``s`` = (n1, n2) is the size of the transform, ``size`` defaults to it. Scaled by ``scale``, which defaults to
    1 / (n1 n2), like ``torch.fft.irfft2``. Of columns 0 and n2 / 2 of a plain or frequency-major spectrum only the
    Hermitian part counts. Raises as :func:`rfft2`.
    """
    n1, n2 = checked_size(numbers("s", s, 2))
    window = (n1, n2) if size is None else numbers("size", size, 2)
    lead = y.shape[:-2] if known_layout(layout) == "plain" else y.shape[1:]
    if out is None:
        out = y.new_empty((*lead, *window), dtype=dtype)
    place = numbers("offset", offset, 2)
    factor = 1.0 / (n1 * n2) if scale is None else scale
    device = on_gpu("y", y, "out", out)
    run = _launch(device, Memory.of(out), Memory.of(y), (n1, n2), place, layout, True, config, factor)
    run(y.data_ptr(), out.data_ptr())
    return out


@functools.lru_cache(maxsize=1024)
def _launch(device: int, *arguments: Any) -> Launch:
    """The compiled launch, kept for further calls."""
    return bind(*arguments).launch(device)
