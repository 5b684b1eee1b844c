"""What a kernel is bound to of its tensors: shapes, strides and alignment."""

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
"""Numbers by which ``memory.cu`` knows the types of real data."""
LAYOUTS = ("plain", "frequency_major", "packed")
"""Of spectra, in the order of the kernels' numbers for them."""
PARTS = {"interleaved": 1, "half": 2, "split": 4}
"""How numbers of a spectrum are held: complex64, or so many fp16 parts: real and imaginary, or high and low of each.

Parts are a dimension after the first of a frequency-major spectrum.
"""
ALIGNMENT = 16
"""Bytes; more than the widest access is not asked about."""
MOST_PLANES = 2**31 - 1
MOST_STRIDE = 2**31 - 1
"""Elements between neighbours inside a plane or a signal; between planes there is no bound."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Shape, strides in elements, dtype, and the bytes (at most 16) to which the address is aligned."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = ALIGNMENT

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, math.gcd(tensor.data_ptr(), ALIGNMENT))


@dataclass(frozen=True, slots=True)
class Leading:
    """Two dimensions that count planes: ``outer`` and ``inner`` hold their stride in each tensor."""

    count: int
    inner_count: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]


def joined(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions of tensors with their strides, those that lie one inside the other in each of them as one.

    Those of size 1 are left out.
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if found and all(before == size * step for before, step in zip(found[-1][1], steps, strict=True)):
            found[-1] = (found[-1][0] * size, tuple(steps))
        else:
            found.append((size, tuple(steps)))
    return found


def leading(shape: Sequence[int], *strides: Sequence[int]) -> Leading:
    """The leading dimensions of tensors as at most two; those that lie one inside the other in each of them join.

    ``ValueError`` where more than two remain, or for more planes than a kernel counts.
    """
    count = math.prod(shape)
    if count > MOST_PLANES:
        raise ValueError(f"{count} planes in {tuple(shape)}: at most {MOST_PLANES}")
    found = joined(shape, *strides)
    if len(found) > 2:
        raise ValueError(f"leading dimensions {tuple(shape)} with strides {strides} do not join into two")
    none = (0,) * len(strides)
    outer, inner = [(1, none)] * (2 - len(found)) + found
    return Leading(count, inner[0], outer[1], inner[1])


def constants(values: Mapping[str, int]) -> str:
    """C++ definitions of ``values``."""
    return "\n".join(f"constexpr int {name} = {int(value)};" for name, value in values.items())


def known_layout(layout: str) -> str:
    """``layout`` if there is one of that name, else ``ValueError``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    return layout


def numbers(name: str, value: Sequence[int], count: int) -> tuple[int, ...]:
    """``value`` as so many ints, else ``ValueError``."""
    if len(value) != count:
        raise ValueError(f"{name}={tuple(value)}: must be {count} number{'s' if count > 1 else ''}")
    return tuple(int(n) for n in value)


def known_spectra(spectra: str) -> str:
    """``spectra`` if numbers can be held that way, else ``ValueError``."""
    if spectra not in PARTS:
        raise ValueError(f"spectra={spectra!r}: must be one of {', '.join(PARTS)}")
    return spectra


def check(
    real: Memory, spectrum: Memory, s: Sequence[int], offset: Sequence[int], layout: str, spectra: str = "interleaved"
) -> None:
    """``ValueError`` or ``TypeError`` naming what does not fit between real data and spectra of shape ``s``."""
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
    """Strides of a tensor without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def spectrum_shape(
    lead: Sequence[int], s: Sequence[int], layout: str = "plain", spectra: str = "interleaved"
) -> tuple[int, ...]:
    """Shape of the spectra of signals or planes of shape ``s`` with leading dimensions ``lead``."""
    half = (*s[:-1], s[-1] // 2 + 1)
    known_layout(layout)
    if PARTS[known_spectra(spectra)] > 1 and layout != "frequency_major":
        raise ValueError(f"layout={layout!r}: spectra in fp16 parts are frequency_major")
    if layout == "plain":
        return (*lead, *half)
    parts = () if PARTS[spectra] == 1 else (PARTS[spectra],)
    return (math.prod(s) // 2 if layout == "packed" else math.prod(half), *parts, *lead)


def on_gpu(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> int:
    """The GPU that both tensors are on; ``ValueError`` where there is none."""
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}: these kernels run on NVIDIA GPUs")
    if other.device != tensor.device:
        raise ValueError(f"{other_name} is on {other.device}, {name} on {tensor.device}")
    return tensor.get_device()
