"""What distinguishes one call of a linear layer from another, and the products that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.machine.device import device_name, matmul_precision
from tilewise.nn.layers.call import autocast_dtype, is_plain, why_not_described
from tilewise.problems.base import ALIGNMENT, DTYPE_NAMES
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["LinearCall", "describe", "is_copied", "problems_of", "why_torchs"]

COPIED = 8
"""An input that torch would not copy is copied where the weight has so many times its numbers."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer, as far as plans depend on it.

    ``shape`` is the input's, ``outputs`` the number of rows of the weight. ``needs`` says which of input, weight and
    bias need gradients. ``turned`` says that the weight is the transpose of a contiguous matrix. ``alignment`` is that
    of input and weight in bytes, 16 at the most. ``autocast`` is the dtype to which autocast casts the tensors.
    ``copied`` says that input or bias are not contiguous and are copied first. ``activation`` is applied to the result.
    """

    shape: tuple[int, ...]
    outputs: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool, bool]
    deterministic: bool
    precision: str
    turned: bool = False
    alignment: tuple[int, int] = (ALIGNMENT, ALIGNMENT)
    autocast: torch.dtype | None = None
    copied: bool = False
    activation: str = "none"

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
        return why_not_described(x, w, b)
    autocast = autocast_dtype(x.device)
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= DTYPE_NAMES.keys() or (autocast is None and len(dtypes) > 1):
        return why_not_described(x, w, b) or f"computes in {x.dtype}, or in several types"
    if autocast is not None and autocast not in DTYPE_NAMES:
        return f"called under autocast to {autocast}"
    fits = x.dim() > 0 and w.dim() == 2 and x.shape[-1] == w.shape[1]
    if not fits or (b is not None and b.shape != w.shape[:1]):
        return "called with sizes that do not fit"
    if x.numel() == 0 or w.numel() == 0:
        return "called with an empty tensor"
    if not (w.is_contiguous() or w.t().is_contiguous()):
        return "called with a weight that is neither contiguous nor the transpose of such a matrix"
    if not (x.is_contiguous() or is_copied(x, w)):
        return "called with an input that is not contiguous, which torch computes without a copy"
    return ""


def is_copied(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether an input that is not contiguous is copied: where torch would do that, or where it is next to nothing.

    torch takes rows that lie apart as they are. Such an input is copied where it has few numbers beside the weight.
    """
    rows = zip(x.shape[1:-1], x.stride()[1:-1], x.stride()[:-2], strict=True)
    if any(outer != size * inner for size, inner, outer in rows):
        return True  # no matrix: torch copies it, or multiplies in a batch
    return x.stride(-1) == 1 and x.numel() * COPIED <= w.numel()


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
        turned=not w.is_contiguous(),
        alignment=(math.gcd(x.data_ptr(), ALIGNMENT), math.gcd(w.data_ptr(), ALIGNMENT)),
        autocast=autocast_dtype(x.device),
        copied=not (x.is_contiguous() and (b is None or b.is_contiguous())),
    )


def problems_of(call: LinearCall) -> dict[str, GemmProblem]:
    """The products of a call by the name of the pass: the forward's, and those of the gradients that it needs.

    ``y = x w'`` is NT, ``dx = dy w`` NN and ``dw = dy' x`` TN, all of them over tensors as they lie. Where the weight
    is the transpose of ``v``, they are ``y = x v``, ``dx = dy v'`` and ``dv = x' dy``.
    """
    rows, into, out = call.rows, call.shape[-1], call.outputs
    of_x, of_w = call.alignment

    def product(m: int, n: int, k: int, op: str, alignment: tuple[int, int], bias: bool = False) -> GemmProblem:
        return GemmProblem(
            m,
            n,
            k,
            op,
            dtype=DTYPE_NAMES[call.dtype],
            precision=call.precision,
            bias=bias,
            alignment=(*alignment, ALIGNMENT),
            device=device_name(call.device),
        )

    forward = product(rows, out, into, "NN" if call.turned else "NT", (of_x, of_w), call.bias)
    problems = {"forward": forward.changed(activation=call.activation)}
    if call.needs[0]:
        problems["grad_input"] = product(rows, into, out, "NT" if call.turned else "NN", (ALIGNMENT, of_w))
    if call.needs[1] and call.turned:
        problems["grad_weight"] = product(into, out, rows, "TN", (of_x, ALIGNMENT))
    elif call.needs[1]:
        problems["grad_weight"] = product(out, into, rows, "TN", (ALIGNMENT, of_x))
    return problems
