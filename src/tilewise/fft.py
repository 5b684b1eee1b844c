"""Batched Fourier transforms of short real signals and small real planes (Vasilache et al. 2014, section 5).

They differ from ``torch.fft`` in what a convolution wants: data are placed in a larger transform and results cut out of
it without a copy, spectra come in layouts that are ready for products, and half precision is read and written as it is.
On NVIDIA GPUs each is one pass over memory where :func:`unsupported` has nothing to say; everywhere else they go
through ``torch.fft``, with the same results in the same layouts. Arithmetic is in fp32.

``plain`` spectra are those of ``torch.fft``; ``frequency_major`` ones have the frequency first, ``packed`` ones also
leave out what follows by symmetry. The manual writes all three out. Gradients are supported, also of gradients;
forward-mode differentiation and ``torch.func`` are not.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilewise.kernels.cuda import fft1d, fft2d, launch
from tilewise.kernels.cuda.operands import (
    LAYOUTS,
    MOST_STRIDE,
    REALS,
    Memory,
    dense,
    known_layout,
    leading,
    spectrum_shape,
)
from tilewise.kernels.spectra import from_plain, multiplicity, to_plain

__all__ = ["LAYOUTS", "SIZES", "irfft", "irfft2", "next_size", "rfft", "rfft2", "unsupported"]

SIZES = {1: fft1d.SIZES, 2: fft2d.SIZES}
"""Sizes with a kernel, by number of dimensions; along each of two dimensions any of them."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability: the kernels copy to shared memory asynchronously."""


def next_size(n: int, dims: int = 1) -> int:
    """The least size with a kernel that holds ``n`` elements; ``ValueError`` where none is that large."""
    for size in SIZES[dims]:
        if size >= n:
            return size
    raise ValueError(f"n={n}: the largest size with a kernel is {SIZES[dims][-1]}")


def unsupported(device: torch.device | str, *s: int) -> list[str]:
    """Reasons why transforms of size ``s`` (one number or two) go through ``torch.fft`` there; empty: they do not."""
    if len(s) not in SIZES:
        raise ValueError(f"s={s}: one number or two would do")
    return list(_unsupported(torch.device(device), s))


