"""Batched Fourier transforms of short real signals and small real planes (Vasilache et al. 2014, section 5).

They differ from ``torch.fft`` in what a convolution wants: data are placed in a larger transform and results cut out of
it without a copy, spectra come in layouts that are ready for products, and half precision is read and written as it is.
On NVIDIA GPUs each is one pass over memory where :func:`unsupported` has nothing to say; everywhere else they go
through ``torch.fft``, with the same results in the same layouts. Arithmetic is in fp32.

``plain`` spectra are those of ``torch.fft``; ``frequency_major`` ones have the frequency first, ``packed`` ones also
leave out what follows by symmetry. The manual writes all three out. Gradients are supported, also of gradients;
forward-mode differentiation and ``torch.func`` are not.

>>> from tilewise.fft import LAYOUTS, SIZES, rfft
>>> LAYOUTS, 64 in SIZES[1]
(('plain', 'frequency_major', 'packed'), True)
>>> rfft(torch.ones(3), 4).shape
torch.Size([3])
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
"""Sizes of transforms that have a kernel, by number of dimensions. Of a plane any of them along each side."""
LEAST_CAPABILITY = (8, 0)
"""Least compute capability of a GPU: the kernels copy to shared memory asynchronously."""


def next_size(n: int, dims: int = 1) -> int:
    """The least size with a kernel that holds ``n`` elements along each of ``dims`` (1 or 2) dimensions.

    Raises ``ValueError`` where none is that large.

    >>> next_size(50)
    64
    """
    for size in SIZES[dims]:
        if size >= n:
            return size
    raise ValueError(f"n={n}: the largest size with a kernel is {SIZES[dims][-1]}")


def unsupported(device: torch.device | str, *s: int) -> list[str]:
    """Reasons why transforms of size ``s`` (one or two numbers) on ``device`` go through ``torch.fft``.

    Empty where there is a kernel for them. Raises ``ValueError`` for any other number of sizes.

    >>> unsupported("cpu", 64)
    ['kernels run on NVIDIA GPUs, not on cpu']
    """
    if len(s) not in SIZES:
        raise ValueError(f"s={s}: one number or two would do")
    return list(_unsupported(torch.device(device), s))


@functools.lru_cache(maxsize=1024)
def _unsupported(device: torch.device, s: tuple[int, ...]) -> tuple[str, ...]:
    """As :func:`unsupported`, kept for further calls."""
    sizes, reasons = SIZES[len(s)], []
    if any(n not in sizes for n in s):
        reasons.append(f"kernels have sizes {', '.join(map(str, sizes))}, not {'x'.join(map(str, s))}")
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
    """Spectra of real signals, each placed among zeros in a transform of size ``n``.

    ``x`` (..., length) is fp32, fp16 or bf16, of any strides and any number of leading dimensions. Each signal is put
    at place ``offset`` of ``n`` (by default its length). The result is complex64, contiguous and unscaled, as that of
    ``torch.fft.rfft``: (..., n // 2 + 1) in the ``plain`` layout, (n // 2 + 1, ...) ``frequency_major``, and (n // 2,
    ...) ``packed``, which needs an even n. Raises ``TypeError`` for other dtypes, and ``ValueError`` where a signal
    does not fit into ``n``: it is never cut or wrapped around.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> torch.allclose(rfft(x, 4), torch.fft.rfft(torch.tensor([1.0, 2.0, 3.0, 0.0])))
    True
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
    """Spectra of real planes, each placed among zeros in a transform of size ``s`` = (n1, n2).

    ``x`` is (..., h, w). Each plane's upper left corner is put at ``offset``; ``s`` defaults to (h, w). The result is
    complex64: (..., n1, n2 // 2 + 1) in the ``plain`` layout, (n1 * (n2 // 2 + 1), ...) ``frequency_major``, and (n1 *
    n2 // 2, ...) ``packed``, which needs even sizes. Dtypes and errors are those of :func:`rfft`.

    >>> rfft2(torch.zeros(2, 3, 5, 6), (8, 8), layout="frequency_major").shape
    torch.Size([40, 2, 3])
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
    """Real signals of spectra: ``size`` elements of the inverse transform from ``offset`` on.

    ``y`` is complex64 in one of the layouts of :func:`rfft`. ``n`` is the size of the transform, by default the even
    one that ``y`` would have; ``size`` defaults to ``n``. The result (..., size) has ``dtype`` fp32, fp16 or bf16. It
    is scaled by ``scale``, by default 1 / n as by ``torch.fft.irfft``; like there, the imaginary parts of frequencies
    that are real do not count. Raises ``TypeError`` for other dtypes, and ``ValueError`` where ``y`` has not the shape
    for ``n`` or the window runs out of ``n``.

    >>> irfft(rfft(torch.tensor([1.0, 2.0, 3.0]), 4), 4, size=3).round()
    tensor([1., 2., 3.])
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
    """Real planes of spectra: the window of ``size`` = (h, w) at ``offset`` of the inverse transform.

    ``y`` is complex64 in one of the layouts of :func:`rfft2`. ``s`` = (n1, n2) is the size of the transform; it has a
    default, with an even n2, only for plain spectra. ``size`` defaults to ``s``, ``scale`` to 1 / (n1 n2). The result
    is (..., h, w). Of columns 0 and n2 / 2 only the Hermitian part counts, as with ``torch.fft.irfft2``. Dtypes and
    errors are those of :func:`irfft`; ``ValueError`` is also raised where ``s`` is needed and missing.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> torch.allclose(irfft2(rfft2(x, (4, 4)), (4, 4), size=(2, 3)), x, atol=1e-5)
    True
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
    """The result of an inverse: windows of ``size`` at ``offset`` of transforms of size ``s``, times ``scale``."""

    s: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    scale: float | None

    @property
    def factor(self) -> float:
        """The scale, with its default filled in."""
        return 1.0 / math.prod(self.s) if self.scale is None else float(self.scale)


def _forward(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    """The transform, recorded for autograd where ``x`` needs a gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Forward.apply(x, s, offset, layout)  # type: ignore[no-untyped-call]
        return result
    return _spectra(x, s, offset, layout)


