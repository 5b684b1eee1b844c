"""The canonical text of a product's problem: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.gemm.layouts import ROLES, Product

__all__ = ["fields_of", "key_of"]

_N = r"(\d{1,18})"
_TENSORS = "".join(rf"{role}:{_N},(\d{{1,2}})" for role in ROLES)
KEY = re.compile(
    rf"gemm (NN|NT|TN|TT) (\w{{4}})(?:>(\w{{4}}))? (ieee|tf32) b{_N}m{_N}n{_N}k{_N} {_TENSORS}"
    r"( bias)?(?: (relu|gelu|gelu_tanh|silu|tanh|sigmoid))?( accumulate)? (cpu|cuda:[^\n]+)"
)
"""The form of a key. Behind each tensor's name come its leading dimension, 0 where it is dense, and its alignment."""


def key_of(p: Product) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    flags = ["bias"] * p.bias + [p.activation] * (p.activation != "none") + ["accumulate"] * p.accumulate
    dtypes = p.dtype if p.dtype == p.out_dtype else f"{p.dtype}>{p.out_dtype}"
    tensors = "".join(
        f"{role}:{leading},{align}" for role, leading, align in zip(ROLES, p.leading, p.alignment, strict=True)
    )
    sizes = f"b{p.batch}m{p.m}n{p.n}k{p.k}"
    return " ".join(["gemm", p.op, dtypes, p.precision, sizes, tensors, *flags, p.device])


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    op, dtype, out_dtype, precision, *numbers, bias, activation, accumulate, device = match.groups()
    batch, m, n, k, *tensors = map(int, numbers)
    return {
        "m": m,
        "n": n,
        "k": k,
        "op": op,
        "batch": batch,
        "dtype": dtype,
        "out_dtype": out_dtype or "",
        "precision": precision,
        "bias": bool(bias),
        "activation": activation or "none",
        "accumulate": bool(accumulate),
        "leading": tuple(tensors[::2]),
        "alignment": tuple(tensors[1::2]),
        "device": device,
    }
