"""Local response normalizations as text: ``lrn:n64c96s55x55k5`` has 64 images of 96 channels and a window of 5.

Behind the colon stand ``n`` the batch, ``c`` the channels, ``s`` the sizes in space and ``k`` the window's size. Where
they differ from torch's defaults, ``alpha``, ``beta`` and ``add`` follow, each behind a comma, as in
``lrn:n1c256s27x27k5,alpha=0.001,add=2.0``. ``add`` is what the sums begin with. Types, layout and device are not part
of it.
"""

from __future__ import annotations

from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.texts.lrn import looks_like_lrn, read_lrn

__all__ = ["format_lrn", "looks_like_lrn", "parse_lrn"]


def parse_lrn(
    text: str, *, task: str = "inference", layout_name: str = "contiguous", dtype: str = "fp32", device: str = "cpu"
) -> LrnProblem:
    """The problem of the local response normalization ``text``.

    Raises ``ValueError`` naming what is wrong and what would do.

    >>> parse_lrn("lrn:n2c3s4x5k3").space
    (4, 5)
    """
    return LrnProblem(**read_lrn(text), task=task, layout_name=layout_name, dtype=dtype, device=device)


def format_lrn(problem: LrnProblem) -> str:
    """The text of a local response normalization; :func:`parse_lrn` reads it back.

    Types, layout and device are not part of it.

    >>> format_lrn(parse_lrn("lrn:n2c3s4x5k3"))
    'lrn:n2c3s4x5k3'
    """
    text = f"lrn:n{problem.batch}c{problem.channels}s{'x'.join(map(str, problem.space))}k{problem.size}"
    text += f",alpha={problem.alpha!r}" if problem.alpha != 1e-4 else ""
    text += f",beta={problem.beta!r}" if problem.beta != 0.75 else ""
    return text + (f",add={problem.k!r}" if problem.k != 1.0 else "")
