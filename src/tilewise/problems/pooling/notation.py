"""Pooling as text: ``max_pool:n16c64i112x112k3x3s2x2p1x1`` has 16 images of 64 channels and windows of 3 by 3.

Before the colon stands ``max_pool`` or ``avg_pool``. Behind it each size follows its letter: ``n`` batch, ``c``
channels, ``i`` input, ``k`` kernel, and where they differ from the kernel, 0 and 1: ``s`` stride, ``p`` padding, ``d``
dilation. ``+ceil`` rounds the number of results up, ``+nopad`` leaves padding out of averages, and ``+divisor4``
divides every sum by 4. Task, layout, types and device are not part of it.
"""

from __future__ import annotations

from tilewise.problems.limits import INT64_MAX
from tilewise.problems.pooling.key import joined
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.problems.texts.pooling import looks_like_pooling, read_pooling

__all__ = ["format_pooling", "looks_like_pooling", "parse_pooling"]


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
    op, fields = read_pooling(text)
    problem = PoolingProblem(op, **fields, task=task, layout_name=layout_name, dtype=dtype, device=device)
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
