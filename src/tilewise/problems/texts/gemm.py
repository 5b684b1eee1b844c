"""The text of a matrix product, as :mod:`tilewise.problems.gemm.notation` describes it, read without torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tilewise.problems.activation_names import ACTIVATIONS

__all__ = ["ProductText", "looks_like_product", "product_name", "read_product"]

_SIZES = r"\d+(?:x\d+)+"
_WORDS = "|".join(("bias", *ACTIVATIONS[1:]))
FORM = re.compile(rf"({_SIZES}):({_SIZES})((?:\+(?:{_WORDS}))*)_*(?:n(.*))?")
BEGINS = re.compile(r"\d+x[\dx]*:")
EXAMPLE = "text such as '16x512:512x1024' would do"


def looks_like_product(text: str) -> bool:
    """Whether ``text`` is meant as a product (sizes, then a colon), right or wrong, and not as a network's name.

    >>> looks_like_product("2x3:3x4"), looks_like_product("alexnet")
    (True, False)
    """
    return BEGINS.match(text.strip()) is not None


def product_name(text: str) -> str:
    """What stands after ``n`` in a product's text, without its quotes; empty when there is none.

    >>> product_name('2x3:3x4n"fc6"')
    'fc6'
    """
    return _scan(text)[3]


@dataclass(frozen=True, slots=True)
class ProductText:
    """What a product's text says: its sizes, ``batch`` being 0 where there is none, and what is done to the result."""

    m: int
    n: int
    k: int
    batch: int
    bias: bool
    activation: str


def read_product(text: str, activation: str = "none") -> ProductText:
    """What ``text`` says of a product, to which ``activation`` is applied unless the text names the same.

    Raises ``ValueError`` naming the sizes at fault and what would do. For example ``read_product("2x3:3x4").n`` is 4.
    """
    left, right, words, _ = _scan(text)
    applied = [word for word in words if word != "bias"]
    if len(applied) > 1 or (applied and activation not in ("none", applied[0])):
        raise ValueError(f"product {text!r}: one activation would do, not {', '.join([*applied, activation])}")
    activation = applied[0] if applied else activation
    if len(left) != len(right) or left[:-2] != right[:-2]:
        raise ValueError(
            f"product {text!r}: sizes of the batch differ, {left[:-2]} and {right[:-2]}; equal ones would do"
        )
    if left[-1] != right[-2]:
        raise ValueError(
            f"product {text!r}: rows of the left operand have {left[-1]} numbers and columns of the right one "
            f"{right[-2]}; as many would do"
        )
    batch = math.prod(left[:-2]) if len(left) > 2 else 0
    if batch == 0 and len(left) > 2:
        raise ValueError(f"product {text!r}: a batch of 0 is no product; sizes of at least 1 would do")
    return ProductText(left[-2], right[-1], left[-1], batch, "bias" in words, activation)


def _scan(text: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str], str]:
    """The sizes of both operands, the words behind them, and the name. Raises ``ValueError`` for other forms."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"product {text!r}: not MxK:KxN with +bias or an activation (+relu) behind; {EXAMPLE}")
    left, right = (tuple(map(int, sizes.split("x"))) for sizes in match.groups()[:2])
    return left, right, match[3].split("+")[1:], (match[4] or "").strip("\"'")
