"""Batched 1-D Fourier transforms of short real signals in one pass over memory (Vasilache et al. 2014, section 5).

Layouts of the spectra of n real elements:

``plain``
    ``(..., n / 2 + 1)``, as ``torch.fft.rfft`` gives it.
``frequency_major``
    ``(n / 2 + 1, ...)``: the frequency first and signals innermost, so that every frequency is a matrix.
``packed``
    ``(n / 2, ...)``: the same, but ``Y[n/2]``, real like ``Y[0]``, is that one's imaginary part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels.codelets import fft, literal, root
from tilewise.kernels.cuda.launch import Bound, Launch, block_limits, read_source
from tilewise.kernels.cuda.operands import (
    LAYOUTS,
    REALS,
    Memory,
    check,
    constants,
    known_layout,
    leading,
    on_gpu,
    spectrum_shape,
)

__all__ = ["SIZES", "Config", "Program", "bind", "default_config", "irfft", "rfft"]

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WARP = 32
BANKS = 16
"""Banks of shared memory, counted in complex numbers."""
LARGEST_IN_REGISTERS = 64
"""Most points of a transform that one thread holds."""


@dataclass(frozen=True, slots=True)
class Config:
    """How transforms are spread over a GPU.

    ``threads`` that share one signal: a power of two up to 16 that divides n / 2; ``signals`` of a thread block, a
    multiple of 32 / threads; ``resident`` blocks that a multiprocessor is to hold, which bounds registers (0: no
    bound); ``vector``: access two elements at a time where strides and alignment allow it; ``stream``: tell the cache
    not to keep results; ``staged``: store plain spectra through shared memory, in one piece.
    """

    threads: int
    signals: int
    resident: int = 0
    vector: bool = True
    stream: bool = True
    staged: bool = True


THREADS = {8: 2, 16: 2, 24: 4, 32: 4}
"""Threads that share a signal, by its length; 8 from 48 elements on."""
FEW_THREADS = {8: 1, 16: 1, 24: 1, 32: 4, 192: 16, 256: 16}
"""The same for few signals forward, where the latency of a single signal matters and not their number."""
FEW = 2048
"""Most signals that are few."""
MULTIPROCESSORS = 132


def default_config(n: int, count: int = 2**31, inverse: bool = False) -> Config:
    """The config for ``count`` signals of ``n`` elements where none is given."""
    few = count <= FEW and not inverse
    threads = (FEW_THREADS if few else THREADS).get(n, 8)
    if not inverse and not few and (n == 48 or (n == 64 and count <= 2**18)):
        threads = 4
    elif not inverse and (n == 8 or (n == 16 and count <= 2**13)):
        threads = 1
    warps = 4
    # Few signals are spread over as many multiprocessors as there are warps.
    while warps > 1 and count * threads < MULTIPROCESSORS * WARP * warps:
        warps //= 2
    return Config(threads, warps * WARP // threads, staged=not few)


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a kernel is compiled for."""

    n: int
    inverse: bool
    layout: str
    dtype: torch.dtype
    config: Config
    padded: bool
    vector: bool
    flat: bool
    signals_first: bool
    single: bool
    peaks: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.config.threads * self.config.signals

    @property
    def pitch(self) -> int:
        """Complex numbers from one signal to the next in shared memory (see ``fft1d.cu``)."""
        t, m = self.config.threads, self.n // 2
        least = max(t * (m // t | 1), m + 1)
        return least + (t - least) % BANKS

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return 8 * self.config.signals * self.pitch

    @property
    def name(self) -> str:
        """The name of the kernel's function in CUDA C++."""
        return "irfft" if self.inverse else "rfft"

    def problems(self) -> list[str]:
        """Why the config cannot run; empty when it can."""
        t, signals, reasons = self.config.threads, self.config.signals, []
        if t not in (1, 2, 4, 8, 16) or (self.n // 2) % t or self.n // 2 // t < 2:
            return [f"{self.config}: threads={t} do not share {self.n // 2} points"]
        if self.n // 2 // t > LARGEST_IN_REGISTERS:
            reasons.append(f"{self.config}: more than {LARGEST_IN_REGISTERS} points do not fit a thread's registers")
        if signals < 1 or signals % (WARP // t):
            reasons.append(f"{self.config}: signals={signals} are no multiple of {WARP // t}")
        return reasons + block_limits(str(self.config), self.threads, self.shared)

    def source(self) -> str:
        """The CUDA C++; :func:`compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


@functools.lru_cache(maxsize=256)
def _source(p: Program) -> str:
    """The CUDA C++ of a program."""
    sign, m, t = 1 if p.inverse else -1, p.n // 2, p.config.threads
    r = m // t
    codelets = {size: fft(size, sign) for size in (r, t) if size > 1}
    bounds = f"{p.threads}, {p.config.resident}" if p.config.resident else f"{p.threads}"
    values = {
        "N": p.n, "T": t, "SIGNALS": p.config.signals, "THREADS": p.threads,
        "PLAIN": 0, "FREQUENCY_MAJOR": 1, "PACKED": 2, "LAYOUT": LAYOUTS.index(p.layout),
        "PADDED": p.padded, "VECTOR": p.vector, "FLAT": p.flat, "SIGNALS_FIRST": p.signals_first,
        "STAGED": p.config.staged and p.layout == "plain", "SINGLE": p.single,
        "REAL": REALS[p.dtype], "STREAM_STORES": p.config.stream,
    }  # fmt: skip
    head = [
        constants(values),
        f"#define PEAKS {int(p.peaks)}",
        f"#define BOUNDS __launch_bounds__({bounds})",
        f"#define transform_r {codelets[r].name}",
        f"#define transform_t {codelets[t].name}" if t > 1 else "#define transform_t(r)",
        read_source("memory.cu"),
        _table("TURNS", [root(row * k, m, sign) for k in range(r) for row in range(t)]),
        _table("ROOTS", [root(k, p.n, -1) for k in range(m // 2 + 1)]),
        _table("STEPS", [root(t * i + r * j, p.n, -1) for i in range(-(-r // t)) for j in range(t)], "constexpr"),
    ]
    texts = (*head, *(c.cpp() for c in codelets.values()), read_source("fft1d.cu"))
    return "\n".join((*texts, read_source(f"{p.name}.cu")))


def _table(name: str, values: Sequence[tuple[float, float]], kind: str = "const") -> str:
    """A C++ table of complex numbers."""
    numbers = ", ".join(f"{{{literal(c)}, {literal(s)}}}" for c, s in values)
    return f"__device__ {kind} float2 {name}[{len(values)}] = {{{numbers}}};"


@functools.lru_cache(maxsize=1024)
def bind(
    signal: Memory,
    spectrum: Memory,
    s: tuple[int, ...],
    offset: tuple[int, ...],
    layout: str,
    inverse: bool,
    config: Config | None,
    scale: float = 1.0,
    peaks: bool = False,
) -> Bound:
    """A transform between signals ``(..., length)``, placed at ``offset`` among n elements, and their spectra.

    With ``peaks`` a forward transform takes a third address, of an int32 for each block. There each block writes the
    bits of the largest finite magnitude of a real or imaginary part of its spectra.

    Raises ``ValueError`` naming the values where shapes do not fit, n has no kernel or the signals leave the basis.
    """
    n = _checked_size(s[0])
    check(signal, spectrum, s, offset, layout)
    lead, length = signal.shape[:-1], signal.shape[-1]
    batch = leading(lead, signal.strides[:-1], spectrum.strides[:-1] if layout == "plain" else spectrum.strides[1:])
    config = config or default_config(n, batch.count, inverse)
    step = signal.strides[-1] if length > 1 else 0
    (x_outer, y_outer), (x_inner, y_inner) = batch.outer, batch.inner
    padded, side = length != n, n // 2 + 1
    vector = step == 1 and not any(v % 2 for v in (x_outer, x_inner, length, offset[0]))
    vector = vector and signal.alignment % (2 * signal.dtype.itemsize) == 0
    flat = (batch.count == batch.inner_count and y_inner == side) or batch.count == 1
    program = Program(
        n, inverse, layout, signal.dtype, config, padded, vector and config.vector, flat and layout == "plain",
        length > 1 and 0 < x_inner < abs(step), batch.count == batch.inner_count, peaks and not inverse,
    )  # fmt: skip
    problems = program.problems()
    if problems:
        raise ValueError("; ".join(problems))
    elements = (x_outer, x_inner, step, length, *offset)
    spectra = (y_outer, y_inner, 1 if layout == "plain" else spectrum.strides[0])
    sides = (*spectra, *elements, float(scale)) if inverse else (*elements, *spectra)
    grid = -(-batch.count // config.signals)
    return Bound(program, grid, (batch.count, batch.inner_count, *sides), 3 if program.peaks else 2)


def _checked_size(n: int) -> int:
    """``n``, if there is a kernel for it. Raises ``ValueError``."""
    if n not in SIZES:
        raise ValueError(f"n={n}: sizes are {', '.join(map(str, SIZES))}")
    return n


def rfft(
    x: torch.Tensor,
    n: int | None = None,
    *,
    offset: int = 0,
    layout: str = "plain",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Spectra (complex64) of real signals ``x`` (..., length), each with zeros around it among ``n`` elements.

    The first element is put at ``offset``; n defaults to the length. ``x`` is fp32, fp16 or bf16 on a GPU, with any
    strides; its leading dimensions must be two at most, or join into two. For layouts see the module. Unscaled, like
    ``torch.fft.rfft``. Raises ``ValueError`` or ``TypeError`` naming what does not fit, ``RuntimeError`` where
    cuda.core is absent.
    """
    if x.dim() < 1:
        raise ValueError("x has no dimensions: signals need one")
    size = _checked_size(x.shape[-1] if n is None else n)
    if out is None:
        out = x.new_empty(spectrum_shape(x.shape[:-1], (size,), layout), dtype=torch.complex64)
    device = on_gpu("x", x, "out", out)
    run = _launch(device, Memory.of(x), Memory.of(out), (size,), (offset,), layout, False, config, 1.0)
    run(x.data_ptr(), out.data_ptr())
    return out


def irfft(
    y: torch.Tensor,
    n: int,
    *,
    size: int | None = None,
    offset: int = 0,
    layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Real signals (..., size) of spectra ``y`` (complex64): ``size`` elements from ``offset`` on.

    ``n`` is the size of the transform, ``size`` defaults to it. Scaled by ``scale``, which defaults to 1 / n, like
    ``torch.fft.irfft``; like there the imaginary parts of ``Y[0]`` and ``Y[n/2]`` do not count. Raises as :func:`rfft`.
    """
    lead = y.shape[:-1] if known_layout(layout) == "plain" else y.shape[1:]
    if out is None:
        out = y.new_empty((*lead, _checked_size(n) if size is None else size), dtype=dtype)
    device, factor = on_gpu("y", y, "out", out), 1.0 / n if scale is None else scale
    run = _launch(device, Memory.of(out), Memory.of(y), (n,), (offset,), layout, True, config, factor)
    run(y.data_ptr(), out.data_ptr())
    return out


@functools.lru_cache(maxsize=1024)
def _launch(device: int, *arguments: Any) -> Launch:
    """The compiled launch, kept for further calls."""
    return bind(*arguments).launch(device)
