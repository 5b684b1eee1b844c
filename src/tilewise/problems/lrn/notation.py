"""Local response normalizations as text: ``lrn:n64c96s55x55k5`` has 64 images of 96 channels and a window of 5.

Behind the colon stand ``n`` the batch, ``c`` the channels, ``s`` the sizes in space and ``k`` the window's size. Where
they differ from torch's defaults, ``alpha``, ``beta`` and ``add`` follow, each behind a comma, as in
``lrn:n1c256s27x27k5,alpha=0.001,add=2.0``. ``add`` is what the sums begin with. Types, layout and device are not part
of it.
"""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.lrn.problem import LrnProblem

__all__ = ["format_lrn", "looks_like_lrn", "parse_lrn"]

FORM = re.compile(r"lrn:n(\d{1,18})c(\d{1,18})s(\d{1,18}(?:x\d{1,18}){0,7})k(\d{1,18})((?:,[a-z]+=[^,\s]{1,32})*)")
NUMBERS = {"alpha": "alpha", "beta": "beta", "add": "k"}
EXAMPLE = "text such as 'lrn:n64c96s55x55k5' or 'lrn:n64c96s55x55k5,alpha=0.001' would do"


def looks_like_lrn(text: str) -> bool:
    """Whether ``text`` is meant as a local response normalization, right or wrong, and not as a network.

    >>> looks_like_lrn("lrn:n2c3s4x5k3"), looks_like_lrn("alexnet")
    (True, False)
    """
    return text.strip().startswith("lrn:")


def parse_lrn(
    text: str, *, task: str = "inference", layout_name: str = "contiguous", dtype: str = "fp32", device: str = "cpu"
) -> LrnProblem:
    """The problem of the local response normalization ``text``.

    Raises ``ValueError`` naming what is wrong and what would do.

    >>> parse_lrn("lrn:n2c3s4x5k3").space
    (4, 5)
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"local response normalization {text[:200]!r}: {EXAMPLE}")
    batch, channels, space, size, rest = match.groups()
    numbers: dict[str, Any] = {}
    for word in rest.split(",")[1:]:
        name, _, number = word.partition("=")
        if name not in NUMBERS:
            raise ValueError(f"local response normalization {text!r}: has {name!r}; alpha, beta or add would do")
        if NUMBERS[name] in numbers:
            raise ValueError(f"local response normalization {text!r}: has {name} twice; once would do")
        try:
            numbers[NUMBERS[name]] = float(number)
        except ValueError:
            reason = f"local response normalization {text!r}: {name}={number}: a number would do"
            raise ValueError(reason) from None
    sizes = tuple(map(int, space.split("x")))
    return LrnProblem(
        int(batch),
        int(channels),
        sizes,
        int(size),
        **numbers,
        task=task,
        layout_name=layout_name,
        dtype=dtype,
        device=device,
    )


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