def _inverse(y: torch.Tensor, target: _Target) -> torch.Tensor:
    """The inverse transform, recorded for autograd where ``y`` needs a gradient."""
    if y.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Inverse.apply(y, target)  # type: ignore[no-untyped-call]
        return result
    return _data(y, target)


class _Forward(torch.autograd.Function):
    """The transform for autograd.

    Its adjoint is the unscaled inverse of the gradient, divided by how often each number stands in the full spectrum.
    """

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
    """The inverse transform for autograd.

    Its adjoint is the transform of the gradient, multiplied by how often each number stands in the full spectrum.
    """

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
    """The kernel for tensors of one shape and strides: its launch by address, and the result's shape.

    Without a launch, the operand must first be copied to be contiguous.
    """

    launch: Callable[[int, int], None] | None
    shape: tuple[int, ...]


def _spectra(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    """The transform, by a kernel or through torch."""
    x = x.resolve_neg()
    kernel = _forward_kernel(x.device, Memory.of(x), s, offset, layout)
    if kernel is None:
        return _spectra_by_torch(x, s, offset, layout)
    if kernel.launch is None:
        return _spectra(x.contiguous(), s, offset, layout)
    y = x.new_empty(kernel.shape, dtype=torch.complex64)
    kernel.launch(x.data_ptr(), y.data_ptr())
    return y


def _data(y: torch.Tensor, target: _Target) -> torch.Tensor:
    """The inverse transform, by a kernel or through torch."""
    y = y.resolve_conj().resolve_neg()
    kernel = _inverse_kernel(y.device, Memory.of(y), target)
    if kernel is None:
        return _data_by_torch(y, target)
    if kernel.launch is None:
        return _data(y.contiguous(), target)
    x = y.new_empty(kernel.shape, dtype=target.dtype)
    kernel.launch(y.data_ptr(), x.data_ptr())
    return x


@functools.lru_cache(maxsize=4096)
def _forward_kernel(
    device: torch.device, x: Memory, s: tuple[int, ...], offset: tuple[int, ...], layout: str
) -> _Kernel | None:
    """The kernel, or ``None`` where the transform goes through torch. Raises for bad arguments."""
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
    """The kernel, or ``None`` where the inverse goes through torch. Raises for bad arguments."""
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
    """The kernel for one or two dimensions, not yet compiled."""
    bind = fft1d.bind if len(s) == 1 else fft2d.bind
    return bind(x, y, s, offset, layout, inverse, None, factor)


def _dense(shape: tuple[int, ...], dtype: torch.dtype) -> Memory:
    """The memory of a new contiguous tensor."""
    return Memory(shape, dense(shape), dtype)


def _join(lead: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether leading dimensions merge into two, both in a tensor with these strides and in a contiguous one."""
    if strides == dense(lead):
        return True  # there may be too many all the same, which binding tells
    try:
        leading(lead, strides, dense(lead))
    except ValueError:
        return False
    return True


def _spectra_by_torch(x: torch.Tensor, s: tuple[int, ...], offset: tuple[int, ...], layout: str) -> torch.Tensor:
    """The transform through ``torch.fft``."""
    dims = len(s)
    padding: list[int] = []
    for n, place, basis in zip(reversed(x.shape[-dims:]), reversed(offset), reversed(s), strict=True):
        padding += [place, basis - n - place]
    wide = torch.nn.functional.pad(x.float(), padding)
    if not x.numel():  # no signals, or empty ones, which torch's transforms do not take
        return torch.zeros(spectrum_shape(x.shape[:-dims], s, layout), dtype=torch.complex64, device=x.device)
    return from_plain(torch.fft.rfftn(wide, dim=tuple(range(-dims, 0))), s, layout)


def _data_by_torch(y: torch.Tensor, target: _Target) -> torch.Tensor:
    """The inverse transform through ``torch.fft``."""
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
    """How many dimensions of a spectrum count frequencies."""
    return len(s) if layout == "plain" else 1


def _times(s: Sequence[int]) -> str:
    """Sizes as text, such as ``8x8``."""
    return "x".join(map(str, s))


def _check_real(x: torch.Tensor, dims: int) -> None:
    """Raise for an operand of a transform with a wrong dtype or too few dimensions."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}: a tensor would do, such as torch.as_tensor(x)")
    if x.dtype not in REALS:
        hint = "; torch.fft transforms it" if x.dtype in (torch.float64, torch.complex64, torch.complex128) else ""
        raise TypeError(f"x is {x.dtype}: float32, float16 or bfloat16 would do{hint}")
    if x.dim() < dims:
        raise ValueError(f"x has {x.dim()} dimensions: {dims} at least would do")


def _check_spectrum(y: torch.Tensor, layout: str, dims: int) -> None:
    """Raise for an operand of an inverse with a wrong dtype or too few dimensions."""
    if y.dtype != torch.complex64:
        raise TypeError(f"y is {y.dtype}: complex64 would do")
    if y.dim() < (needed := dims if known_layout(layout) == "plain" else 1):
        raise ValueError(f"y has {y.dim()} dimensions: {needed} at least would do")


def _check_basis(s: tuple[int, ...], layout: str) -> None:
    """Raise ``ValueError`` for sizes that are not positive, or not even where spectra are packed."""
    name, value = ("n", s[0]) if len(s) == 1 else ("s", s)
    if min(s) < 1:
        raise ValueError(f"{name}={value}: 1 at least would do")
    if known_layout(layout) == "packed" and any(n % 2 for n in s):
        raise ValueError(f"{name}={value}: packed spectra need even sizes")


def _check_window(name: str, window: Sequence[int], offset: tuple[int, ...], s: tuple[int, ...]) -> None:
    """Raise ``ValueError`` for a window that leaves the basis: beyond it a transform would wrap around."""
    for axis, (n, place, basis) in enumerate(zip(window, offset, s, strict=True)):
        if n < 0 or place < 0 or place + n > basis:
            names = ("length",) if len(s) == 1 else ("height", "width")
            raise ValueError(f"{name}: {names[axis]} {n} at offset={place} does not fit into a transform of {basis}")


def _whole(name: str, value: int) -> int:
    """``value`` as a whole number. Raises ``TypeError`` naming the argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a whole number would do") from None


def _pair(name: str, value: Sequence[int]) -> tuple[int, ...]:
    """``value`` as two whole numbers. Raises ``ValueError`` or ``TypeError`` naming the argument."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: two numbers would do") from None
    return _whole(name, first), _whole(name, second)
