"""Depthwise convolutions of small planes, each pass in one kernel, by Fourier transforms (``depthwise2d.cu``).

Vasilache et al. 2014, section 5, with the product of spectra where the spectra are: in registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewise.kernels.codelets import fft, rotation
from tilewise.kernels.cuda.launch import block_limits, read_source
from tilewise.kernels.cuda.operands import REALS, constants

__all__ = ["FEW_ENOUGH", "SIZES", "WHOLE_ROW", "Adder", "Program", "Window", "spectrum_length"]

SIZES = (8, 12, 16, 24, 32, 36, 48, 64, 72, 96, 108, 128)
"""Rows or columns of a transform."""
WARP = 32
FEW_ENOUGH = 48
"""Most points of a row whose sums a thread keeps in registers while it transforms as many."""
WHOLE_ROW = 96
"""Most points of a transform that fit into 255 registers alone."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where a plane's elements lie in the basis.

    ``height`` x ``width`` of them, the first at (``top``, ``left``), ``down`` rows and ``along`` columns apart.
    ``vector`` says that they are accessed in pairs.
    """

    height: int
    width: int
    top: int
    left: int
    vector: bool
    down: int = 1
    along: int = 1

    @property
    def pairs(self) -> int:
        """The number of pairs of columns, of which the last may have one column."""
        return -(-self.width // 2)

    def cpp(self) -> str:
        """The C++ type of the window."""
        apart = f", {self.down}, {self.along}" if (self.down, self.along) != (1, 1) else ""
        return f"Window<{self.height}, {self.width}, {self.top}, {self.left}, {str(self.vector).lower()}{apart}>"


@dataclass(frozen=True, slots=True)
class Program:
    """One of the kernels ``depthwise2d_filter``, ``..._image``, ``..._gradient`` and ``..._summed``.

    ``windows`` of the operands and the result, in that order (the filter's kernel has one, that of images and of sums
    two: the other operand's spectra are those of the filter's kernel); ``results`` sums are made of each plane;
    ``split`` threads share each transform; ``resident`` blocks a multiprocessor is to hold (0: no bound); ``correlate``
    multiplies with the conjugate of the filter's spectrum; ``wide`` results are fp32 whatever the operands.
    """

    name: str
    n1: int
    n2: int
    windows: tuple[Window, ...]
    dtype: torch.dtype
    planes: int
    split1: int
    split2: int
    resident: int = 0
    correlate: bool = False
    wide: bool = False
    results: int = 1

    @property
    def row_threads(self) -> int:
        """Threads for the rows of one plane."""
        return self.n1 // 2 * self.split2

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        columns = max(w.pairs for w in self.windows) * self.split1
        return -(-self.planes * max(self.row_threads, columns) // WARP) * WARP

    @property
    def pitch(self) -> int:
        """Complex numbers from one row to the next in shared memory."""
        return 2 * max(w.pairs for w in self.windows) | 1

    @property
    def keep(self) -> bool:
        """Whether sums of products are kept in shared memory."""
        return self.n2 // self.split2 * (1 + self.results) > 2 * FEW_ENOUGH

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        plane = self.n1 // 2 * self.pitch
        if self.name == "depthwise2d_gradient":
            plane += (1 + self.keep) * self.n1 // 2 * self.n2
        elif self.name == "depthwise2d_summed":
            plane = 2 * plane + self.keep * self.results * self.n1 // 2 * self.n2
        return -(-8 * self.planes * plane // 16) * 16

    def problems(self) -> list[str]:
        """Reasons why it cannot run; empty where it can."""
        reasons = block_limits(f"planes={self.planes}", self.threads, self.shared)
        for n, split in ((self.n1, self.split1), (self.n2, self.split2)):
            if split not in (1, 2) or n // split > WHOLE_ROW:
                reasons.append(f"{split} threads do not share a transform of {n} points: at most {WHOLE_ROW} a thread")
        return reasons

    def source(self) -> str:
        """The CUDA C++; :func:`~tilewise.kernels.cuda.launch.compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


@dataclass(frozen=True, slots=True)
class Adder:
    """The kernel ``depthwise_sum``, which adds planes over shares."""

    dtype: torch.dtype
    wide: bool
    name: str = "depthwise_sum"
    threads: int = 256
    shared: int = 0

    def source(self) -> str:
        """The kernel as CUDA C++."""
        values = {"REAL": REALS[self.dtype], "STREAM_STORES": 1, "WIDE": self.wide, "THREADS": self.threads}
        head = [constants(values), f"#define BOUNDS __launch_bounds__({self.threads})", read_source("memory.cu")]
        return "\n".join((*head, read_source("depthwise_result.cu"), read_source("depthwise_sum.cu")))


def spectrum_length(n1: int, n2: int) -> int:
    """Complex numbers of a filter's spectrum."""
    return n1 // 2 * n2 + n2


@functools.lru_cache(maxsize=256)
def _source(p: Program) -> str:
    """The CUDA C++ of a program."""
    codelets, macros = {}, []
    for axis, n, split in ((1, p.n1, p.split1), (2, p.n2, p.split2)):
        for sign, prefix, turn in ((-1, "forward", "rotate"), (1, "inverse", "unrotate")):
            used = [fft(n // split, sign), *([rotation(n // split, n, sign)] if split > 1 else [])]
            codelets.update({c.name: c for c in used})
            macros.append(f"#define {prefix}{axis} {used[0].name}")
            macros.append(f"#define {turn}{axis} {used[1].name}" if split > 1 else f"#define {turn}{axis}(r)")
    bounds = f"{p.threads}, {p.resident}" if p.resident else f"{p.threads}"
    values = {
        "N1": p.n1, "N2": p.n2, "SPLIT1": p.split1, "SPLIT2": p.split2, "PLANES": p.planes, "THREADS": p.threads,
        "PITCH": p.pitch, "RESULTS": p.results, "CORRELATE": p.correlate, "WIDE": p.wide, "KEEP": p.keep,
        "REAL": REALS[p.dtype], "STREAM_STORES": p.name == "depthwise2d_image",
    }  # fmt: skip
    windows = [f"using {name} = {w.cpp()};" for name, w in zip(_window_names(p), p.windows, strict=True)]
    texts = [
        constants(values), f"#define BOUNDS __launch_bounds__({bounds})", *macros, read_source("memory.cu"),
        *(c.cpp() for c in codelets.values()), read_source("depthwise_result.cu"), read_source("depthwise2d.cu"),
        *windows, read_source(f"{p.name}.cu"),
    ]  # fmt: skip
    return "\n".join(texts)


def _window_names(p: Program) -> str:
    """Names of the windows in the C++ source."""
    return {
        "depthwise2d_filter": "A",
        "depthwise2d_image": "AC",
        "depthwise2d_gradient": "ABC",
        "depthwise2d_summed": "AC",
    }[p.name]
