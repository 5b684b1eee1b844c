"""Products as text, in the notation of oneDNN's benchdnn driver for ``matmul``: ``16x512:512x1024``.

Before the colon stand the sizes of the left operand, after it those of the right one, as they are multiplied: ``MxK``
and ``KxN``. Further sizes before them are those of a batch, equal on both sides: ``8x16x512:8x512x64``. A
bias and an activation follow as words: ``16x512:512x1024+bias+relu``, where benchdnn has an option. ``n"name"`` ends
the text. How the operands are stored, their types and the device are not part of it.
"""

from __future__ import annotations

from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.limits import INT64_MAX
from tilewise.problems.texts.gemm import looks_like_product, product_name, read_product

__all__ = ["format_product", "looks_like_product", "parse_product", "product_name"]


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
    said = read_product(text, activation)
    problem = GemmProblem(
        said.m,
        said.n,
        said.k,
        op,
        said.batch,
        dtype=dtype,
        precision=precision,
        bias=bias or said.bias,
        activation=said.activation,
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
