"""References and memory for tests of transforms: spectra by torch in float64, and tensors with NaN all around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Guarded", "packed", "relative", "spectrum"]


class Guarded:
    """A tensor of given sizes, strides and offset inside a buffer of NaN."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, gap: int = 0, start: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """``order``: dimensions from the outermost to the innermost in memory; ``gap``: added to each but the last."""
        order = list(range(len(shape))) if order is None else list(order)
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = step
            step = step * shape[dim] + gap
        self.buffer = torch.full((step + start + 16,), float("nan"), dtype=dtype, device=device)
        self.tensor = self.buffer.as_strided(tuple(shape), tuple(strides), start)

    def fill(self, seed: int) -> Guarded:
        """Normal random numbers inside."""
        generator = torch.Generator().manual_seed(seed)
        self.tensor.copy_(torch.randn(self.tensor.shape, generator=generator, dtype=torch.float64))
        return self

    def untouched(self) -> bool:
        """Whether everything outside is still NaN."""
        buffer = self.buffer.clone()
        inside = buffer.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        inside.fill_(float("nan"))
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        return bool(torch.isnan(real).any(-1).all() if buffer.is_complex() else torch.isnan(real).all())


def packed(y: torch.Tensor, s: Sequence[int]) -> torch.Tensor:
    """``(..., n/2+1)`` as ``(..., n/2)``, ``(..., n1, n2/2+1)`` as ``(..., n1 * n2 / 2)``: see ``fft1d``, ``fft2d``."""
    if len(s) == 1:
        short = y[..., :-1].clone()
        short[..., 0] = torch.complex(y[..., 0].real, y[..., -1].real)
        return short
    n1, n2 = s
    r, c = n1 // 2, n2 // 2
    k1, k2 = torch.arange(n1, device=y.device)[:, None], torch.arange(n2, device=y.device)[None]
    whole = torch.where(k2 <= c, y[..., k1, k2.clamp(max=c)], y[..., (-k1) % n1, ((-k2) % n2).clamp(max=c)].conj())
    rows = whole[..., :r, :].clone()
    rows[..., 0, c + 1 :] = whole[..., r, 1:c]
    rows[..., 0, 0] = torch.complex(y[..., 0, 0].real, y[..., 0, c].real)
    rows[..., 0, c] = torch.complex(y[..., r, 0].real, y[..., r, c].real)
    return rows.flatten(-2)


def spectrum(x: torch.Tensor, s: Sequence[int], offset: Sequence[int], layout: str) -> torch.Tensor:
    """What a transform of planes or signals at ``offset`` has to give, in float64."""
    dims = len(s)
    wide = torch.zeros(*x.shape[: x.dim() - dims], *s, dtype=torch.float64, device=x.device)
    wide[(..., *(slice(o, o + n) for o, n in zip(offset, x.shape[-dims:], strict=True)))] = x.double()
    y = torch.fft.rfftn(wide, dim=tuple(range(-dims, 0)))
    if layout == "plain":
        return y
    flat = packed(y, s) if layout == "packed" else y.flatten(-dims)
    return flat.movedim(-1, 0)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error."""
    wide = torch.complex128 if got.is_complex() else torch.float64
    return float((got.to(wide) - want).norm() / want.norm())
