"""One matrix product per frequency, in the forms of Vasilache et al. 2014, section 3.3."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.problems.conv.problem import ConvProblem

__all__ = ["PRODUCTS", "STREAMS", "Multiply"]

STREAMS = 4
"""CUDA streams that the product ``streams`` uses."""
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], None]
"""``multiply(a, b, out, scale, add)``: ``out[i] = scale * a[i] @ b[i]``, or adds that, for every matrix."""


def _batched(p: ConvProblem) -> Multiply:
    """One call of the library's strided batched product, for many small matrices."""

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float, add: bool) -> None:
        torch.baddbmm(out, a, b, beta=1 if add else 0, alpha=scale, out=out)

    return multiply


def _looped(p: ConvProblem) -> Multiply:
    """One call for each matrix, for few large ones."""

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float, add: bool) -> None:
        for left, right, target in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
            torch.addmm(target, left, right, beta=1 if add else 0, alpha=scale, out=target)

    return multiply


def _streams(p: ConvProblem) -> Multiply:
    """The calls distributed over several CUDA streams, which wait for the current stream and are waited for."""
    looped = _looped(p)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: float, add: bool) -> None:
        current = torch.cuda.current_stream()
        for number, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                looped(a[number::STREAMS], b[number::STREAMS], out[number::STREAMS], scale, add)
        for stream in streams:
            current.wait_stream(stream)

    return multiply


PRODUCTS: dict[str, Callable[[ConvProblem], Multiply]] = {
    "batched": _batched,
    "looped": _looped,
    "streams": _streams,
}
"""Forms of the product by their names in configs."""
