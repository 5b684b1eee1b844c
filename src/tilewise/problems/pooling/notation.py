"""Pooling as text: ``max_pool:n16c64i112x112k3x3s2x2p1x1`` has 16 images of 64 channels and windows of 3 by 3.

Before the colon stands ``max_pool`` or ``avg_pool``. Behind it each size follows its letter: ``n`` batch, ``c``
channels, ``i`` input, ``k`` kernel, and where they differ from the kernel, 0 and 1: ``s`` stride, ``p`` padding, ``d``
dilation. ``+ceil`` rounds the number of results up, ``+nopad`` leaves padding out of averages, and ``+divisor4``
divides every sum by 4. Task, layout, types and device are not part of it.
"""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.limits import INT64_MAX
from tilewise.problems.pooling.key import joined
from tilewise.problems.pooling.problem import PoolingProblem

__all__ = ["format_pooling", "looks_like_pooling", "parse_pooling"]

_NS = r"\d{1,18}(?:x\d{1,18}){0,2}"
FORM = re.compile(rf"(max|avg)_pool:((?:[a-z]{_NS})+)(\+ceil)?(\+nopad)?(?:\+divisor(\d{{1,18}}))?")
FIELDS = {
    "n": "batch", "c": "channels", "i": "space", "k": "kernel", "s": "stride", "p": "padding", "d": "dilation",
}  # fmt: skip
EXAMPLE = "text such as 'max_pool:n16c64i112x112k3x3s2x2p1x1' would do"


def looks_like_pooling(text: str) -> bool:
    """Whether ``text`` is meant as a pooling, right or wrong, and not as a network.

    >>> looks_like_pooling("avg_pool:n1c3i8k2"), looks_like_pooling("alexnet")
    (True, False)
    """
    return text.strip().startswith(("max_pool:", "avg_pool:"))


def parse_pooling(
    text: str,
    *,
    task: str = "inference",
    layout_name: str = "contiguous",
    dtype: str = "fp32",
    device: str = "cpu",
) -> PoolingProblem:
    """The problem of the pooling ``text``.

    Raises ``ValueError`` naming what is wrong and what would do.

    >>> parse_pooling("max_pool:n1c3i8x8k2x2").pooled_space
    (4, 4)
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"pooling {text!r}: not max_pool or avg_pool, a colon and sizes; {EXAMPLE}")
    sizes: dict[str, tuple[int, ...]] = {}
    for letter, numbers in re.findall(rf"([a-z])({_NS})", match[2]):
        if letter not in FIELDS:
            raise ValueError(f"pooling {text!r}: has {letter!r}; one of {', '.join(FIELDS)} would do")
        if letter in sizes:
            raise ValueError(f"pooling {text!r}: has {letter!r} twice; once would do")
        sizes[letter] = tuple(map(int, numbers.split("x")))
    missing = [letter for letter in "ncik" if letter not in sizes]
    if missing:
        raise ValueError(f"pooling {text!r}: has no {', '.join(missing)}; {EXAMPLE}")
    if any(len(sizes[letter]) > 1 for letter in "nc"):
        raise ValueError(f"pooling {text!r}: one number for n and one for c would do")
    fields: dict[str, Any] = {FIELDS[letter]: numbers for letter, numbers in sizes.items()}
    fields |= {"batch": sizes["n"][0], "channels": sizes["c"][0], "stride": sizes.get("s", sizes["k"])}
    fields |= {"ceil_mode": bool(match[3]), "count_include_pad": not match[4], "divisor": int(match[5] or 0)}
    problem = PoolingProblem(match[1], **fields, task=task, layout_name=layout_name, dtype=dtype, device=device)
    if max(problem.nbytes(role) for role in problem.roles) > INT64_MAX:
        raise ValueError(f"pooling {text!r}: one of its tensors is beyond any memory")
    return problem


def format_pooling(p: PoolingProblem) -> str:
    """The text of a pooling; :func:`parse_pooling` reads it back.

    >>> format_pooling(parse_pooling("avg_pool:n1c3i8k2"))
    'avg_pool:n1c3i8k2'
    """
    text = f"{p.op}_pool:n{p.batch}c{p.channels}i{joined(p.space)}k{joined(p.kernel)}"
    text += f"s{joined(p.stride)}" if p.stride != p.kernel else ""
    text += f"p{joined(p.padding)}" if any(p.padding) else ""
    text += f"d{joined(p.dilation)}" if any(d > 1 for d in p.dilation) else ""
    text += "+ceil" if p.ceil_mode else ""
    text += "" if p.count_include_pad else "+nopad"
    return text + (f"+divisor{p.divisor}" if p.divisor else "")
