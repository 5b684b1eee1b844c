"""Products as text, in the notation of oneDNN's benchdnn driver for ``matmul``: ``16x512:512x1024``.

Before the colon stand the sizes of the left operand, after it those of the right one, as they are multiplied: ``MxK``
and ``KxN``. Further sizes before them are those of a batch, equal on both sides: ``8x16x512:8x512x64``. A
bias and an activation follow as words: ``16x512:512x1024+bias+relu``, where benchdnn has an option. ``n"name"`` ends
the text. How the operands are stored, their types and the device are not part of it.
"""

from __future__ import annotations

import math
import re

from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.limits import INT64_MAX

__all__ = ["format_product", "looks_like_product", "parse_product", "product_name"]

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


def parse_product(
    text: str,
    *,
    op: str = "NN",
    dtype: str = "fp32",
    precision: str = "ieee",
    bias: bool = False,
    activation: str = "none",
    device: str = "cpu",
) -> GemmProblem:
    """The problem of the product ``text`` with dense operands stored as ``op`` says.

    Raises ``ValueError`` naming the sizes at fault and what would do.

    >>> problem = parse_product("2x3:3x4")
    >>> problem.m, problem.k, problem.n
    (2, 3, 4)
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
    problem = GemmProblem(
        left[-2],
        right[-1],
        left[-1],
        op,
        batch,
        dtype=dtype,
        precision=precision,
        bias=bias or "bias" in words,
        activation=activation,
        device=device,
    )
    largest = max(problem.nbytes(role) for role in problem.roles)
    if largest > INT64_MAX:
        raise ValueError(f"product {text!r}: one of its tensors has {largest} bytes, beyond any memory")
    return problem


def format_product(problem: GemmProblem, name: str = "") -> str:
    """The text of a product; :func:`parse_product` reads it back.

    Storage, types, bias and device are not part of it.

    >>> format_product(tilewise.GemmProblem(2, 4, 3))
    '2x3:3x4'
    """
    batch = f"{problem.batch}x" if problem.batch else ""
    text = f"{batch}{problem.m}x{problem.k}:{batch}{problem.k}x{problem.n}"
    if problem.activation != "none":
        text += f"+{problem.activation}"
    return text + (f'n"{name}"' if name else "")


def _scan(text: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str], str]:
    """The sizes of both operands, the words behind them, and the name. Raises ``ValueError`` for other forms."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"product {text!r}: not MxK:KxN with +bias or an activation (+relu) behind; {EXAMPLE}")
    left, right = (tuple(map(int, sizes.split("x"))) for sizes in match.groups()[:2])
    return left, right, match[3].split("+")[1:], (match[4] or "").strip("\"'")
