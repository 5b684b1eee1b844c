"""What distinguishes one call of a linear layer from another, and the products that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.machine.device import device_name, matmul_precision
from tilewise.nn.layers.call import is_plain
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["LinearCall", "describe", "problems_of", "why_torchs"]


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer, as far as plans depend on it.

    ``shape`` is the input's, ``outputs`` the number of rows of the weight. ``needs`` says which of input, weight and
    bias need gradients.
    """

    shape: tuple[int, ...]
    outputs: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool, bool]
    deterministic: bool
    precision: str

    @property
    def rows(self) -> int:
        """Rows of the input as a matrix: all its dimensions but the last."""
        return math.prod(self.shape[:-1])


def why_torchs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> str:
    """Why the linear layer of these tensors is left to torch; empty where it may be planned."""
    tensors = (x, w) if b is None else (x, w, b)
    if not all(is_plain(t) for t in tensors):
        return "called with a tensor of a class of its own"
    if x.device.type not in ("cpu", "cuda") or any(t.device != x.device for t in tensors):
        return "called with tensors on several devices, or on one that is neither a CPU nor CUDA"
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        return "called under autocast, which keeps the casts of its weight"
    if x.dtype not in DTYPE_NAMES or any(t.dtype is not x.dtype for t in tensors):
        return f"computes in {x.dtype}, or in several types"
    fits = x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1]
    if not fits or (b is not None and b.shape != w.shape[:1]):
        return "called with sizes that do not fit"
    if x.numel() == 0 or w.numel() == 0:
        return "called with an empty tensor"
    if not all(t.is_contiguous() for t in tensors):
        return "called with a tensor that is not contiguous"
    return ""


def describe(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> LinearCall | None:
    """The call of these tensors; ``None`` where it is left to torch."""
    if why_torchs(x, w, b):
        return None
    grad = torch.is_grad_enabled()
    return LinearCall(
        shape=tuple(x.shape),
        outputs=w.shape[0],
        bias=b is not None,
        dtype=x.dtype,
        device=x.device,
        needs=(grad and x.requires_grad, grad and w.requires_grad, grad and b is not None and b.requires_grad),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=matmul_precision() if x.device.type == "cuda" and x.dtype is torch.float32 else "ieee",
    )


def problems_of(call: LinearCall) -> dict[str, GemmProblem]:
    """The products of a call by the name of the pass: the forward's, and those of the gradients that it needs.

    ``y = x w'`` is NT, ``dx = dy w`` NN and ``dw = dy' x`` TN, all of them over tensors as they lie.
    """
    rows, into, out = call.rows, call.shape[-1], call.outputs

    def product(m: int, n: int, k: int, op: str, bias: bool = False) -> GemmProblem:
        return GemmProblem(
            m,
            n,
            k,
            op,
            dtype=DTYPE_NAMES[call.dtype],
            precision=call.precision,
            bias=bias,
            alignment=(ALIGNMENT, ALIGNMENT, ALIGNMENT),
            device=device_name(call.device),
        )

    problems = {"forward": product(rows, out, into, "NT", call.bias)}
    if call.needs[0]:
        problems["grad_input"] = product(rows, into, out, "NN")
    if call.needs[1]:
        problems["grad_weight"] = product(out, into, rows, "TN")
    return problems