@functools.lru_cache(maxsize=1024)
def _unsupported(device: torch.device, s: tuple[int, ...]) -> tuple[str, ...]:
    known, reasons = SIZES[len(s)], []
    if any(n not in known for n in s):
        reasons.append(f"kernels have sizes {', '.join(map(str, known))}, not {'x'.join(map(str, s))}")
    if device.type != "cuda" or torch.version.hip:
        return (*reasons, f"kernels run on NVIDIA GPUs, not on {device.type}")
    if not torch.cuda.is_available():
        return (*reasons, "there is no NVIDIA GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        reasons.append(f"kernels need compute capability 8.0, {device} has {'.'.join(map(str, capability))}")
    if launch.unavailable():
        reasons.append(launch.unavailable())
    return tuple(reasons)


def rfft(x: torch.Tensor, n: int | None = None, *, offset: int = 0, layout: str = "plain") -> torch.Tensor:
    """Spectra (complex64) of real signals ``x`` (..., length), each put at ``offset`` among ``n`` zeros.

    ``x`` is fp32, fp16 or bf16, of any strides and any number of leading dimensions; ``n`` defaults to its length.
    Unscaled, as ``torch.fft.rfft``. The result has no gaps: (..., n // 2 + 1) in the ``plain`` layout,
    (n // 2 + 1, ...) ``frequency_major``, (n // 2, ...) ``packed``, which needs an even n. Raises ``TypeError`` for
    other dtypes, ``ValueError`` where a signal does not fit into ``n``: it is never cut or wrapped around.
    """
    _check_real(x, 1)
    s = (_whole("n", x.shape[-1] if n is None else n),)
    return _forward(x, s, (_whole("offset", offset),), layout)


def rfft2(
    x: torch.Tensor,
    s: Sequence[int] | None = None,
    *,
    offset: Sequence[int] = (0, 0),
    layout: str = "plain",
) -> torch.Tensor:
    """Spectra (complex64) of real planes ``x`` (..., h, w), each among zeros in a plane of ``s`` = (n1, n2).

    The upper left corner is put at ``offset``; ``s`` defaults to (h, w). The result is (..., n1, n2 // 2 + 1) in the
    ``plain`` layout, (n1 * (n2 // 2 + 1), ...) ``frequency_major``, (n1 * n2 // 2, ...) ``packed``, which needs even
    sizes. Otherwise as :func:`rfft`.
    """
    _check_real(x, 2)
    return _forward(x, _pair("s", x.shape[-2:] if s is None else s), _pair("offset", offset), layout)


def irfft(
    y: torch.Tensor,
    n: int | None = None,
    *,
    size: int | None = None,
    offset: int = 0,
    layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
) -> torch.Tensor:
    """Real signals (..., size) of spectra ``y`` (complex64): ``size`` elements of the inverse from ``offset`` on.

    ``n`` is the size of the transform, by default the even one that ``y`` would have; ``size`` defaults to it.
    ``dtype`` is fp32, fp16 or bf16. Scaled by ``scale``, by default 1 / n as ``torch.fft.irfft``; like there the
    imaginary parts of frequencies that are real do not count. Raises ``TypeError`` for other dtypes, ``ValueError``
    where ``y`` has not n's shape or the window runs out of n.
    """
    _check_spectrum(y, layout, 1)
    if n is None:
        n = 2 * (y.shape[-1] - 1) if layout == "plain" else 2 * (y.shape[0] - (layout != "packed"))
    s = (_whole("n", n),)
    window = s if size is None else (_whole("size", size),)
    return _inverse(y, _Target(s, window, (_whole("offset", offset),), layout, dtype, scale))


def irfft2(
    y: torch.Tensor,
    s: Sequence[int] | None = None,
    *,
    size: Sequence[int] | None = None,
    offset: Sequence[int] = (0, 0),
    layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
) -> torch.Tensor:
    """Real planes (..., h, w) of spectra ``y`` (complex64): the window of ``size`` = (h, w) at ``offset``.

    ``s`` = (n1, n2) is the size of the transform; only of plain spectra it has a default, with an even n2. ``scale``
    is by default 1 / (n1 n2). Of columns 0 and n2 / 2 only the Hermitian part counts, as with ``torch.fft.irfft2``.
    Otherwise as :func:`irfft`.
    """
    _check_spectrum(y, layout, 2)
    if s is None:
        if layout != "plain":
            raise ValueError(f"s=None: {layout} spectra do not tell the size of their planes, s=(n1, n2) would do")
        s = (y.shape[-2], 2 * (y.shape[-1] - 1))
    basis = _pair("s", s)
    window = basis if size is None else _pair("size", size)
    return _inverse(y, _Target(basis, window, _pair("offset", offset), layout, dtype, scale))


class _Target(NamedTuple):
    """What an inverse gives: windows of ``size`` at ``offset`` of transforms of size ``s``, times ``scale``."""

    s: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    scale: float | None

    @property
    def factor(self) -> float:
        """``scale``, or its default."""
        return 1.0 / math.prod(self.s) if self.scale is None else float(self.scale)


def _forward(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Forward.apply(x, s, offset, layout)  # type: ignore[no-untyped-call]
        return result
    return _spectra(x, s, offset, layout)


def _inverse(y: torch.Tensor, target: _Target) -> torch.Tensor:
    if y.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Inverse.apply(y, target)  # type: ignore[no-untyped-call]
        return result
    return _data(y, target)


class _Forward(torch.autograd.Function):
    """The adjoint is the unscaled inverse, of numbers divided by how often they stand in the full spectrum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
        ctx.given = s, x.shape[-len(s) :], offset, layout, x.dtype
        return _spectra(x, s, offset, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        s, size, offset, layout, dtype = ctx.given
        (gradient,) = gradients
        many = multiplicity(s, layout, gradient.dim() - _inner(s, layout), gradient.device)
        return _inverse(gradient / many, _Target(s, size, offset, layout, dtype, 1.0)), None, None, None


class _Inverse(torch.autograd.Function):
    """The adjoint is the forward transform, with numbers multiplied as often as they stand in the full spectrum."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, target: _Target) -> torch.Tensor:
        ctx.target = target
        return _data(y, target)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        target: _Target = ctx.target
        s, layout = target.s, target.layout
        (gradient,) = gradients
        spectra = _forward(gradient, s, target.offset, layout)
        many = multiplicity(s, layout, spectra.dim() - _inner(s, layout), spectra.device)
        return spectra * (many * target.factor), None


class _Kernel(NamedTuple):
    """What a transform of one shape and strides comes to: a launch by address, and the result's shape.

    Without a launch, operands with these strides are to be copied first.
    """

    launch: Callable[[int, int], None] | None
    shape: tuple[int, ...]


def _spectra(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    """By a kernel or through torch."""
    x = x.resolve_neg()
    found = _forward_kernel(x.device, Memory.of(x), s, offset, layout)
    if found is None:
        return _spectra_by_torch(x, s, offset, layout)
    if found.launch is None:
        return _spectra(x.contiguous(), s, offset, layout)
    y = x.new_empty(found.shape, dtype=torch.complex64)
    found.launch(x.data_ptr(), y.data_ptr())
    return y


def _data(y: torch.Tensor, target: _Target) -> torch.Tensor:
    """By a kernel or through torch."""
    y = y.resolve_conj().resolve_neg()
    found = _inverse_kernel(y.device, Memory.of(y), target)
    if found is None:
        return _data_by_torch(y, target)
    if found.launch is None:
        return _data(y.contiguous(), target)
    x = y.new_empty(found.shape, dtype=target.dtype)
    found.launch(y.data_ptr(), x.data_ptr())
    return x


@functools.lru_cache(maxsize=4096)
def _forward_kernel(
    device: torch.device, x: Memory, s: tuple[int, ...], offset: tuple[int, ...], layout: str
) -> _Kernel | None:
    """``None`` where the transform goes through torch. Raises for arguments that cannot be."""
    dims = len(s)
    _check_basis(s, layout)
    _check_window("x", x.shape[-dims:], offset, s)
    lead = x.shape[:-dims]
    if _unsupported(device, s) or 0 in lead:
        return None
    y = _dense(spectrum_shape(lead, s, layout), torch.complex64)
    # Along one element no step is taken.
    x = replace(x, strides=tuple(0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True)))
    near = all(step <= MOST_STRIDE for step in x.strides[-dims:])
    if not (near and _join(lead, x.strides[:-dims])):
        return _Kernel(None, y.shape)
    bound = _bind(x, y, s, offset, layout, inverse=False, factor=1.0)
    return _Kernel(bound.launch(device.index or 0), y.shape)


@functools.lru_cache(maxsize=4096)
def _inverse_kernel(device: torch.device, y: Memory, target: _Target) -> _Kernel | None:
    """``None`` where the transform goes through torch. Raises for arguments that cannot be."""
    s, size, offset, layout, dtype = target.s, target.size, target.offset, target.layout, target.dtype
    dims, plain = len(s), layout == "plain"
    _check_basis(s, layout)
    _check_window("size", size, offset, s)
    lead, strides = (y.shape[:-dims], y.strides[:-dims]) if plain else (y.shape[1:], y.strides[1:])
    if y.shape != (wanted := spectrum_shape(lead, s, layout)):
        raise ValueError(f"y has shape {y.shape}: {layout} spectra of size {_times(s)} have {wanted}")
    if dtype not in REALS:
        raise TypeError(f"dtype={dtype}: float32, float16 or bfloat16 would do")
    if _unsupported(device, s) or 0 in lead:
        return None
    x = _dense((*lead, *size), dtype)
    near = y.strides[-dims:] == dense(y.shape[-dims:]) if plain else y.strides[0] <= MOST_STRIDE
    if not (near and _join(lead, strides)):
        return _Kernel(None, x.shape)
    bound = _bind(x, y, s, offset, layout, inverse=True, factor=target.factor)
    return _Kernel(bound.launch(device.index or 0), x.shape)


def _bind(
    x: Memory, y: Memory, s: tuple[int, ...], offset: tuple[int, ...], layout: str, *, inverse: bool, factor: float
) -> launch.Bound:
    bind = fft1d.bind if len(s) == 1 else fft2d.bind
    return bind(x, y, s, offset, layout, inverse, None, factor)


def _dense(shape: tuple[int, ...], dtype: torch.dtype) -> Memory:
    """A new tensor's memory."""
    return Memory(shape, dense(shape), dtype)


def _join(lead: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether leading dimensions join into two, in a tensor with these strides and in one without gaps."""
    if strides == dense(lead):
        return True  # there may be too many all the same, which binding tells
    try:
        leading(lead, strides, dense(lead))
    except ValueError:
        return False
    return True


def _spectra_by_torch(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    dims = len(s)
    padding: list[int] = []
    for n, place, basis in zip(reversed(x.shape[-dims:]), reversed(offset), reversed(s), strict=True):
        padding += [place, basis - n - place]
    wide = torch.nn.functional.pad(x.float(), padding)
    if not x.numel():  # no signals, or empty ones, which torch's transforms do not take
        return torch.zeros(spectrum_shape(x.shape[:-dims], s, layout), dtype=torch.complex64, device=x.device)
    return from_plain(torch.fft.rfftn(wide, dim=tuple(range(-dims, 0))), s, layout)


def _data_by_torch(y: torch.Tensor, target: _Target) -> torch.Tensor:
    s, size, layout, dtype = target.s, target.size, target.layout, target.dtype
    plain = to_plain(y, s, layout)
    if not y.numel():
        return torch.zeros((*plain.shape[: -len(s)], *size), dtype=dtype, device=y.device)
    if len(s) == 2:
        # In two steps: of planes at once, libraries leave it open what a spectrum gives that is not Hermitian.
        plain = torch.fft.ifft(plain, dim=-2, norm="forward")
    real: torch.Tensor = torch.fft.irfft(plain, n=s[-1], norm="forward")
    for dim, (place, n) in enumerate(zip(target.offset, size, strict=True), real.dim() - len(s)):
        real = real.narrow(dim, place, n)
    return (real * target.factor).to(dtype).contiguous()


def _inner(s: tuple[int, ...], layout: str) -> int:
    """Dimensions of a spectrum that count frequencies."""
    return len(s) if layout == "plain" else 1


def _times(s: Sequence[int]) -> str:
    return "x".join(map(str, s))


def _check_real(x: torch.Tensor, dims: int) -> None:
    if x.dtype not in REALS:
        other = "; torch.fft transforms it" if x.dtype in (torch.float64, torch.complex64, torch.complex128) else ""
        raise TypeError(f"x is {x.dtype}: float32, float16 or bfloat16 would do{other}")
    if x.dim() < dims:
        raise ValueError(f"x has {x.dim()} dimensions: {dims} at least would do")


def _check_spectrum(y: torch.Tensor, layout: str, dims: int) -> None:
    if y.dtype != torch.complex64:
        raise TypeError(f"y is {y.dtype}: complex64 would do")
    if y.dim() < (needed := dims if known_layout(layout) == "plain" else 1):
        raise ValueError(f"y has {y.dim()} dimensions: {needed} at least would do")


def _check_basis(s: tuple[int, ...], layout: str) -> None:
    name, value = ("n", s[0]) if len(s) == 1 else ("s", s)
    if min(s) < 1:
        raise ValueError(f"{name}={value}: 1 at least would do")
    if known_layout(layout) == "packed" and any(n % 2 for n in s):
        raise ValueError(f"{name}={value}: packed spectra need even sizes")


def _check_window(name: str, window: Sequence[int], offset: tuple[int, ...], s: tuple[int, ...]) -> None:
    """A window must lie in the basis: beyond it a transform would wrap around."""
    for axis, (n, place, basis) in enumerate(zip(window, offset, s, strict=True)):
        if n < 0 or place < 0 or place + n > basis:
            what = ("length",) if len(s) == 1 else ("height", "width")
            raise ValueError(f"{name}: {what[axis]} {n} at offset={place} does not fit into a transform of {basis}")


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a whole number would do") from None


def _pair(name: str, value: Sequence[int]) -> tuple[int, ...]:
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: two numbers would do") from None
    return _whole(name, first), _whole(name, second)
