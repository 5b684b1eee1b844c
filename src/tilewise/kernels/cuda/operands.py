"""What a kernel is compiled for of its tensors: shapes, strides and alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "LAYOUTS",
    "PARTS",
    "REALS",
    "Leading",
    "Memory",
    "check",
    "constants",
    "joined",
    "known_layout",
    "leading",
    "numbers",
    "on_gpu",
    "spectrum_shape",
]

REALS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of the dtypes of real data in ``memory.cu``."""
LAYOUTS = ("plain", "frequency_major", "packed")
"""Layouts of spectra, in the order of their numbers in the kernels."""
PARTS = {"interleaved": 1, "half": 2, "split": 4}
"""How numbers of a spectrum are held: as complex64, or as 2 fp16 parts (real and imaginary) or 4 (high and low of
each).

Parts are a dimension after the first one of a frequency-major spectrum.
"""
ALIGNMENT = 16
"""Bytes of the widest access; larger alignments do not matter."""
MOST_PLANES = 2**31 - 1
MOST_STRIDE = 2**31 - 1
"""Most elements between neighbours inside a plane or signal. There is no bound between planes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor's shape, strides in elements and dtype, and the bytes (at most 16) to which its address is aligned."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = ALIGNMENT

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """The memory of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, math.gcd(tensor.data_ptr(), ALIGNMENT))


@dataclass(frozen=True, slots=True)
class Leading:
    """Two dimensions that count planes: ``outer`` and ``inner`` hold the stride of each in every tensor."""

    count: int
    inner_count: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]


def joined(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions with their strides in several tensors, merged where that is possible in all of them.

    Each item is a size and the strides of that dimension. Dimensions of size 1 are left out.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, tuple(steps))
        else:
            merged.append((size, tuple(steps)))
    return merged


def leading(shape: Sequence[int], *strides: Sequence[int]) -> Leading:
    """The leading dimensions of tensors as at most two, merged where that is possible in all of them.

    Raises ``ValueError`` where more than two remain, or for more planes than a kernel counts.
    """
    count = math.prod(shape)
    if count > MOST_PLANES:
        raise ValueError(f"{count} planes in {tuple(shape)}: at most {MOST_PLANES}")
    merged = joined(shape, *strides)
    if len(merged) > 2:
        raise ValueError(f"leading dimensions {tuple(shape)} with strides {strides} do not join into two")
    none = (0,) * len(strides)
    outer, inner = [(1, none)] * (2 - len(merged)) + merged
    return Leading(count, inner[0], outer[1], inner[1])


def constants(values: Mapping[str, int]) -> str:
    """C++ definitions of integer constants."""
    return "\n".join(f"constexpr int {name} = {int(value)};" for name, value in values.items())


def known_layout(layout: str) -> str:
    """``layout``, if there is one of that name. Raises ``ValueError``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    return layout


def numbers(name: str, value: Sequence[int], count: int) -> tuple[int, ...]:
    """``value`` as ``count`` ints. Raises ``ValueError`` naming the argument."""
    if len(value) != count:
        raise ValueError(f"{name}={tuple(value)}: must be {count} number{'s' if count > 1 else ''}")
    return tuple(int(n) for n in value)


def known_spectra(spectra: str) -> str:
    """``spectra``, if numbers can be held that way. Raises ``ValueError``."""
    if spectra not in PARTS:
        raise ValueError(f"spectra={spectra!r}: must be one of {', '.join(PARTS)}")
    return spectra


def check(
    real: Memory, spectrum: Memory, s: Sequence[int], offset: Sequence[int], layout: str, spectra: str = "interleaved"
) -> None:
    """Check that real data fit spectra of transforms of size ``s``.

    Raises ``ValueError`` or ``TypeError`` naming what does not fit.
    """
    known_layout(layout)
    dims = len(s)
    size = real.shape[-dims:]
    for axis, (n, place, basis) in enumerate(zip(size, offset, s, strict=True)):
        if place < 0 or place + n > basis:
            name = ("length",) if dims == 1 else ("height", "width")
            raise ValueError(f"{name[axis]} {n} at offset {place} does not fit a basis of {basis}")
    wanted = spectrum_shape(real.shape[:-dims], s, layout, spectra)
    if spectrum.shape != wanted:
        raise ValueError(f"the spectrum has shape {spectrum.shape}, {layout} spectra of {real.shape} have {wanted}")
    if real.dtype not in REALS:
        raise TypeError(f"real data are {real.dtype}: must be float32, float16 or bfloat16")
    number = torch.complex64 if PARTS[spectra] == 1 else torch.float16
    if spectrum.dtype != number:
        raise TypeError(f"the spectrum is {spectrum.dtype}: must be {str(number).removeprefix('torch.')}")
    inside = dense(wanted[-dims:])
    if layout == "plain" and spectrum.strides[-dims:] != inside:
        raise ValueError(f"a plain spectrum's last strides are {spectrum.strides[-dims:]}: must be {inside}")
    for stride in (*real.strides[-dims:], *([] if layout == "plain" else spectrum.strides[:1])):
        if abs(stride) > MOST_STRIDE:
            raise ValueError(
                f"a stride of {stride} elements inside a signal or between frequencies is over {MOST_STRIDE}"
            )


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def spectrum_shape(
    lead: Sequence[int], s: Sequence[int], layout: str = "plain", spectra: str = "interleaved"
) -> tuple[int, ...]:
    """Shape of the spectra of signals or planes of size ``s``, with leading dimensions ``lead``."""
    half = (*s[:-1], s[-1] // 2 + 1)
    known_layout(layout)
    if PARTS[known_spectra(spectra)] > 1 and layout != "frequency_major":
        raise ValueError(f"layout={layout!r}: spectra in fp16 parts are frequency_major")
    if layout == "plain":
        return (*lead, *half)
    parts = () if PARTS[spectra] == 1 else (PARTS[spectra],)
    return (math.prod(s) // 2 if layout == "packed" else math.prod(half), *parts, *lead)


def on_gpu(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> int:
    """The index of the GPU that both tensors are on. Raises ``ValueError`` where there is none."""
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}: these kernels run on NVIDIA GPUs")
    if other.device != tensor.device:
        raise ValueError(f"{other_name} is on {other.device}, {name} on {tensor.device}")
    return tensor.get_device()
