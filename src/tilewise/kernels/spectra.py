"""Conversions between layouts of spectra by indexing, for devices and sizes without a kernel: slow but general.

``kernels.cuda.fft1d`` and ``fft2d`` say what the layouts hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["from_plain", "multiplicity", "to_plain"]


def from_plain(y: torch.Tensor, s: Sequence[int], layout: str) -> torch.Tensor:
    """Plain spectra of signals or planes of size ``s`` in another layout, contiguous. ``packed`` needs even sizes."""
    if layout == "plain":
        return y.contiguous()
    flat = y.flatten(-len(s)) if layout == "frequency_major" else _packed1(y) if len(s) == 1 else _packed2(y, *s)
    return flat.movedim(-1, 0).contiguous()


def to_plain(y: torch.Tensor, s: Sequence[int], layout: str) -> torch.Tensor:
    """Spectra in any layout as plain ones, which may share their memory."""
    if layout == "plain":
        return y
    flat = y.movedim(0, -1)
    if layout == "packed":
        return _unpacked1(flat) if len(s) == 1 else _unpacked2(flat, *s)
    return flat if len(s) == 1 else torch.unflatten(flat, -1, (s[0], s[1] // 2 + 1))


def multiplicity(s: Sequence[int], layout: str, leading: int, device: torch.device) -> torch.Tensor:
    """How often each number of a spectrum stands in the full one: 2 where its conjugate is left out, else 1.

    The result broadcasts against a spectrum with ``leading`` leading dimensions.
    """
    n = s[-1]
    if layout == "packed":
        many = torch.full((math.prod(s) // 2,), 2.0, dtype=torch.float32, device=device)
        # Numbers 0 and n / 2 hold two real frequencies each; in one dimension there is only the first.
        many[: n // 2 + 1 : n // 2] = 1.0
        return many.view(-1, *[1] * leading)
    many = torch.full((n // 2 + 1,), 2.0, dtype=torch.float32, device=device)
    many[0] = 1.0
    if n % 2 == 0:
        many[-1] = 1.0
    if layout == "plain":
        return many
    return many.repeat(s[0] if len(s) == 2 else 1).view(-1, *[1] * leading)


def _packed1(y: torch.Tensor) -> torch.Tensor:
    """Packed from plain spectra of signals, frequency last."""
    short = y[..., :-1].clone()
    short[..., 0] = torch.complex(y[..., 0].real, y[..., -1].real)
    return short


def _unpacked1(y: torch.Tensor) -> torch.Tensor:
    """Plain from packed spectra of signals, frequency last."""
    whole = torch.cat([y, y[..., :1]], -1)
    whole[..., 0] = y[..., 0].real
    whole[..., -1] = y[..., 0].imag
    return whole


def _packed2(y: torch.Tensor, n1: int, n2: int) -> torch.Tensor:
    """Packed from plain spectra of n1 x n2 planes, frequency last."""
    r, c = n1 // 2, n2 // 2
    rows = y.new_empty((*y.shape[:-2], r, n2))
    rows[..., : c + 1] = y[..., :r, :]
    # Y[k1, k2] for k2 = c + 1 .. n2 - 1 is the conjugate of Y[n1 - k1, n2 - k2].
    rows[..., 1:, c + 1 :] = y[..., r + 1 :, 1:c].flip(-2, -1).conj()
    rows[..., 0, c + 1 :] = y[..., r, 1:c]
    rows[..., 0, 0] = torch.complex(y[..., 0, 0].real, y[..., 0, c].real)
    rows[..., 0, c] = torch.complex(y[..., r, 0].real, y[..., r, c].real)
    return rows.flatten(-2)


def _unpacked2(y: torch.Tensor, n1: int, n2: int) -> torch.Tensor:
    """Plain from packed spectra of n1 x n2 planes, frequency last."""
    r, c = n1 // 2, n2 // 2
    rows = torch.unflatten(y, -1, (r, n2))
    plain = y.new_empty((*y.shape[:-1], n1, c + 1))
    plain[..., :r, :] = rows[..., : c + 1]
    plain[..., r + 1 :, 0] = rows[..., 1:, 0].flip(-1).conj()
    plain[..., r + 1 :, 1:] = rows[..., 1:, c:].flip(-2, -1).conj()
    plain[..., r, 1:c] = rows[..., 0, c + 1 :]
    for row, column in ((0, 0), (r, c)):
        plain[..., row, 0] = rows[..., 0, column].real
        plain[..., row, c] = rows[..., 0, column].imag
    return plain
